"""The bases of all posteriors, and of those over a layer's multiplicative noise z."""

import math
from typing import Any, Self

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks, constraints
from tfp_ibnn._core.backend import SeedGenerator, Tensor, mean, tfd
from tfp_ibnn._core.protocols import Draw, PosteriorTemplate
from tfp_ibnn._core.serialization import ConfiguredLayer, SavesRandomState
from tfp_ibnn.flows._rows import log_normal as log_normal
from tfp_ibnn.layers.adapter import StochasticAdapter, has_adapter
from tfp_ibnn.layers.base import CELLS
from tfp_ibnn.layers.multiplicative import Stochastic
from tfp_ibnn.layers.recurrent import StochasticCell
from tfp_ibnn.noise import Pass, Source
from tfp_ibnn.posteriors import priors

_FIXED_PAIRS = 64
Component = Tensor | None  # of each draw, integers (...,)


class Template(ConfiguredLayer, SavesRandomState, PosteriorTemplate, keras.layers.Layer):
    """A posterior that is a Keras layer: its weights, its noise, and the weight of its KL.

    The one given to a stochastic layer is a template: each layer takes a copy and builds it.

    Args:
        beta: weight of the KL in the loss, kept in a variable of that name; 1 is the ELBO. None is
            `default_beta` in a layer, and 1 outside of one.
        gamma: weight of the entropy that is subtracted from the loss; 0 is the ELBO.
        seed: of the posterior's noise. The first layer that takes a copy has this seed, each later
            one a seed derived from it, so that layers of one template draw different noise.
    """

    def __init__(
        self, *, beta: float | None = None, gamma: float = 0.0, seed: int | None = None, **kw: Any
    ) -> None:
        super().__init__(**{**kw, "dtype": checks.full_precision(kw.get("dtype"))})
        self.initial_beta = None if beta is None else checks.non_negative("beta", beta)
        self.gamma = checks.non_negative("gamma", gamma)
        self.seed = seed
        self.seed_generator = SeedGenerator(seed)
        self._layers_served = 0

    def build(self, input_shape: Any) -> None:
        """Add beta; call this first."""
        beta = 1.0 if self.initial_beta is None else self.initial_beta
        initial = keras.initializers.Constant(beta)
        self.beta = self._add_parameter("beta", (), initial, trainable=False)

    @staticmethod
    def default_beta(train_size: int) -> float:
        """Return the weight of the KL in a layer if none is given: 1, the ELBO."""
        return 1.0

    def loss(self, draw: Draw) -> Tensor:
        loss = self.beta * draw.kl
        return loss - self.gamma * draw.entropy if self.gamma else loss

    def copy(self, **changes: Any) -> Self:
        """Return an unbuilt posterior of the same configuration, but for the changes."""
        # Flows and priors go by as objects: their classes need not be registered for a copy.
        return type(self).from_config({**self.get_config(), **changes})

    def copy_for_layer(self, dtype: str, seed: int | None = None, train_size: int = 1) -> Self:
        """Return the unbuilt copy that a layer takes, by default with this template's next seed."""
        if seed is None and self.seed is not None:
            seed = self.seed
            if self._layers_served:  # far from the seeds that users choose, which lie close
                words = np.random.SeedSequence((seed % 2**64, self._layers_served))
                seed = int(words.generate_state(1)[0] >> 1)
            self._layers_served += 1
        beta = self.default_beta(train_size) if self.initial_beta is None else self.initial_beta
        changes = {"name": "posterior", "dtype": dtype, "seed": seed, "beta": beta}
        copy = self.copy(**changes, **self._settled())
        copy._layers_served = 1  # by its own layer, should it become a template in turn
        return copy

    def _settled(self) -> dict[str, Any]:
        """Return arguments that were left open, as a layer's copy has them, and its file."""
        return {}

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "beta": self.initial_beta}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        def made(value: Any) -> Any:
            if isinstance(value, list):
                return [made(part) for part in value]
            is_saved = isinstance(value, dict) and "class_name" in value
            return keras.saving.deserialize_keras_object(value) if is_saved else value

        return cls(**{name: made(value) for name, value in config.items()})

    def get_build_config(self) -> None:
        """Leave building to the layer, so that weight paths are the same after loading."""

    def _add_parameter(self, name: str, shape: Any, initializer: Any, **kw: Any) -> keras.Variable:
        return self.add_weight(shape, initializer, autocast=False, name=name, **kw)


