"""Element-wise shift and scale."""

from typing import Any, ClassVar

import keras
from keras import ops

from tfp_ibnn._core import checks, constraints
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.flows._rows import total
from tfp_ibnn.flows.bijector import FlowBijector
from tfp_ibnn.flows.flow import Flow


class AffineBijector(FlowBijector):
    """y = shift + scale * x, element by element.

    Log-determinant: sum_c log scale_c. Invertible for scale > 0. Cost: O(channels) per draw.

    Args:
        shift: tensor (..., channels).
        scale: tensor (..., channels), positive.
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
    """Element-wise affine flow, y = shift + scale * x, with scale kept positive by a softplus.

    Log-determinant: sum_c log scale_c. Always invertible. Cost: O(channels) per draw, both ways.

    Args:
        initial_shift: float, where every shift starts. Defaults to 0.
        initial_scale: positive float, where every scale starts. Defaults to 1, the identity.
        **kwargs: arguments of `Flow`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> flow = ibnn.flows.Affine(initial_shift=1.0)
        >>> flow.build((None, 3))
        >>> y, log_det = flow.forward_and_log_det(keras.ops.zeros((4, 3)))
        >>> float(y[0, 0]), bool(abs(log_det) < 1e-6)
        (1.0, True)
    """

    stackable = True

    def __init__(self, initial_shift: float = 0, initial_scale: float = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.initial_shift = checks.finite("initial_shift", initial_shift)
        self.initial_scale = checks.positive("initial_scale", initial_scale)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        shape = (self.channels,)
        initial_raw_scale = constraints.inverse_scale(self.initial_scale)
        shift = keras.initializers.Constant(self.initial_shift)
        raw_scale = keras.initializers.Constant(initial_raw_scale)
        self.shift = self.add_parameter("shift", shape, shift)
        self.raw_scale = self.add_parameter("raw_scale", shape, raw_scale)

    def bijector_of(self, shift: Tensor, raw_scale: Tensor) -> AffineBijector:
        return AffineBijector(shift=shift, scale=constraints.scale(raw_scale))
