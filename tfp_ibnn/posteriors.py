"""Posteriors over a layer's multiplicative noise z, and the named recipes."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from tfp_ibnn import _checks, _constraints
from tfp_ibnn._random_state import SavesRandomState
from tfp_ibnn.backend import SeedGenerator, Tensor, inner, mean, tfb, tfd
from tfp_ibnn.flows import (
    Affine,
    Flow,
    GlowStep,
    InverseAutoregressive,
    InvertibleConv1x1,
    Planar,
    Radial,
    Sylvester,
)
from tfp_ibnn.noise import Pass

__all__ = [
    "Draw",
    "FlowPosterior",
    "MixturePosterior",
    "NormalAffine",
    "NormalGlowStep",
    "NormalIAF",
    "NormalInvConv",
    "NormalPlanar1d",
    "NormalRadial",
    "NormalSylvester",
    "Posterior",
]

_FIXED_PAIRS = 64
_LOG_2_PI = math.log(2 * math.pi)
_MOST_FLOWS = 1000  # more would take minutes to make, and nobody has asked for as many


class Draw(NamedTuple):
    """Draws of z (..., channels), with what they say of KL and entropy, in nats.

    `kl` and `entropy` are estimates, one a draw, or closed forms, which are scalars.
    """

    z: Tensor
    kl: Tensor
    entropy: Tensor


class Posterior(SavesRandomState, keras.layers.Layer):
    """Base of all posteriors q(z), with the prior p(z) = N(prior_loc, prior_scale^2) per channel.

    A new posterior is a subclass with `build`, `transform`, `mean` and `distribution`. The one
    given to a layer is a template: each layer takes a copy, built for its own channels.

    Args:
        prior_scale: standard deviation of the prior.
        prior_loc: mean of the prior.
        learn_prior_scale: train the prior's scale along with the posterior, one a layer.
        beta: weight of the KL in the loss; 1 is the ELBO. Kept in a variable of that name.
        gamma: weight of the entropy that is subtracted from the loss; 0 is the ELBO.
        seed: of the posterior's noise. The first layer that takes a copy has this seed, each later
            one a seed derived from it, so that layers of one template draw different noise.
    """

    components = 1
    """Number of mixture components that `transform` chooses from."""

    shared_components = False
    """Whether the component index is common to all layers of a pass."""

    def __init__(
        self,
        *,
        prior_scale: float = 0.5,
        prior_loc: float = 1.0,
        learn_prior_scale: bool = False,
        beta: float = 1.0,
        gamma: float = 0.0,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs["dtype"] = _checks.full_precision(kwargs.get("dtype"))
        super().__init__(**kwargs)
        self.prior_scale = _scale("prior_scale", prior_scale)
        self.prior_loc = _checks.moderate("prior_loc", prior_loc)
        self.learn_prior_scale = bool(learn_prior_scale)
        self.initial_beta = _checks.non_negative("beta", beta)
        self.gamma = _checks.non_negative("gamma", gamma)
        self.seed = seed
        self.seed_generator = SeedGenerator(seed)
        self._layers_served = 0
        self.channels: int | None = None

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Add beta and the prior's scale; call this first."""
        self.channels = _checks.channels_of(type(self).__name__, input_shape)
        constant = keras.initializers.Constant
        self.beta = self._add_parameter("beta", (), constant(self.initial_beta), trainable=False)
        if self.learn_prior_scale:
            raw = constant(_constraints.inverse_scale(self.prior_scale))
            self.raw_prior_scale = self._add_parameter("raw_prior_scale", (), raw)

    def prior(self) -> tfd.Distribution:
        """Return the prior, with event shape (channels,)."""
        ones = ops.ones((self.channels,), dtype=self.dtype)
        return _normal(self.prior_loc * ones, self._prior_scale() * ones)

    def transform(
        self, noise: Tensor, component: Tensor | None = None, training: bool = False
    ) -> Draw:
        """Turn standard normal noise (..., channels) into draws of z, with KL and entropy.

        Args:
            noise: standard normal.
            component: mixture component of each draw, integers that broadcast against the leading
                axes of `noise`; only for posteriors of several components.
            training: whether this is a training step.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `transform`.")

    def mean(self) -> Tensor:
        """Return the mean of z, (channels,)."""
        raise NotImplementedError(f"{type(self).__name__} must define `mean`.")

    def distribution(self) -> tfd.Distribution:
        """Return q(z), with event shape (channels,)."""
        raise NotImplementedError(f"{type(self).__name__} must define `distribution`.")

    @property
    def has_cheap_mean(self) -> bool:
        """Whether `mean` is a closed form."""
        return True

    @property
    def is_centered(self) -> bool:
        """Whether z = loc + scale * noise; the posterior then has a method `loc_and_scale`."""
        return False

    def fixed_noise(self, training: bool = False) -> np.ndarray | None:
        """Return noise (draws, channels) whose draws of z have `mean` as their average.

        None if there is no such noise, as where `mean` is a closed form.

        Args:
            training: whether the draws are made in a training step.
        """
        del training
        return None

    def sample_and_kl(self, sample_shape: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """Draw z of shape sample_shape + (channels,); return it with its KL from the prior.

        The KL is a scalar where it has a closed form, else an estimate for each draw. No inverse is
        computed.
        """
        draw = self._draw(sample_shape)
        return draw.z, draw.kl

    def entropy(self) -> Tensor:
        """Return the entropy of z in nats: exact where it has a closed form, else an estimate."""
        return mean(self.summary().entropy)

    def summary(self) -> Draw:
        """Return a fixed set of draws (draws, channels), the same for the same weights."""
        component = None
        if self.components > 1:
            component = np.arange(2 * _FIXED_PAIRS, dtype="int32") // 2 % self.components
        return self.transform(ops.convert_to_tensor(self._fixed_noise()), component)

    def loss(self, draw: Draw) -> Tensor:
        """Return what a draw adds to the loss before division by the number of examples."""
        loss = self.beta * draw.kl
        return loss - self.gamma * draw.entropy if self.gamma else loss

    def copy(self, **changes: Any) -> "Posterior":
        """Return an unbuilt posterior of the same configuration, but for the changes."""
        return type(self).from_config({**self.get_config(), **changes})

    def copy_for_layer(self, dtype: str, seed: int | None = None) -> "Posterior":
        """Return the unbuilt copy that a layer takes of this template.

        Args:
            dtype: of the copy.
            seed: of the copy; None takes the next of this template, if it has a seed.
        """
        if seed is None and self.seed is not None:
            seed = self.seed
            if self._layers_served:  # far from the seeds that users choose, which lie close
                words = np.random.SeedSequence((seed % 2**64, self._layers_served))
                seed = int(words.generate_state(1)[0] >> 1)
            self._layers_served += 1
        copy = self.copy(name="posterior", dtype=dtype, seed=seed)
        copy._layers_served = 1  # by its own layer, should it become a template in turn
        return copy

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        config = {
            "prior_scale": self.prior_scale,
            "prior_loc": self.prior_loc,
            "learn_prior_scale": self.learn_prior_scale,
            "beta": self.initial_beta,
            "gamma": self.gamma,
            "seed": self.seed,
        }
        return {**super().get_config(), **config}

    def get_build_config(self) -> None:
        """Leave building to the layer, so that weight paths are the same after loading."""
        return None

    def _add_parameter(
        self, name: str, shape: tuple[int, ...], initializer: Any, trainable: bool = True
    ) -> keras.Variable:
        return self.add_weight(
            shape=shape, initializer=initializer, trainable=trainable, autocast=False, name=name
        )

    def _prior_scale(self) -> Tensor:
        if self.learn_prior_scale:
            return _constraints.scale(self.raw_prior_scale)
        return ops.convert_to_tensor(self.prior_scale, dtype=self.dtype)

    # These densities are written out: TFP's objects, from which the tests take the same numbers,
    # take four times as many operations, and most layers' operations are so small that it counts.

    def _gaussian(self, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return KL and entropy (...,) of diagonal Gaussians (..., channels)."""
        prior_scale = self._prior_scale()
        log_scale = ops.log(scale)
        ratio = log_scale - ops.log(prior_scale)
        distance = (loc - self.prior_loc) / prior_scale
        kl = ops.sum((distance * distance + ops.expm1(2 * ratio)) / 2 - ratio, axis=-1)
        if type(self).prior is not Posterior.prior:
            kl = tfd.kl_divergence(_normal(loc, scale), self.prior())
        return kl, ops.sum(log_scale, axis=-1) + self.channels * (_LOG_2_PI + 1) / 2

    def _log_prior(self, z: Tensor) -> Tensor:
        """Return the prior's log-density (...,) at z (..., channels)."""
        if type(self).prior is not Posterior.prior:
            return self.prior().log_prob(z)
        scale = self._prior_scale()
        return _log_normal((z - self.prior_loc) / scale) - self.channels * ops.log(scale)

    def _draw(self, sample_shape: tuple[int, ...]) -> Draw:
        if not self.built:
            raise ValueError(
                f"{type(self).__name__} is not built: call `build((channels,))` first, or use the "
                "posterior of a layer."
            )
        count, noise = int(np.prod(sample_shape, dtype=int)), Pass()
        shape = (*sample_shape, self.channels)
        normal = noise.normal(count, (self.channels,), self.dtype, self.seed_generator)
        component = None
        if self.components > 1:
            component = noise.component(self.components, count, self.seed_generator, shared=False)
            component = ops.reshape(component, sample_shape)
        return self.transform(ops.reshape(normal, shape), component)

    def _fixed_noise(self) -> np.ndarray:
        """Return antithetic pairs of standard normal noise, always the same."""
        half = np.random.default_rng(0).standard_normal((_FIXED_PAIRS, self.channels))
        return np.stack([half, -half], axis=1).reshape(-1, self.channels).astype(self.dtype)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class FlowPosterior(Posterior):
    """A normalizing flow on standard normal noise: z = loc + scale * NF(eps).

    log q(z) = log N(eps; 0, 1) - sum_i log|det J_i| - sum_c log scale_c. Without flows this is a
    learnable Gaussian, whose KL and entropy are closed forms; with flows both are estimated from
    the draws of the pass, forward only.

    With the affine map last, a rotation leaves the noise as it is, and every flow of this library
    starts with q = N(prior_loc, initial_scale^2): at KL 0 if `initial_scale` equals `prior_scale`.

    Args:
        flows: flows, applied in order; an empty sequence gives a Gaussian. They are copied.
        initial_scale: scale of z at the start; None takes `prior_scale`. A small one keeps a
            trained network's accuracy when it is converted.
        affine: "last", or "first" for z = NF(loc + scale * eps), the order of the original report.
        components: number of Gaussians in the base distribution. Above 1, eps is drawn from an
            equally weighted mixture with learned means and scales, so that z can have many modes.
        shared_components: draw one component index for all layers of a pass instead of one a layer.
            The layers are then dependent, and the sum of their KLs, each given the index, is an
            upper bound of the joint KL, loose by at most log(components) in all.
        **kwargs: those of `Posterior`.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> posterior = ibnn.FlowPosterior([ibnn.flows.Planar(), ibnn.flows.Planar()])
        >>> posterior.build((3,))
        >>> z, kl = posterior.sample_and_kl((1000,))
        >>> bool(abs(keras.ops.mean(kl)) < 1e-4)
        True
    """

    def __init__(
        self,
        flows: Sequence[Flow] = (),
        *,
        initial_scale: float | None = None,
        affine: str = "last",
        components: int = 1,
        shared_components: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not isinstance(flows, Sequence) or not all(isinstance(flow, Flow) for flow in flows):
            raise ValueError(
                f"`flows` must be a list of flows such as [ibnn.flows.Planar()]; got {flows!r}."
            )
        for flow in flows:
            if flow.condition_size is not None or flow.event_ndims != 1:
                raise ValueError(
                    "`flows` of a posterior must have condition_size=None and event_ndims=1, since "
                    f"z is a vector without a condition; got {type(flow).__name__} with "
                    f"condition_size={flow.condition_size} and event_ndims={flow.event_ndims}."
                )
        self.flows = [_copy_flow(flow, position, self.dtype) for position, flow in enumerate(flows)]
        self.initial_scale = initial_scale
        self.order = _checks.one_of("affine", affine, ("last", "first"))
        self.components = _checks.positive_integer("components", components, _checks.LARGEST_SIZE)
        self.shared_components = bool(shared_components)
        self.affine = Affine(
            initial_shift=self.prior_loc,
            initial_scale=self.prior_scale
            if initial_scale is None
            else _scale("initial_scale", initial_scale),
            dtype=self.dtype,
            name="affine",
        )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Build the flows and the base distribution."""
        super().build(input_shape)
        for flow in self._chain():
            flow.build(input_shape)
        if self.components > 1:
            # Components of variance 1 - spread^2 around means of variance spread^2: 1 in all.
            spread = 0.5
            shape = (self.components, self.channels)
            raw = _constraints.inverse_scale((1 - spread**2) ** 0.5)
            self.base_loc = self._add_parameter(
                "base_loc", shape, keras.initializers.RandomNormal(stddev=spread)
            )
            self.base_raw_scale = self._add_parameter(
                "base_raw_scale", shape, keras.initializers.Constant(raw)
            )

    def distribution(self) -> tfd.TransformedDistribution:
        """Return q(z), with event shape (channels,)."""
        # A chain applies its last element first.
        chain = tfb.Chain([flow.bijector() for flow in reversed(self._chain())])
        return tfd.TransformedDistribution(self._base(), chain)

    def transform(
        self, noise: Tensor, component: Tensor | None = None, training: bool = False
    ) -> Draw:
        """Turn standard normal noise (..., channels) into draws of z, with KL and entropy."""
        noise = ops.convert_to_tensor(noise, dtype=self.dtype)
        if self._is_gaussian:
            affine = self.affine.bijector()
            z, _ = affine.forward_and_log_det(noise)
            return Draw(z, *self._gaussian(affine.shift, affine.scale))
        z, log_q = self._from_base(noise, component)
        for flow in self._chain():
            z, log_det = flow.forward_and_log_det(z, training=training)
            log_q = log_q - log_det
        return Draw(z, log_q - self._log_prior(z), -log_q)

    def mean(self) -> Tensor:
        """Return the mean of z, (channels,): exact for linear flows, else over antithetic draws.

        The draws are always the same, so the mean is a function of the weights; a flow that is odd,
        as all are at the start, has its exact mean.
        """
        if self._is_gaussian:
            return ops.convert_to_tensor(self.affine.shift)
        if self.has_cheap_mean:
            center = ops.zeros((self.channels,), dtype=self.dtype)
            if self.components > 1:
                center = mean(ops.convert_to_tensor(self.base_loc), axis=0)
            for flow in self._chain():
                center = flow.bijector().forward(center)
            return center
        noise = ops.convert_to_tensor(self._fixed_noise())
        if self.components == 1:
            return mean(self.transform(noise).z, axis=0)
        every = np.arange(self.components, dtype="int32")
        return mean(self.transform(noise[:, None, :], every).z, axis=(0, 1))

    def fixed_noise(self, training: bool = False) -> np.ndarray | None:
        """Return the noise whose draws `mean` averages, if it does so, over one component.

        Flows with their own `forward_and_log_det` may look at all draws of a training step
        together; then there must be no others among them.
        """
        joint = Flow.forward_and_log_det
        alone = not training or all(type(f).forward_and_log_det is joint for f in self.flows)
        if self.has_cheap_mean or self.components > 1 or not (alone and self._is_plain):
            return None
        return self._fixed_noise()

    @property
    def has_cheap_mean(self) -> bool:
        """Whether `mean` is a closed form: no flow, or linear ones only."""
        return all(flow.is_linear for flow in self.flows)

    @property
    def is_centered(self) -> bool:
        """Whether z = loc + scale * noise, which makes it a Gaussian."""
        return self._is_gaussian and self._is_plain

    def loc_and_scale(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation (channels,) of a Gaussian posterior."""
        affine = self.affine.bijector()
        return affine.shift, affine.scale

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        config = {
            "flows": [keras.saving.serialize_keras_object(flow) for flow in self.flows],
            "initial_scale": self.initial_scale,
            "affine": self.order,
            "components": self.components,
            "shared_components": self.shared_components,
        }
        return {**super().get_config(), **config}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "FlowPosterior":
        """Return a posterior from what `get_config` gave."""
        flows = [
            flow if isinstance(flow, Flow) else keras.saving.deserialize_keras_object(flow)
            for flow in config["flows"]
        ]
        return cls(**{**config, "flows": flows})

    def copy(self, **changes: Any) -> "FlowPosterior":
        """Return an unbuilt posterior of the same configuration, but for the changes."""
        # The flows go by as objects: their classes need not be registered for a copy.
        return super().copy(**{"flows": self.flows, **changes})

    @property
    def _is_plain(self) -> bool:
        """Whether no subclass has another way to draw z, or another mean."""
        methods = (type(self).transform, type(self).mean)
        return methods == (FlowPosterior.transform, FlowPosterior.mean)

    @property
    def _is_gaussian(self) -> bool:
        return not self.flows and self.components == 1

    def _chain(self) -> list[Flow]:
        """Return all maps in the order in which they are applied."""
        return [self.affine, *self.flows] if self.order == "first" else [*self.flows, self.affine]

    def _base(self) -> tfd.Distribution:
        if self.components == 1:
            zeros = ops.zeros((self.channels,), dtype=self.dtype)
            return _normal(zeros, ops.ones_like(zeros))
        loc, scale = ops.convert_to_tensor(self.base_loc), _constraints.scale(self.base_raw_scale)
        return _equal_mixture(loc, scale)

    def _from_base(self, noise: Tensor, component: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return draws of the base distribution and their log-density."""
        if self.components == 1:
            return noise, _log_normal(noise)
        component = _checked_component(component)
        loc = ops.take(self.base_loc, component, axis=0)
        scale = ops.take(_constraints.scale(self.base_raw_scale), component, axis=0)
        z = loc + scale * noise
        q = _normal(loc, scale) if self.shared_components else self._base()
        return z, q.log_prob(z)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class MixturePosterior(Posterior):
    """K diagonal Gaussians a layer, the component index shared by all layers: iBNN's posterior.

    The examples of a batch take the components in turn. The KL is the mean of the
    components' closed forms, an upper bound of the mixture's, loose by at most log K for all layers
    together; the entropy, likewise, is the mean of the components'.

    The component means start around `prior_loc` and average to it exactly.

    Args:
        components: K.
        mean_spread: standard deviation of the component means at the start.
        initial_scale: mean of the components' scales at the start.
        scale_spread: standard deviation of those scales at the start.
        kl: "bound", or "averaged" for the KL of the Gaussian that the average of one draw from each
            component has. The authors' code used that; it is no bound.
        **kwargs: those of `Posterior`.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> posterior = ibnn.MixturePosterior(components=4)
        >>> posterior.build((3,))
        >>> posterior.sample_and_kl((10,))[0].shape[-1]
        3

    References:
        Trinh et al., Scalable Bayesian Neural Networks by Layer-Wise Input Augmentation, arXiv
        2010.13498.
    """

    shared_components = True

    def __init__(
        self,
        components: int = 4,
        *,
        mean_spread: float = 0.75,
        initial_scale: float = 0.05,
        scale_spread: float = 0.02,
        kl: str = "bound",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.components = _checks.positive_integer("components", components, _checks.LARGEST_SIZE)
        self.mean_spread = _checks.non_negative(
            "mean_spread", _checks.moderate("mean_spread", mean_spread)
        )
        self.initial_scale = _scale("initial_scale", initial_scale)
        self.scale_spread = _checks.non_negative(
            "scale_spread", _checks.moderate("scale_spread", scale_spread)
        )
        self.kl = _checks.one_of("kl", kl, ("bound", "averaged"))

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Add the means and scales of the components."""
        super().build(input_shape)
        shape = (self.components, self.channels)
        normal = keras.initializers.RandomNormal

        def centered(shape: tuple[int, ...], dtype: str) -> Tensor:
            loc = normal(stddev=self.mean_spread)(shape, dtype)
            return self.prior_loc + loc - mean(loc, axis=0)

        def raw_scales(shape: tuple[int, ...], dtype: str) -> Tensor:
            scale = ops.abs(normal(self.initial_scale, self.scale_spread)(shape, dtype))
            scale = ops.maximum(scale, 10 * _constraints.MIN_SCALE)
            return scale + ops.log(-ops.expm1(-scale))  # log(expm1(scale)), without its overflow

        self.loc = self._add_parameter("loc", shape, centered)
        self.raw_scale = self._add_parameter("raw_scale", shape, raw_scales)

    def distribution(self) -> tfd.MixtureSameFamily:
        """Return q(z), with event shape (channels,)."""
        return _equal_mixture(*self._loc_and_scale())

    def transform(
        self, noise: Tensor, component: Tensor | None = None, training: bool = False
    ) -> Draw:
        """Turn standard normal noise (..., channels) into draws of z, with KL and entropy."""
        loc, scale = self._loc_and_scale()
        kl, entropy = map(mean, self._gaussian(loc, scale))
        if self.kl == "averaged":
            together = ops.sqrt(ops.sum(scale * scale, axis=0)) / self.components
            kl, _ = self._gaussian(mean(loc, axis=0), together)
        if self.components == 1:
            return Draw(loc[0] + scale[0] * noise, kl, entropy)
        component = _checked_component(component)
        z = ops.take(loc, component, axis=0) + ops.take(scale, component, axis=0) * noise
        return Draw(z, kl, entropy)

    def mean(self) -> Tensor:
        """Return the mean of z, (channels,)."""
        return mean(ops.convert_to_tensor(self.loc), axis=0)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        config = {
            "components": self.components,
            "mean_spread": self.mean_spread,
            "initial_scale": self.initial_scale,
            "scale_spread": self.scale_spread,
            "kl": self.kl,
        }
        return {**super().get_config(), **config}

    def _loc_and_scale(self) -> tuple[Tensor, Tensor]:
        return ops.convert_to_tensor(self.loc), _constraints.scale(self.raw_scale)


Recipe = Callable[..., FlowPosterior]


def _recipe(make: Recipe) -> Recipe:
    """Let a recipe answer for keywords that nobody takes, which Keras would blame on a class."""

    @functools.wraps(make)
    def recipe(*args: Any, **kwargs: Any) -> FlowPosterior:
        try:
            return make(*args, **kwargs)
        except (TypeError, ValueError):
            takers = (make, FlowPosterior.__init__, Posterior.__init__)
            _checks.known_keywords(make.__name__, kwargs, takers, but=("self", "flows"))
            raise

    return recipe


@_recipe
def NormalAffine(**kwargs: Any) -> FlowPosterior:  # noqa: N802
    """Return a learnable Gaussian, with closed-form KL.

    Args:
        **kwargs: those of `FlowPosterior`, as in all recipes.
    """
    return FlowPosterior((), **kwargs)


@_recipe
def NormalPlanar1d(depth: int = 2, **kwargs: Any) -> FlowPosterior:  # noqa: N802
    """Return a Gaussian under `depth` planar flows."""
    return FlowPosterior([Planar() for _ in _steps(depth)], **kwargs)


@_recipe
def NormalInvConv(depth: int = 3, planar: int = 2, **kwargs: Any) -> FlowPosterior:  # noqa: N802
    """Return a Gaussian under `planar` planar flows, `depth` 1x1 convolutions, `planar` planar."""
    around = _checks.positive_integer("planar", planar, _MOST_FLOWS)
    flows = [
        *(Planar() for _ in range(around)),
        *(InvertibleConv1x1() for _ in _steps(depth)),
        *(Planar() for _ in range(around)),
    ]
    return FlowPosterior(flows, **kwargs)


@_recipe
def NormalGlowStep(depth: int = 3, hidden: int = 32, **kwargs: Any) -> FlowPosterior:  # noqa: N802
    """Return a Gaussian under `depth` Glow steps, which move either half in turn."""
    flows = [GlowStep(hidden, swap=step % 2 == 1) for step in _steps(depth)]
    return FlowPosterior(flows, **kwargs)


@_recipe
def NormalRadial(depth: int = 2, **kwargs: Any) -> FlowPosterior:  # noqa: N802
    """Return a Gaussian under `depth` radial flows."""
    return FlowPosterior([Radial() for _ in _steps(depth)], **kwargs)


@_recipe
def NormalSylvester(depth: int = 2, units: int = 8, **kwargs: Any) -> FlowPosterior:  # noqa: N802
    """Return a Gaussian under `depth` Sylvester flows of `units` hidden units."""
    return FlowPosterior([Sylvester(units) for _ in _steps(depth)], **kwargs)


@_recipe
def NormalIAF(depth: int = 2, hidden: int = 32, **kwargs: Any) -> FlowPosterior:  # noqa: N802
    """Return a Gaussian under `depth` inverse autoregressive flows, in alternating order."""
    flows = [InverseAutoregressive(hidden, reverse=step % 2 == 1) for step in _steps(depth)]
    return FlowPosterior(flows, **kwargs)


def _scale(name: str, value: Any) -> float:
    _checks.positive(name, value)
    return _checks.moderate(name, value)


def _steps(depth: int) -> range:
    try:
        return range(_checks.positive_integer("depth", depth, _MOST_FLOWS))
    except ValueError as error:
        raise ValueError(f"{error} For a posterior without a flow use NormalAffine().") from None


def _copy_flow(flow: Flow, position: int, dtype: str) -> Flow:
    name = f"{type(flow).__name__.lower()}_{position}"
    return type(flow).from_config({**flow.get_config(), "dtype": dtype, "name": name})


def _normal(loc: Tensor, scale: Tensor) -> tfd.Independent:
    """Return a diagonal Gaussian over the last axis."""
    return tfd.Independent(tfd.Normal(loc, scale), reinterpreted_batch_ndims=1)


def _log_normal(x: Tensor) -> Tensor:
    """Return the log-density (...,) of standard normal noise (..., channels)."""
    squares = inner(x * x, ops.ones((x.shape[-1],), dtype=x.dtype))
    return -(squares + x.shape[-1] * _LOG_2_PI) / 2


def _equal_mixture(loc: Tensor, scale: Tensor) -> tfd.MixtureSameFamily:
    """Return the equally weighted mixture of the Gaussians in the rows of `loc` and `scale`."""
    logits = ops.zeros((loc.shape[0],), dtype=loc.dtype)
    return tfd.MixtureSameFamily(tfd.Categorical(logits=logits), _normal(loc, scale))


def _checked_component(component: Tensor | None) -> Tensor:
    if component is None:
        raise ValueError("A posterior of several components needs `component`, one index a draw.")
    return ops.convert_to_tensor(component, dtype="int32")
