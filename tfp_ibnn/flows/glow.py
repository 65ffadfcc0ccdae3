"""One step of Glow, as a posterior can use it."""

from typing import Any, ClassVar

import keras
from keras import ops

from tfp_ibnn._core.backend import Tensor, tfb
from tfp_ibnn.flows.actnorm import ActNorm
from tfp_ibnn.flows.chain import through
from tfp_ibnn.flows.conv1x1 import InvertibleConv1x1
from tfp_ibnn.flows.coupling import AffineCoupling
from tfp_ibnn.flows.flow import NetworkFlow


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class GlowStep(NetworkFlow):
    """ActNorm, then an invertible 1x1 convolution, then an affine coupling.

    Every log-scale is bounded, the convolution cannot become singular, and all parts start as the
    identity or as a rotation: the step starts with log-determinant 0 and stays finite.

    Cost: O(channels^2) per draw for the convolution, and one pass of the coupling's network.
    `start` is that of `InvertibleConv1x1`, the others are those of `AffineCoupling`.

    References:
        Kingma and Dhariwal, Glow, arXiv 1807.03039.
    """

    min_channels: ClassVar[int] = 2

    def __init__(
        self, hidden: int = 32, swap: bool = False, start: str = "orthogonal", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        options = {"condition_size": self.condition_size, "dtype": self.dtype}
        self.actnorm = ActNorm(name="actnorm", **options)
        self.conv = InvertibleConv1x1(start=start, name="conv", **options)
        options |= {"network": kwargs.get("network"), "event_ndims": self.event_ndims}
        self.coupling = AffineCoupling(hidden, swap, name="coupling", **options)
        self.hidden, self.swap, self.start = self.coupling.hidden, self.coupling.swap, start

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        for part in (self.actnorm, self.conv, self.coupling):
            part.build(input_shape)

    def bijector(self, condition: Tensor | None = None) -> tfb.Chain:
        """Return the three maps, chained; a chain applies its last element first."""
        parts = (self.coupling, self.conv, self.actnorm)
        return tfb.Chain([part.bijector(condition) for part in parts])

    def _through(self, x: Tensor, condition: Tensor | None, way: str) -> tuple[Tensor, Tensor]:
        parts = (self.actnorm, self.conv, self.coupling)
        return through(parts, ops.cast(x, self.dtype), condition, way, self.event_ndims)
