"""One posterior over the z of several layers together."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Self

import keras
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor, tfd
from tfp_ibnn._core.protocols import Draw, PosteriorTemplate
from tfp_ibnn._core.serialization import ConfiguredLayer
from tfp_ibnn.noise import Pass
from tfp_ibnn.noise.source import spread
from tfp_ibnn.posteriors.base import Posterior


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class JointPosterior(ConfiguredLayer, PosteriorTemplate, keras.layers.Layer):
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
        **kw: those of `keras.layers.Layer`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> det = keras.Sequential([keras.Input((4,)), *map(keras.layers.Dense, (8, 3))])
        >>> sto = ibnn.to_stochastic(det, ibnn.JointPosterior(ibnn.NormalLowRank(4)), 100)
        >>> [(x.posterior.start, x.posterior.channels) for x in ibnn.stochastic_layers(sto)]
        [(0, 4), (4, 8)]
    """

    beta = property(lambda self: self.joint.beta, doc="The weight of the KL, one variable for all.")
    loss = property(lambda self: self.joint.loss)
    is_centered, wrap, get_build_config = False, Posterior.wrap, Posterior.get_build_config
    from_config = classmethod(Posterior.from_config.__func__)

    def __init__(self, posterior: Posterior, index: int = -1, layers: int = 0, **kw: Any) -> None:
        super().__init__(**{**kw, "dtype": checks.full_precision(kw.get("dtype"))})
        if not isinstance(posterior, Posterior):
            raise ValueError(f"`posterior` must be over z, like NormalFull(); got {posterior!r}.")
        self.sides, self.seed, self.start, self._served = posterior.sides, posterior.seed, 0, 0
        self.index, self.layers, self.initial_beta = index, layers, posterior.initial_beta
        if index == 0:  # Keras finds the weights here, and not in what the layers share
            self.owned = posterior
        self._shared = SimpleNamespace(posterior=posterior, layers=[])

    @property
    def joint(self) -> Posterior:
        """The posterior of all layers together."""
        if not self._shared.layers:
            remedy = "use to_stochastic, or StochasticModel with a new template for each model"
            raise ValueError(f"JointPosterior needs a model of its own: {remedy}.")
        return self._shared.posterior

    def at_depth(self, depth: int) -> "JointPosterior":
        return type(self)(self._shared.posterior.at_depth(depth), name=self.name)

    def copy_for_layer(self, dtype: str, seed: int | None = None, train_size: int = 1) -> Self:
        """Return the copy that a layer takes; its name tells what belongs together in a model."""
        own = self._shared.posterior.copy_for_layer(dtype, seed, train_size)
        index, self._served = self._served if self.index < 0 else self.index, self._served + 1
        options = {"dtype": dtype, "name": self.name, "trainable": self.trainable}
        return type(self)(own, index, self.layers, **options)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.channels = checks.channels_of(type(self).__name__, input_shape)

    def bind(self, layers: Sequence[Any]) -> None:
        mine = (type(self), self.name)
        own = [x for x in layers if (type(x.posterior), x.posterior.name) == mine]
        own.sort(key=lambda x: x.posterior.index)
        indices = [x.posterior.index for x in own]
        if self.index != 0 or self._shared.layers or indices != [*range(self.layers or len(own))]:
            return
        if not all(x.draws_ahead for x in own):
            raise ValueError("`noise` must be 'channel' for a JointPosterior; got 'position'.")
        self._shared.layers, start = own, 0
        for part in (x.posterior for x in own):
            part._shared, part.layers, part.start = self._shared, len(own), start
            start += part.channels
        with keras.name_scope(own[0].name):
            self.owned.build((None, start))
        own[0].claim_posterior()

    def draw(
        self, forward_pass: Pass, count: Any, positions: tuple, on: Tensor, training: bool = False
    ) -> Draw:
        """Return `count` z of a pass, (count, channels), by the one draw for all layers."""
        joint, drawn = self.joint, forward_pass.recall(self.joint)
        if drawn is None:
            switches = [(x.noise_switch > 0.5, x.posterior.channels) for x in self._shared.layers]
            each = ops.concatenate([ops.repeat(*switch) for switch in switches])
            drawn = joint.draw(forward_pass, count, (), each, training)
        # The first layer that is on counts the KL; nothing is left for later ones.
        off = 1 - ops.cast(on, joint.dtype)
        forward_pass.remember(joint, Draw(drawn.z, off * drawn.kl, off * drawn.entropy))
        return self._part(Draw(spread(drawn.z, count), *drawn[1:]), 1.0)

    def prior(self) -> tfd.Distribution:
        """Return the prior of this layer's z, with event shape (channels,)."""
        return self.joint.prior(self.channels)

    def mean(self) -> Tensor:
        """Return the mean of this layer's z, (channels,)."""
        return self.joint.mean()[self.start : self.start + self.channels]

    def summary(self) -> Draw:
        return self._part(self.joint.summary(), self.channels / self.joint.channels)

    def _part(self, drawn: Draw, share: float) -> Draw:
        z = drawn.z[..., self.start : self.start + self.channels]
        return Draw(z, share * drawn.kl, share * drawn.entropy)

    def get_config(self) -> dict[str, Any]:
        posterior = keras.saving.serialize_keras_object(self._shared.posterior)
        return {**super().get_config(), "posterior": posterior}
