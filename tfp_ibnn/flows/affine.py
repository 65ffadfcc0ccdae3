"""Element-wise shift and scale."""

from typing import Any, ClassVar

import keras
from keras import ops

from tfp_ibnn._core import checks, constraints
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.flows.flow import Flow, FlowBijector, total


class AffineBijector(FlowBijector):
    """y = shift + scale * x, element by element, of a shift and a positive scale (..., channels).

    Log-determinant: sum_c log scale_c. Invertible for scale > 0. Cost: O(channels) per draw.
    """

    parameter_ndims: ClassVar[dict[str, int]] = {"shift": 1, "scale": 1}
    constant_jacobian = True

    def _forward(self, x: Tensor) -> Tensor:
        return self.shift + self.scale * x

    def _inverse(self, y: Tensor) -> Tensor:
        return (y - self.shift) / self.scale

    def _forward_log_det_jacobian(self, x: Tensor) -> Tensor:
        return total(ops.log(self.scale))


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Affine(Flow):
    """Element-wise affine flow, y = shift + scale * x, with scale kept positive by a softplus."""

    def __init__(self, initial_shift: float = 0, initial_scale: float = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.initial_shift = checks.finite("initial_shift", initial_shift)
        self.initial_scale = checks.positive("initial_scale", initial_scale)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        constant, shape = keras.initializers.Constant, (self.channels,)
        raw = constraints.inverse_scale(self.initial_scale)
        self.shift = self.add_parameter("shift", shape, constant(self.initial_shift))
        self.raw_scale = self.add_parameter("raw_scale", shape, constant(raw))

    def bijector_of(self, shift: Tensor, raw_scale: Tensor) -> AffineBijector:
        return AffineBijector(shift=shift, scale=constraints.scale(raw_scale))
