"""A toy flow: y = sinh(x + shift)."""

from typing import ClassVar

import keras
from keras import ops

from tfp_ibnn.flows import Flow, FlowBijector


class SinhBijector(FlowBijector):
    """y = sinh(x + shift); log-determinant sum log cosh(x + shift)."""

    parameter_ndims: ClassVar[dict[str, int]] = {"shift": 1}

    def _forward(self, x):
        return ops.sinh(x + self.shift)

    def _inverse(self, y):
        return ops.arcsinh(y) - self.shift

    def _forward_log_det_jacobian(self, x):
        return ops.sum(ops.log(ops.cosh(x + self.shift)), axis=-1)


@keras.saving.register_keras_serializable(package="stranger")
class Sinh(Flow):
    """y = sinh(x + shift)."""

    def build(self, input_shape):
        super().build(input_shape)
        self.shift = self.add_parameter("shift", (self.channels,), "zeros")

    def bijector(self):
        return SinhBijector(shift=ops.convert_to_tensor(self.shift))
