"""Invertible 1x1 convolution, a linear map of the channels, in LU form."""

import math
import random
from typing import Any, ClassVar

import keras
import numpy as np
import scipy.linalg
from keras import ops

from tfp_ibnn._core import checks, constraints
from tfp_ibnn._core.backend import Tensor, matmul, set_diagonal
from tfp_ibnn.flows.flow import Flow, FlowBijector, times_matrix, total

_SMALL = 64  # a product of two matrices of this size is nothing


class Conv1x1Bijector(FlowBijector):
    """y = P L U x, with a permutation, a unit lower and an upper triangular matrix.

    Log-determinant: sum_i log|U_ii|, no determinant is computed. Invertible for U_ii != 0; the
    inverse is two triangular solves. Cost: O(channels^2) per draw, both ways. Where there are more
    draws than channels, the factors are multiplied once, instead of two products a draw.

    Args:
        permutation: (channels,), integers: (Pv)_i = v_permutation[i].
        lower: (..., channels, channels), unit lower triangular.
        upper: (..., channels, channels), upper triangular.
        log_diagonal: (..., channels), log|U_ii|.
    """

    parameter_ndims: ClassVar = {"permutation": 1, "lower": 2, "upper": 2, "log_diagonal": 1}
    constant_jacobian = True

    def _forward(self, x: Tensor) -> Tensor:
        # Of the matrix, not of the draws: TensorFlow's gradient has far fewer operations.
        lower = ops.take(self.lower, self.permutation, axis=len(self.lower.shape) - 2)
        *draws, channels = x.shape
        # As far as is known: a size of None counts as 1.
        many = channels <= _SMALL or math.prod(size or 1 for size in draws) > channels
        if many and len(self.lower.shape) == 2:
            return times_matrix(x, matmul(lower, self.upper), transpose=True)
        return times_matrix(times_matrix(x, self.upper, transpose=True), lower, transpose=True)

    def _inverse(self, y: Tensor) -> Tensor:
        lower, upper = self.lower, self.upper
        columns = ops.take(y, ops.argsort(self.permutation), axis=-1)[..., None]
        if one := len(lower.shape) == 2:
            columns = ops.transpose(ops.reshape(columns, (-1, y.shape[-1])))
        else:  # a solver takes one column for each matrix, and as many of either
            columns = columns + ops.zeros_like(lower[..., :1])
            lower, upper = lower + ops.zeros_like(columns), upper + ops.zeros_like(columns)
        columns = ops.solve_triangular(lower, columns, lower=True)
        columns = ops.solve_triangular(upper, columns, lower=False)
        return ops.reshape(ops.transpose(columns), ops.shape(y)) if one else columns[..., 0]

    def _forward_log_det_jacobian(self, x: Tensor) -> Tensor:
        return total(self.log_diagonal)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class InvertibleConv1x1(Flow):
    """Linear flow y = P L U x that mixes the channels; at every position alike, a 1x1 convolution.

    The permutation and the signs of the diagonal are fixed, and the diagonal moves from its start
    by a bounded factor, so the matrix can never become singular. One (channels, channels) weight
    packs it: below its diagonal L, above it U, on it the logarithm of that factor.

    Args:
        start: "orthogonal", a random rotation, or "identity". Both leave an isotropic Gaussian as
            it is.
        limit: bound of the log-factor on the diagonal.

    Example:
        >>> import keras
        >>> y = InvertibleConv1x1()(keras.ops.ones((1, 4)))
        >>> bool(abs(keras.ops.sum(y * y) - 4) < 1e-4)
        True

    References:
        Kingma and Dhariwal, Glow, arXiv 1807.03039.
    """

    def __init__(self, start: str = "orthogonal", limit: float = 3.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.start = checks.one_of("start", start, ("orthogonal", "identity"))
        self.limit = checks.positive("limit", limit)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        size = self.channels
        matrix = np.eye(size)
        if self.start == "orthogonal":  # repeatable after `keras.utils.set_random_seed`
            normal = np.random.default_rng(random.getrandbits(63)).standard_normal((size, size))
            q, r = np.linalg.qr(normal)
            matrix = q * np.sign(np.diagonal(r))
        permuter, lower, upper = scipy.linalg.lu(matrix)
        # Weights are larger than the triangles they hold: a step that moves every entry of a matrix
        # alike moves its norm by `channels` times that, and wide layers would soon blow up.
        self._spread = size**0.5
        packed = (np.tril(lower, -1) + np.triu(upper, 1)) * self._spread
        self.factors = self.add_parameter("factors", (size, size), _fixed(packed))
        order, start = _fixed(permuter.argmax(axis=1)), _fixed(np.diagonal(upper))
        fixed = {"trainable": False}
        self.permutation = self.add_parameter("permutation", (size,), order, dtype="int", **fixed)
        self.diagonal = self.add_parameter("diagonal", (size,), start, **fixed)

    def bijector(self, condition: Tensor | None = None) -> Conv1x1Bijector:
        packed = self.parameter(self.factors, condition)
        start = ops.convert_to_tensor(self.diagonal)
        triangles = packed * (1 / self._spread)
        diagonal = ops.diagonal(packed, axis1=-2, axis2=-1)
        log_factor = constraints.bounded(diagonal, self.limit)
        return Conv1x1Bijector(
            permutation=ops.convert_to_tensor(self.permutation),
            lower=set_diagonal(ops.tril(triangles), ops.ones_like(diagonal)),
            upper=set_diagonal(ops.triu(triangles), start * ops.exp(log_factor)),
            log_diagonal=ops.log(ops.abs(start)) + log_factor,
        )


def _fixed(value: np.ndarray) -> Any:
    return lambda shape, dtype: ops.convert_to_tensor(value, dtype=dtype)
