"""One posterior over the z of several layers together."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Self

import keras
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.protocols import Draw, PosteriorTemplate
from tfp_ibnn._core.serialization import ConfiguredLayer
from tfp_ibnn.layers.base import claim
from tfp_ibnn.layers.multiplicative import Stochastic
from tfp_ibnn.noise import Pass
from tfp_ibnn.noise.source import spread
from tfp_ibnn.posteriors.base import Component, Posterior
from tfp_ibnn.posteriors.gaussian import NormalFull

_LARGEST_FULL = 4096  # its matrix then takes 64 MB


def _of_joint(name: str) -> property:
    return property(lambda self: getattr(self._shared.posterior, name))


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class JointPosterior(ConfiguredLayer, PosteriorTemplate, keras.layers.Layer):
    """One posterior over the z of all layers that it is given to: layers may depend on each other.

    If one layer's z grows while the next one's shrinks, the network stays much the same. Posteriors
    that have layers independent cannot follow that, and are too narrow.

    `posterior` is over one vector, in which each layer has its part, in the order of conversion:
    `layer.posterior.joint` is the whole, `layer.posterior.start` where the part begins. It is drawn
    once per pass and example. Its KL counts once, with the first layer that draws; `PosteriorLog`
    shows each layer a share of it by the number of its channels. Cost: that of `posterior` over
    the channels of all layers, so of rank R: channels * (R + 2) weights.

    Args:
        posterior: one over z, such as `ibnn.NormalLowRank(4)` or `ibnn.NormalPlanar1d()`, with its
            prior, beta, gamma and seed. Noise at each position is refused.
        index: which of the layers has this copy; None for the template that you make.
        layers: the number of these layers, likewise.
        **kwargs: those of `keras.layers.Layer`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> det = keras.Sequential(
        ...     [keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(3)]
        ... )
        >>> joint = ibnn.JointPosterior(ibnn.NormalLowRank(4))
        >>> sto = ibnn.to_stochastic(det, joint, train_size=100)
        >>> sto.layers[-1].posterior.joint.distribution().event_shape[0]
        12
    """

    is_centered = False
    """As of `Posterior`: no part has a mean and a scale of its own."""

    beta, gamma, initial_beta, seed, sides = map(
        _of_joint, ("beta", "gamma", "initial_beta", "seed", "sides")
    )

    def __init__(
        self,
        posterior: Posterior,
        *,
        index: int | None = None,
        layers: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**{**kwargs, "dtype": checks.full_precision(kwargs.get("dtype"))})
        if not isinstance(posterior, Posterior):
            wanted = "a posterior over z such as ibnn.NormalLowRank(4)"
            raise ValueError(f"`posterior` must be {wanted}; got {posterior!r}.")
        self.index, self.layers, self.start = index, layers, 0
        self.channels: int | None = None
        if index == 0:  # Keras finds the weights in the first of the layers
            self.owned = posterior
        self._shared, self._served = SimpleNamespace(posterior=posterior, layers=[]), 0

    @property
    def joint(self) -> Posterior:
        """The posterior of all layers together."""
        if not self._shared.layers:
            remedy = "use `to_stochastic`, or make an ibnn.StochasticModel of all its layers"
            raise ValueError(f"A JointPosterior belongs to a whole model: {remedy}.")
        return self._shared.posterior

    def at_depth(self, depth: int) -> "JointPosterior":
        """Return a template for one model in which so many layers are stochastic."""
        return type(self)(self._shared.posterior.at_depth(depth), name=self.name)

    def copy_for_layer(self, dtype: str, seed: int | None = None, train_size: int = 1) -> Self:
        """Return the copy that a layer takes: the next one of this template, or again this one."""
        own, index = self._shared.posterior.copy_for_layer(dtype, seed, train_size), self.index
        if index is None:  # the name then tells apart those of one model
            own, index, self._served = own.copy(name=self.name), self._served, self._served + 1
        else:
            own = own.copy(name=self._shared.posterior.name)
        options = {"dtype": dtype, "name": "posterior", "trainable": self.trainable}
        return type(self)(own, index=index, layers=self.layers, **options)

    def wrap(self, layer: keras.layers.Layer, train_size: int, **options: Any) -> Stochastic:
        return Posterior.wrap(self, layer, train_size, **options)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.channels = checks.channels_of(type(self).__name__, input_shape)

    def bind(self, layers: Sequence[Any]) -> None:
        """Build the posterior of all layers, as soon as these are there."""
        if self.index != 0 or self._shared.layers:
            return
        parts = [(x.posterior, x) for x in layers if isinstance(x.posterior, JointPosterior)]
        parts = [x for x in parts if x[0]._shared.posterior.name == self.owned.name]
        parts.sort(key=lambda x: x[0].index)
        if [part.index for part, _ in parts] != list(range(self.layers or len(parts))):
            return
        if any(layer.noise != "channel" for _, layer in parts):
            raise ValueError("`noise` must be 'channel' for a JointPosterior; got 'position'.")
        size = sum(part.channels for part, _ in parts)
        if isinstance(self.owned, NormalFull) and size > _LARGEST_FULL:
            limits = f"at most {_LARGEST_FULL} channels in all layers together; got {size}"
            raise ValueError(f"NormalFull() takes {limits}. Use NormalLowRank(rank) instead.")
        start = 0
        for part, _ in parts:
            part._shared, part.layers, part.start = self._shared, len(parts), start
            start += part.channels
        self._shared.layers = [layer for _, layer in parts]
        with keras.name_scope(parts[0][1].name), keras.name_scope(self.name):
            self.owned.build((None, size))
        claim(self.owned)

    def draw(
        self, forward_pass: Pass, count: Any, shape: tuple, on: Tensor, training: bool = False
    ) -> Draw:
        """Return `count` z of a pass, (count, channels); the first layer of a pass has the KL."""
        joint, drawn = self.joint, forward_pass.recall(self.joint)
        if drawn is None:
            layers = self._shared.layers
            each = [ops.repeat(x.noise_switch > 0.5, x.posterior.channels) for x in layers]
            drawn = joint.draw(
                forward_pass, count, (joint.channels,), ops.concatenate(each), training
            )
            forward_pass.remember(joint, drawn)
            return self._part(drawn, 1.0)
        return self._part(drawn._replace(z=spread(drawn.z, count)), 0.0)

    def transform(self, noise: Tensor, component: Component = None, training: bool = False) -> Draw:
        """Turn noise (..., channels of all layers) into this layer's z, with its share of the KL."""
        drawn = self.joint.transform(noise, component, training=training)
        return self._part(drawn, self.channels / self.joint.channels)

    def mean(self) -> Tensor:
        """Return the mean of this layer's z, (channels,)."""
        return self.joint.mean()[self.start : self.start + self.channels]

    def loss(self, draw: Draw) -> Tensor:
        return self.joint.loss(draw)

    def summary(self) -> Draw:
        return self._part(self.joint.summary(), self.channels / self.joint.channels)

    def _part(self, drawn: Draw, share: float) -> Draw:
        z = drawn.z[..., self.start : self.start + self.channels]
        return Draw(z, share * drawn.kl, share * drawn.entropy)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "posterior": self._shared.posterior}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(**keras.saving.deserialize_keras_object(config))

    def get_build_config(self) -> None:
        """Leave building to the layer, as all posteriors do."""