class Posterior(Template):
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
        scale = prior_scale if self._scale_is_given else self.default_prior_scale(1)
        self.prior_scale = checks.scale("prior_scale", scale)
        self.prior_loc = checks.moderate("prior_loc", prior_loc)
        self.learn_prior_scale = bool(learn_prior_scale)
        self.sides = checks.one_of("sides", sides, ("input", "both"))
        self._given_prior = None if prior is None else priors.checked(prior)
        if prior is not None and learn_prior_scale:
            raise ValueError("`learn_prior_scale` learns that of a Gaussian: leave `prior` out.")
        self.channels: int | None = None

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Add beta and the prior's scale; call this first."""
        self.channels = checks.channels_of(type(self).__name__, input_shape)
        if self._given_prior is not None:
            self._given_prior.check("z", (self.channels,))
        super().build(input_shape)
        if self.learn_prior_scale:
            raw = keras.initializers.Constant(constraints.inverse_scale(self.prior_scale))
            self.raw_prior_scale = self._add_parameter("raw_prior_scale", (), raw)

    def prior(self, channels: int | None = None) -> tfd.Distribution:
        """Return the prior, with event shape (channels,), by default of all."""
        channels = self.channels if channels is None else channels
        if self._given_prior is not None:
            return self._given_prior.over((channels,), self.dtype)
        ones = ops.ones((channels,), dtype=self.dtype)
        return diagonal_normal(self.prior_loc * ones, self._prior_scale()[0] * ones)

    def transform(self, noise: Tensor, component: Component = None, training: bool = False) -> Draw:
        """Turn standard normal noise (..., channels) into draws of z, with KL and entropy.

        A posterior of several components takes that of each draw too, integers (...,).
        """
        raise NotImplementedError(f"{type(self).__name__} must define `transform`.")

    def mean(self) -> Tensor:
        """Return the mean of z, (channels,)."""
        raise NotImplementedError(f"{type(self).__name__} must define `mean`.")

    def distribution(self) -> tfd.Distribution:
        """Return q(z), with event shape (channels,)."""
        raise NotImplementedError(f"{type(self).__name__} must define `distribution`.")

    @property
    def is_centered(self) -> bool:
        """Whether z = loc + scale * noise; the posterior then has a method `loc_and_scale`."""
        return False

    def fixed_noise(self, training: bool = False) -> np.ndarray | None:
        """Return noise (draws, channels) whose draws of z have `mean` as their average, or None."""
        return None

    def draw(
        self, forward_pass: Pass, count: Any, positions: tuple, on: Tensor, training: bool = False
    ) -> Draw:
        """Return `count` z of a pass; channels that are not `on`, one by one or all, are means."""
        # A Gaussian is switched off by noise of size 0; it is its mean then.
        source, is_centered = forward_pass.source, self.is_centered and len(on.shape) == 0
        stddev = ops.cast(on, self.dtype) if is_centered else 1.0
        shape, generator = (*positions, self.channels), self.seed_generator
        normal = source.normal(count, shape, self.dtype, generator, stddev)
        component = None
        if self.components > 1:
            rows, shared = ops.shape(normal)[0], self.shared_components
            component = source.component(self.components, rows, generator, shared=shared)
            component = ops.reshape(component, (-1, *(1,) * len(positions)))
        if is_centered:
            return self.transform(normal, component, training=training)
        return self.switched(on, normal, component, training)

    def switched(
        self, on: Tensor, noise: Tensor, component: Component = None, training: bool = False
    ) -> Draw:
        """Do as `transform`; if not `on`, z is the mean.

        A mean that is an average of draws takes them along with those of the noise: a second chain
        of flows, under a condition, makes the wait for LeNet's first step half as long again.
        """
        fixed = self.fixed_noise(training)
        if fixed is None:
            draw = self.transform(noise, component, training=training)
            nothing = ops.zeros((self.channels,), dtype=self.dtype)
            center = ops.cond(ops.all(on), lambda: nothing, self.mean)
        else:
            rows = ops.reshape(noise, (-1, self.channels))
            both = self.transform(ops.concatenate([rows, fixed]), training=training)
            z, kl, entropy = (part[: -len(fixed)] for part in both)
            draw = Draw(ops.reshape(z, ops.shape(noise)), kl, entropy)
            center = mean(both.z[-len(fixed) :], axis=0)
        return draw._replace(z=ops.where(on, draw.z, center))

    def sample_and_kl(self, sample_shape: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """Draw z of shape sample_shape + (channels,); return it with its KL, exact or by draw."""
        if not self.built:
            raise ValueError(f"{type(self).__name__} is not built: call build((channels,)) first.")
        source, count = Source(), math.prod(sample_shape)
        noise = source.normal(count, (self.channels,), self.dtype, self.seed_generator)
        component = None
        if self.components > 1:
            component = source.component(self.components, count, self.seed_generator, shared=False)
            component = ops.reshape(component, sample_shape)
        draw = self.transform(ops.reshape(noise, (*sample_shape, self.channels)), component)
        return draw.z, draw.kl

    def entropy(self) -> Tensor:
        """Return the entropy of z in nats: exact where it has a closed form, else an estimate."""
        return mean(self.summary().entropy)

    def summary(self) -> Draw:
        component = np.arange(2 * _FIXED_PAIRS, dtype="int32") // 2 % self.components
        return self.transform(ops.convert_to_tensor(self._fixed_noise()), component)

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
        is_wider = (getattr(self, "initial_scale", None) or 0) > scale
        return self.copy(prior_scale=scale, **({"initial_scale": scale} if is_wider else {}))

    def _settled(self) -> dict[str, Any]:
        is_open = not self._scale_is_given and self._given_prior is None
        return {"prior_scale": self.prior_scale} if is_open else {}

    def get_config(self) -> dict[str, Any]:
        scale = self.prior_scale if self._scale_is_given else None
        return {**super().get_config(), "prior": self._given_prior, "prior_scale": scale}

    def wrap(self, layer: keras.layers.Layer, train_size: int, **options: Any) -> Stochastic:
        kind = StochasticAdapter if has_adapter(layer) else Stochastic
        kind = StochasticCell if isinstance(layer, CELLS) else kind
        return kind(layer, self, train_size, **options)

    @property
    def _has_plain_prior(self) -> bool:
        return self._given_prior is None and type(self).prior is Posterior.prior

    def _prior_scale(self) -> tuple[float | Tensor, float | Tensor]:
        """Return the scale of a Gaussian prior and its logarithm: numbers, or learned."""
        if not self.learn_prior_scale:
            return self.prior_scale, math.log(self.prior_scale)
        scale = constraints.scale(self.raw_prior_scale)
        return scale, ops.log(scale)

    # These densities are written out: TFP's objects, from which the tests take the same numbers,
    # take four times as many operations, and most layers' operations are so small that it counts.

    def _gaussian(self, loc: Tensor, scale: Tensor, z: Any = None) -> tuple[Tensor, Tensor]:
        """Return KL, at z if a prior was given, and entropy (...,) of Gaussians (..., channels)."""
        prior_scale, log_prior_scale = self._prior_scale()
        log_scale = ops.log(scale)
        entropy = ops.sum(log_scale, axis=-1) + self.channels * (priors.LOG_2_PI + 1) / 2
        if self._given_prior is not None:
            return -entropy - self._log_prior(z), entropy
        ratio = log_scale - log_prior_scale
        distance = (loc - self.prior_loc) * (1 / prior_scale)
        kl = ops.sum(0.5 * (distance * distance + ops.expm1(2 * ratio)) - ratio, axis=-1)
        if not self._has_plain_prior:
            kl = tfd.kl_divergence(diagonal_normal(loc, scale), self.prior())
        return kl, entropy

    def _log_prior(self, z: Tensor) -> Tensor:
        """Return the prior's log-density (...,) at z (..., channels)."""
        if not self._has_plain_prior:
            prior = self.prior()
            dtype = getattr(prior, "dtype", None) or z.dtype  # of one given, its own
            return ops.cast(prior.log_prob(ops.cast(z, dtype)), z.dtype)
        scale, log_scale = self._prior_scale()
        return log_normal((z - self.prior_loc) * (1 / scale)) - self.channels * log_scale

    def _fixed_noise(self) -> np.ndarray:
        return fixed_noise(self.channels, self.dtype)


def fixed_noise(channels: int, dtype: str) -> np.ndarray:
    """Return antithetic pairs of standard normal noise, always the same, (draws, channels)."""
    half = np.random.default_rng(0).standard_normal((_FIXED_PAIRS, channels))
    return np.stack([half, -half], axis=1).reshape(-1, channels).astype(dtype)


def diagonal_normal(loc: Tensor, scale: Tensor) -> tfd.Independent:
    """Return a diagonal Gaussian over the last axis."""
    return tfd.Independent(tfd.Normal(loc, scale), reinterpreted_batch_ndims=1)


def equal_mixture(loc: Tensor, scale: Tensor) -> tfd.MixtureSameFamily:
    """Return the equally weighted mixture of the Gaussians in the rows of `loc` and `scale`."""
    logits = ops.zeros((loc.shape[0],), dtype=loc.dtype)
    return tfd.MixtureSameFamily(tfd.Categorical(logits=logits), diagonal_normal(loc, scale))


def of_component(component: Component, *parts: Tensor) -> list[Tensor]:
    """Return the rows of parts (components, ...) by the index of each draw, or raise without."""
    if component is None:
        raise ValueError("A posterior of several components needs `component`, one index per draw.")
    component = ops.convert_to_tensor(component, dtype="int32")
    return [ops.take(part, component, axis=0) for part in parts]
