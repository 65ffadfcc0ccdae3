"""The small network by which couplings and autoregressive flows choose a shift and a scale."""

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import constraints
from tfp_ibnn._core.backend import Tensor, matmul
from tfp_ibnn.flows._conditional import Conditional

__all__ = ["Conditioner"]


class Conditioner(Conditional):
    """One hidden ReLU layer, then shifts and bounded log-scales, which both start at 0.

    Weights are of order 1 and are divided by the root of their fan-in when used, so that one step
    of an adaptive optimizer moves the outputs of a wide layer no more than those of a narrow one.
    A condition shifts both biases.

    Args:
        outputs: number of shifts, and of log-scales.
        hidden: units of the hidden layer.
        limit: bound of |log scale|.
        masks: which inputs each hidden unit sees, (inputs, hidden), and which outputs it serves,
            (hidden, outputs); all by default.
        **kwargs: those of `Conditional`.
    """

    def __init__(
        self,
        outputs: int,
        hidden: int,
        limit: float,
        masks: tuple[np.ndarray, np.ndarray] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.outputs, self.hidden, self.limit, self.masks = outputs, hidden, limit, masks

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Add the weights of both layers."""
        hidden, outputs = self.hidden, self.outputs
        normal, fixed = keras.initializers.RandomNormal(stddev=1.0), {"conditional": False}
        self.kernel = self.add_parameter("kernel", (input_shape[-1], hidden), normal, **fixed)
        self.bias = self.add_parameter("bias", (hidden,), "zeros")
        self.output_kernel = self.add_parameter(
            "output_kernel", (2, hidden, outputs), "zeros", **fixed
        )
        self.output_bias = self.add_parameter("output_bias", (2, outputs), "zeros")

    def given(self, condition: Tensor | None) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Return the network as a function of its inputs alone."""
        return self if condition is None else partial(self, condition=condition)

    def call(self, inputs: Tensor, condition: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the shifts and the log-scales for `inputs` of shape (..., inputs)."""
        kernel = ops.convert_to_tensor(self.kernel)
        output_kernel = ops.convert_to_tensor(self.output_kernel)
        if self.masks is not None:
            sees, serves = (ops.cast(mask, kernel.dtype) for mask in self.masks)
            kernel, output_kernel = kernel * sees, output_kernel * serves
        kernel = kernel / self._spread(kernel.shape[0])
        output_kernel = output_kernel / self._spread(self.hidden)
        bias, output_bias = (self.parameter(b, condition) for b in (self.bias, self.output_bias))
        hidden = ops.relu(matmul(inputs, kernel) + bias)
        shift = matmul(hidden, output_kernel[0]) + output_bias[..., 0, :]
        raw = matmul(hidden, output_kernel[1]) + output_bias[..., 1, :]
        return shift, constraints.bounded(raw, self.limit)

    def _spread(self, fan_in: int) -> float:
        return fan_in**0.5

    def get_build_config(self) -> None:
        """Leave building to the flow."""
        return None
