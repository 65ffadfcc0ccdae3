"""Filter response normalization, which has no statistics of batches."""

import keras
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class FilterResponseNorm(keras.layers.Layer):
    """Divide each channel of each example by its root mean square over positions, in float32.

        y = max(gamma * x / sqrt(mean(x^2) + 1e-6) + beta, tau)

    gamma, beta, tau: a number per channel, from 1, 0, 0. Singh and Krishnan, arXiv 1911.09737.

    Example:
        >>> import numpy as np, tfp_ibnn as ibnn
        >>> round(float(np.max(ibnn.layers.FilterResponseNorm()(np.array([[[-3.0], [3.0]]])))), 3)
        1.0
    """

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        shape = (checks.channels_of("FilterResponseNorm", input_shape),)
        if len(input_shape) < 3:
            wanted = "positions between examples and channels"
            raise ValueError(f"FilterResponseNorm needs {wanted}; got the shape {input_shape}.")
        for name, start in {"gamma": "ones", "beta": "zeros", "tau": "zeros"}.items():
            setattr(self, name, self.add_weight(shape, start, name=name, autocast=False))

    def call(self, inputs: Tensor) -> Tensor:
        x = ops.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        square = ops.mean(ops.square(x), axis=tuple(range(1, len(x.shape) - 1)), keepdims=True)
        gamma, beta, tau = (ops.cast(v, x.dtype) for v in (self.gamma, self.beta, self.tau))
        return ops.cast(
            ops.maximum(gamma * x * ops.rsqrt(square + 1e-6) + beta, tau), self.compute_dtype
        )
