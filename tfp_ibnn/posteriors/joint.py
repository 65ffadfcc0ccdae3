"""One posterior over the z of several layers together."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import keras
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor, tfd
from tfp_ibnn._core.protocols import Draw
from tfp_ibnn.noise import Pass
from tfp_ibnn.noise.source import spread
from tfp_ibnn.posteriors.base import Posterior
from tfp_ibnn.posteriors.template import ZTemplate


@dataclasses.dataclass
class _Group:
    """What the layers of one joint posterior share."""

    posterior: Posterior
    """Over the z of all of them."""

    layers: list[Any] = dataclasses.field(default_factory=list)
    """The stochastic layers, in the order of z; none before `bind` has seen a whole model."""


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class JointPosterior(ZTemplate):
    """One posterior over the z of all layers that it is given to, which may depend on each other.

    If one layer's z grows and the next one's shrinks, a network stays much the same; posteriors
    with independent layers are too narrow along such directions.

    `layer.posterior.joint` is over one vector, drawn once per pass and example, in which each layer
    has the `channels` from `layer.posterior.start` on. Its KL counts once, with the first layer
    that is on; `PosteriorLog` shows shares by channels. Cost: that of `posterior` over all of them.

    Args:
        posterior: a template over z such as `ibnn.NormalLowRank(4)`, with its prior, beta and seed.
        index: set by the library: which of the layers has this copy; -1 in a template.
        layers: set by the library: the number of these layers.
        **kwargs: those of `keras.layers.Layer`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> det = keras.Sequential([keras.Input((4,)), *map(keras.layers.Dense, (8, 3))])
        >>> sto = ibnn.to_stochastic(det, ibnn.JointPosterior(ibnn.NormalLowRank(4)), 100)
        >>> [(x.posterior.start, x.posterior.channels) for x in ibnn.stochastic_layers(sto)]
        [(0, 4), (4, 8)]
    """

    def __init__(
        self, posterior: Posterior, index: int = -1, layers: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if not isinstance(posterior, Posterior):
            raise ValueError(f"`posterior` must be over z, like NormalFull(); got {posterior!r}.")
        self.index = index
        self.layers = layers
        self.start = 0
        self.seed = posterior.seed
        self.sides = posterior.sides
        self.initial_beta = posterior.initial_beta
        self._layers_served = 0
        if index == 0:  # Keras finds the weights here, and not in what the layers share
            self.owned = posterior
        self._group = _Group(posterior)

    @property
    def joint(self) -> Posterior:
        """The posterior of all layers together."""
        if not self._group.layers:
            raise ValueError(
                "JointPosterior needs a model of its own: use to_stochastic, or StochasticModel "
                "with a new template for each model."
            )
        return self._group.posterior

    @property
    def beta(self) -> keras.Variable:
        """The weight of the KL, one variable for all layers."""
        return self.joint.beta

    def loss(self, draw: Draw) -> Tensor:
        return self.joint.loss(draw)

    def at_depth(self, depth: int) -> "JointPosterior":
        return type(self)(self._group.posterior.at_depth(depth), name=self.name)

    def copy_for_layer(self, dtype: str, seed: int | None = None, train_size: int = 1) -> Self:
        """Return the copy that a layer takes; its name tells what belongs together in a model.

        Args:
            dtype: "float32" or "float64".
            seed: of the joint posterior's noise; None is its template's.
            train_size: number of training examples, on which the default beta depends.

        Returns:
            A copy with the next index, or in a copy's copy with the same one.
        """
        posterior = self._group.posterior.copy_for_layer(dtype, seed, train_size)
        index = self.index
        if index < 0:
            index = self._layers_served
        self._layers_served += 1
        options = {"dtype": dtype, "name": self.name, "trainable": self.trainable}
        return type(self)(posterior, index, self.layers, **options)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.channels = checks.channels_of(type(self).__name__, input_shape)

    def bind(self, layers: Sequence[Any]) -> None:
        if self.index != 0 or self._group.layers:
            return
        members = [layer for layer in layers if self._is_of_same_group(layer.posterior)]
        members.sort(key=lambda layer: layer.posterior.index)
        expected = self.layers or len(members)
        if [layer.posterior.index for layer in members] != list(range(expected)):
            return  # only a part of the model is there
        if not all(layer.draws_ahead for layer in members):
            raise ValueError("`noise` must be 'channel' for a JointPosterior; got 'position'.")
        self._group.layers = members
        channels = 0
        for layer in members:
            part = layer.posterior
            part._group = self._group
            part.layers = len(members)
            part.start = channels
            channels += part.channels
        with keras.name_scope(members[0].name):
            self.owned.build((None, channels))
        members[0].claim_posterior()

    def _is_of_same_group(self, posterior: Any) -> bool:
        return type(posterior) is type(self) and posterior.name == self.name

    def draw(
        self,
        forward_pass: Pass,
        count: int | Tensor,
        positions: tuple[int | Tensor, ...],
        on: Tensor,
        training: bool = False,
    ) -> Draw:
        joint = self.joint
        drawn = forward_pass.recall(joint)
        if drawn is None:
            drawn = joint.draw(forward_pass, count, (), self._channels_on(), training)
        # The first layer that is on counts the KL; nothing is left for later ones.
        off = 1 - ops.cast(on, joint.dtype)
        left = drawn._replace(kl=off * drawn.kl, entropy=off * drawn.entropy)
        forward_pass.remember(joint, left)
        return self._part(drawn._replace(z=spread(drawn.z, count)))

    def _channels_on(self) -> Tensor:
        """Return which channels of the joint z have their noise switched on."""
        switches = [
            ops.repeat(layer.noise_switch > 0.5, layer.posterior.channels)
            for layer in self._group.layers
        ]
        return ops.concatenate(switches)

    def prior(self) -> tfd.Distribution:
        """Return the prior of this layer's z, with event shape (channels,)."""
        return self.joint.prior(self.channels)

    def mean(self) -> Tensor:
        return self.joint.mean()[self.start : self.start + self.channels]

    def summary(self) -> Draw:
        summary = self._part(self.joint.summary())
        share = self.channels / self.joint.channels
        return summary._replace(kl=share * summary.kl, entropy=share * summary.entropy)

    def _part(self, draw: Draw) -> Draw:
        """Return a joint draw with this layer's channels alone."""
        return draw._replace(z=draw.z[..., self.start : self.start + self.channels])

    def get_config(self) -> dict[str, Any]:
        posterior = keras.saving.serialize_keras_object(self._group.posterior)
        return {**super().get_config(), "posterior": posterior}
