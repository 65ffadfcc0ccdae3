"""One step of Glow, as a posterior can use it."""

from typing import Any, ClassVar

import keras
from keras import ops

from tfp_ibnn._core.backend import Tensor, tfb
from tfp_ibnn.flows._networks import NetworkFlow
from tfp_ibnn.flows.actnorm import ActNorm
from tfp_ibnn.flows.chain import through
from tfp_ibnn.flows.conv1x1 import InvertibleConv1x1
from tfp_ibnn.flows.coupling import AffineCoupling
from tfp_ibnn.flows.flow import Flow


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class GlowStep(NetworkFlow):
    """ActNorm, then an invertible 1x1 convolution, then an affine coupling.

    Every log-scale is bounded, the convolution cannot become singular, and all parts start as the
    identity or as a rotation: the step starts with log-determinant 0 and stays finite.

    Cost: O(channels^2) per draw for the convolution, and one pass of the coupling's network.

    Args:
        hidden: positive int, units of the hidden layer of the coupling's network. Defaults to 32.
        swap: bool, let the coupling keep the last half and move the first. Defaults to False.
        start: "orthogonal", the default, or "identity", as that of `InvertibleConv1x1`.
        network: Keras model or layer in place of the hidden layer, or None, the default, as that of
            `AffineCoupling`.
        event_ndims: int, how many of the last axes the network sees at once. Defaults to 1.
        **kwargs: arguments of `Flow`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> flow = ibnn.flows.GlowStep(hidden=8)
        >>> flow.build((None, 4))
        >>> y, log_det = flow.forward_and_log_det(keras.ops.ones((2, 4)))
        >>> y.shape[-1], bool(keras.ops.all(keras.ops.abs(log_det) < 1e-5))
        (4, True)

    References:
        Kingma and Dhariwal, Glow, arXiv 1807.03039.
    """

    min_channels: ClassVar[int] = 2

    def __init__(
        self,
        hidden: int = 32,
        swap: bool = False,
        start: str = "orthogonal",
        *,
        network: keras.layers.Layer | None = None,
        event_ndims: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(network=network, event_ndims=event_ndims, **kwargs)
        shared = {"condition_size": self.condition_size, "dtype": self.dtype}
        self.actnorm = ActNorm(name="actnorm", **shared)
        self.conv = InvertibleConv1x1(start=start, name="conv", **shared)
        self.coupling = AffineCoupling(
            hidden,
            swap,
            network=network,
            event_ndims=self.event_ndims,
            name="coupling",
            **shared,
        )
        self.hidden = self.coupling.hidden
        self.swap = self.coupling.swap
        self.start = start

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        for flow in self._flows():
            flow.build(input_shape)

    def _flows(self) -> tuple[Flow, Flow, Flow]:
        return self.actnorm, self.conv, self.coupling

    def bijector(self, condition: Tensor | None = None) -> tfb.Chain:
        """Return the three maps, chained; a chain applies its last element first."""
        return tfb.Chain([flow.bijector(condition) for flow in reversed(self._flows())])

    def _map(self, x: Tensor, condition: Tensor | None, direction: str) -> tuple[Tensor, Tensor]:
        x = ops.cast(x, self.dtype)
        return through(self._flows(), x, condition, direction, self.event_ndims)
