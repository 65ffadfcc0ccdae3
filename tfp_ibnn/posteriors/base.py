"""The base of posteriors over a layer's multiplicative noise z."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import initializers, ops

from tfp_ibnn._core import checks, constraints
from tfp_ibnn._core.backend import Tensor, mean, tfd
from tfp_ibnn._core.protocols import Draw
from tfp_ibnn.flows._rows import log_normal as log_normal
from tfp_ibnn.noise import Pass, Source
from tfp_ibnn.posteriors import densities, priors
from tfp_ibnn.posteriors.densities import Component as Component
from tfp_ibnn.posteriors.densities import diagonal_normal as diagonal_normal
from tfp_ibnn.posteriors.densities import equal_mixture as equal_mixture
from tfp_ibnn.posteriors.densities import of_component as of_component
from tfp_ibnn.posteriors.earlier import Earlier, Fixed, copy_values
from tfp_ibnn.posteriors.template import Template as Template
from tfp_ibnn.posteriors.template import ZTemplate


class Posterior(ZTemplate, Template):
    """Base of all posteriors q(z), with the prior p(z) = N(prior_loc, prior_scale^2) per channel.

    A new posterior is a subclass with `build`, `transform`, `mean` and `distribution`.

    Args:
        prior: another prior of each channel, such as `ibnn.priors.Laplace(0.3, loc=1.0)`, or a
            `tfd.Distribution`. The KL is then estimated from the draws of the pass.
        prior_scale: standard deviation of the prior if `prior` is None; None is the
            `default_prior_scale` of the model, 0.3 in a layer of its own.
        prior_loc: mean of the prior if `prior` is None; z starts there in any case.
        learn_prior_scale: train the prior's scale along with the posterior, one per layer.
        sides: "input", z on the inputs of a layer, or "both" for a z on each output channel, too,
            before bias and activation: the kernel has noise of rank 1. One posterior has both.
        **kwargs: `beta`, `gamma` and `seed`, those of `Template`, and of `keras.layers.Layer`.
    """

    components = 1
    """Number of mixture components that `transform` chooses from."""

    shared_components = False
    """Whether the component index is common to all layers of a pass."""

    has_joint_density = False
    """Whether `distribution` is that of all z in a model, so that it can become a prior."""

    initial_scale: float | None = None
    """Scale of z at the start, if the posterior has one; None is the prior's."""

    has_own_prior = False
    """Whether the subclass defines `prior`, so that the KL is to that, by TFP's densities."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.prior is not Posterior.prior:  # of a mixin, perhaps
            cls.has_own_prior = True

    def __init__(
        self,
        *,
        prior: Any = None,
        prior_scale: float | None = None,
        prior_loc: float = 1.0,
        learn_prior_scale: bool = False,
        sides: str = "input",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._scale_is_given = prior_scale is not None
        if prior_scale is None:
            prior_scale = self.default_prior_scale(1)
        self.prior_scale = checks.scale("prior_scale", prior_scale)
        self.prior_loc = checks.moderate("prior_loc", prior_loc)
        self.learn_prior_scale = bool(learn_prior_scale)
        self.sides = checks.one_of("sides", sides, ("input", "both"))
        self._given_prior = None if prior is None else priors.checked(prior)
        if isinstance(self._given_prior, Earlier):
            self._given_prior = self._given_prior.copy(self.dtype)
            self.earlier = Fixed(self._given_prior.posterior)  # whose weights Keras finds here
        if prior is not None and learn_prior_scale:
            raise ValueError("`learn_prior_scale` learns that of a Gaussian: leave `prior` out.")
        self.channels: int | None = None

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Add beta and the prior's scale; call this first."""
        self.channels = checks.channels_of(type(self).__name__, input_shape)
        if self._given_prior is not None:
            self._given_prior.check("z", (self.channels,))
        if self._follows_task:
            self.earlier.build(input_shape)
        super().build(input_shape)
        if self.learn_prior_scale:
            raw = initializers.Constant(constraints.inverse_scale(self.prior_scale))
            self.raw_prior_scale = self._add_parameter("raw_prior_scale", (), raw)

    def prior(self, channels: int | None = None) -> tfd.Distribution:
        """Return the prior, with event shape (channels,), by default of all."""
        if channels is None:
            channels = self.channels
        if self._given_prior is not None:
            return self._given_prior.over((channels,), self.dtype)
        ones = ops.ones((channels,), dtype=self.dtype)
        scale, _ = self._prior_scale()
        return diagonal_normal(self.prior_loc * ones, scale * ones)

    def transform(self, noise: Tensor, component: Component = None, training: bool = False) -> Draw:
        """Turn standard normal noise into draws of z.

        Args:
            noise: (..., channels).
            component: of each draw, integers (...,), for a posterior of several components.
            training: whether the draws are for a training step.

        Returns:
            A `Draw` of z (..., channels), with KL and entropy in nats, each (...,) or in closed
            form ().
        """
        raise NotImplementedError(f"{type(self).__name__} must define `transform`.")

    def distribution(self) -> tfd.Distribution:
        """Return q(z), with event shape (channels,)."""
        raise NotImplementedError(f"{type(self).__name__} must define `distribution`.")

    def fixed_noise(self, training: bool = False) -> np.ndarray | None:
        """Return noise (draws, channels) whose draws of z have `mean` as their average, or None."""
        return None

    def draw(
        self,
        forward_pass: Pass,
        count: int | Tensor,
        positions: tuple[int | Tensor, ...],
        on: Tensor,
        training: bool = False,
    ) -> Draw:
        source = forward_pass.source
        # A Gaussian is switched off by noise of size 0; it is its mean then.
        is_scaled = self.is_centered and len(on.shape) == 0
        stddev = ops.cast(on, self.dtype) if is_scaled else 1.0
        shape = (*positions, self.channels)
        noise = source.normal(count, shape, self.dtype, self.seed_generator, stddev)
        component = self._components_of(source, noise, positions)
        if is_scaled:
            return self.transform(noise, component, training=training)
        return self.switched(on, noise, component, training)

    def _components_of(self, source: Source, noise: Tensor, positions: tuple) -> Component:
        """Return the components of draws (count, 1, ...), if there are several."""
        if self.components == 1:
            return None
        count = ops.shape(noise)[0]
        chosen = source.component(
            self.components, count, self.seed_generator, shared=self.shared_components
        )
        return ops.reshape(chosen, (-1, *(1,) * len(positions)))

    def switched(
        self, on: Tensor, noise: Tensor, component: Component = None, training: bool = False
    ) -> Draw:
        """Do as `transform`, but where z is not `on`, it is the mean.

        A mean that is an average of draws takes them along with those of the noise: a second chain
        of flows, under a condition, makes the wait for LeNet's first step half as long again.

        Args:
            on: boolean, () or (channels,).
            noise: (..., channels).
            component: of each draw, integers (...,), for a posterior of several components.
            training: whether the draws are for a training step.

        Returns:
            A `Draw` of z (..., channels).
        """
        fixed = self.fixed_noise(training)
        if fixed is None:
            draw = self.transform(noise, component, training=training)
            unused = ops.zeros((self.channels,), dtype=self.dtype)
            center = ops.cond(ops.all(on), lambda: unused, self.mean)
            z = draw.z
        else:
            draw, center = self._transform_with_mean(noise, fixed, training)
            z = ops.reshape(draw.z, ops.shape(noise))
        return draw._replace(z=ops.where(on, z, center))

    def _transform_with_mean(
        self, noise: Tensor, fixed: np.ndarray, training: bool
    ) -> tuple[Draw, Tensor]:
        """Return draws (rows, channels) for noise, and the mean of those for fixed noise."""
        rows = ops.reshape(noise, (-1, self.channels))
        both = self.transform(ops.concatenate([rows, fixed]), training=training)
        number = len(fixed)
        z = both.z[:-number]
        kl = both.kl[:-number]
        entropy = both.entropy[:-number]
        center = mean(both.z[-number:], axis=0)
        return Draw(z, kl, entropy), center

    def sample_and_kl(self, sample_shape: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """Draw z of shape sample_shape + (channels,); return it with its KL, exact or by draw."""
        if not self.built:
            raise ValueError(f"{type(self).__name__} is not built: call build((channels,)) first.")
        source = Source()
        count = math.prod(sample_shape)
        noise = source.normal(count, (self.channels,), self.dtype, self.seed_generator)
        noise = ops.reshape(noise, (*sample_shape, self.channels))
        component = None
        if self.components > 1:
            component = source.component(self.components, count, self.seed_generator, shared=False)
            component = ops.reshape(component, sample_shape)
        draw = self.transform(noise, component)
        return draw.z, draw.kl

    def entropy(self) -> Tensor:
        """Return the entropy of z in nats: exact where it has a closed form, else an estimate."""
        return mean(self.summary().entropy)

    def summary(self) -> Draw:
        noise = ops.convert_to_tensor(self._fixed_noise())
        return self.transform(noise, densities.fixed_components(self.components))

    @staticmethod
    def default_beta(train_size: int) -> float:
        """Return the weight of the KL in a layer if none is given: N / 500, at least 1.

        It is 1, the ELBO, for up to 500 examples. With many more, the ELBO may let the posterior
        contract, and the network is overconfident again (docs/choosing.md).
        """
        return max(1.0, train_size / 500)

    @staticmethod
    def default_prior_scale(depth: int) -> float:
        """Return the prior's scale if none is given, in a model of `depth` stochastic layers.

        It is 0.3 in up to 10 layers and 3 / depth in more: the noise of all layers adds up, and at
        0.3 deep networks have too much of it (docs/choosing.md).
        """
        return min(0.3, 3 / depth)

    def at_depth(self, depth: int) -> "Posterior":
        """Return this template, or a copy with the prior scale, and start, for this depth."""
        scale = self.default_prior_scale(depth)
        if not self._settled() or scale == self.prior_scale:
            return self
        if self.initial_scale is not None and self.initial_scale > scale:
            return self.copy(prior_scale=scale, initial_scale=scale)
        return self.copy(prior_scale=scale)

    def _settled(self) -> dict[str, Any]:
        if self._scale_is_given or self._given_prior is not None:
            return {}
        return {"prior_scale": self.prior_scale}

    def get_config(self) -> dict[str, Any]:
        scale = self.prior_scale if self._scale_is_given else None
        return {**super().get_config(), "prior": self._given_prior, "prior_scale": scale}

    def fixed_layers(self) -> list[Fixed]:
        return [self.earlier] if self._follows_task else []

    def for_next_task(self) -> "Posterior":
        if not self.has_joint_density or self.has_own_prior:
            return super().for_next_task()
        self._check_inverse()
        plain = self.copy(prior=None, learn_prior_scale=False)
        return self.copy(prior=Earlier(plain), learn_prior_scale=False)

    def _check_inverse(self) -> None:
        """Raise if the density is known at draws of this posterior only, and not at any z."""
        noise = self._fixed_noise()[:2]
        drawn = self.transform(noise, densities.fixed_components(self.components)[:2])
        z = ops.convert_to_numpy(drawn.z)
        try:
            self.distribution().log_prob(ops.convert_to_tensor(z))
        except (NotImplementedError, RecursionError) as error:
            raise ValueError(
                f"The posterior {type(self).__name__} cannot be a prior: a flow of it has no "
                "inverse, by which its density at any z is computed. Use those of ibnn.flows."
            ) from error

    def continue_from(self, posterior: "Posterior", means: Sequence[Tensor] = ()) -> None:
        learned = posterior._of_this_task()
        copy_values(self._of_this_task(), learned)
        copy_values(self.earlier.posterior._of_this_task(), learned)

    def _of_this_task(self) -> list[Any]:
        """Return the variables, less those of priors."""
        variables = self.variables
        left_out = []
        if self.learn_prior_scale:
            left_out.append(self.raw_prior_scale)
        if self._follows_task:
            left_out += self.earlier.variables
        ids = {id(variable) for variable in left_out}
        return [variable for variable in variables if id(variable) not in ids]

    @property
    def _follows_task(self) -> bool:
        """Whether the prior is the posterior of an earlier task."""
        return isinstance(self._given_prior, Earlier)

    @property
    def _has_plain_prior(self) -> bool:
        """Whether the prior is the Gaussian of `prior_loc` and `prior_scale`."""
        return self._given_prior is None and not self.has_own_prior

    def _prior_scale(self) -> tuple[float | Tensor, float | Tensor]:
        """Return the scale of a Gaussian prior and its logarithm: numbers, or learned."""
        if not self.learn_prior_scale:
            return self.prior_scale, math.log(self.prior_scale)
        scale = constraints.scale(self.raw_prior_scale)
        return scale, ops.log(scale)

    # These densities are written out: TFP's objects, from which the tests take the same numbers,
    # take four times as many operations, and most layers' operations are so small that it counts.

    def _gaussian_kl_and_entropy(
        self, loc: Tensor, scale: Tensor, z: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Return KL, at z if a prior was given, and entropy (...,) of Gaussians (..., channels).

            KL = sum_c ((loc - m) / s)^2 / 2 + (r^2 - 1) / 2 - log r,  r = scale / s

        for the prior N(m, s^2).
        """
        prior_scale, log_prior_scale = self._prior_scale()
        log_scale = ops.log(scale)
        constant = self.channels * (priors.LOG_2_PI + 1) / 2
        entropy = ops.sum(log_scale, axis=-1) + constant
        is_estimated = self._given_prior is not None and not self._follows_task
        if is_estimated:
            return -entropy - self._log_prior(z), entropy
        if not self._has_plain_prior:
            gaussian = diagonal_normal(loc, scale)
            return tfd.kl_divergence(gaussian, self.prior()), entropy
        log_ratio = log_scale - log_prior_scale
        distance = (loc - self.prior_loc) * (1 / prior_scale)
        squares = distance * distance + ops.expm1(2 * log_ratio)
        return ops.sum(0.5 * squares - log_ratio, axis=-1), entropy

    def _log_prior(self, z: Tensor) -> Tensor:
        """Return the prior's log-density (...,) at z (..., channels)."""
        if not self._has_plain_prior:
            prior = self.prior()
            dtype = getattr(prior, "dtype", None) or z.dtype  # of one given, its own
            return ops.cast(prior.log_prob(ops.cast(z, dtype)), z.dtype)
        scale, log_scale = self._prior_scale()
        return log_normal((z - self.prior_loc) * (1 / scale)) - self.channels * log_scale

    def _fixed_noise(self) -> np.ndarray:
        return densities.fixed_noise(self.channels, self.dtype)
