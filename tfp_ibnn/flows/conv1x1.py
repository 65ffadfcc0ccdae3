"""Invertible 1x1 convolution, a linear map of the channels, in LU form."""

import math
import random
from collections.abc import Callable
from typing import Any, ClassVar

import keras
import numpy as np
import scipy.linalg
from keras import ops

from tfp_ibnn._core import checks, constraints
from tfp_ibnn._core.backend import Tensor, matmul, set_diagonal
from tfp_ibnn.flows._rows import times_matrix, total
from tfp_ibnn.flows.bijector import FlowBijector
from tfp_ibnn.flows.flow import Flow

_SMALL = 64  # a product of two matrices of this size is nothing


class Conv1x1Bijector(FlowBijector):
    """y = P L U x, with a permutation, a unit lower and an upper triangular matrix.

    Log-determinant: sum_i log|U_ii|, no determinant is computed. Invertible for U_ii != 0; the
    inverse is two triangular solves. Cost: O(channels^2) per draw, both ways. Where there are more
    draws than channels, the factors are multiplied once, instead of two products per draw.

    Args:
        permutation: tensor (channels,), integers: (Pv)_i = v_permutation[i].
        lower: tensor (..., channels, channels), unit lower triangular.
        upper: tensor (..., channels, channels), upper triangular.
        log_diagonal: tensor (..., channels), log|U_ii|.
    """

    parameter_ndims: ClassVar = {"permutation": 1, "lower": 2, "upper": 2, "log_diagonal": 1}
    constant_jacobian = True

    def _forward(self, x: Tensor) -> Tensor:
        # Of the matrix, not of the draws: TensorFlow's gradient has far fewer operations.
        rows_axis = len(self.lower.shape) - 2
        lower = ops.take(self.lower, self.permutation, axis=rows_axis)
        if self._is_shared and _multiplies_once(x):
            matrix = matmul(lower, self.upper)
            return times_matrix(x, matrix, transpose=True)
        x = times_matrix(x, self.upper, transpose=True)
        return times_matrix(x, lower, transpose=True)

    def _inverse(self, y: Tensor) -> Tensor:
        inverse_permutation = ops.argsort(self.permutation)
        y = ops.take(y, inverse_permutation, axis=-1)
        if self._is_shared:
            rows = ops.reshape(y, (-1, y.shape[-1]))
            columns = ops.transpose(rows)
            columns = _solve(self.lower, self.upper, columns)
            rows = ops.transpose(columns)
            return ops.reshape(rows, ops.shape(y))
        # A solver takes one column for each matrix, and as many of either.
        one_of_each_matrix = self.lower[..., :1]
        columns = y[..., None] + ops.zeros_like(one_of_each_matrix)
        one_of_each_draw = ops.zeros_like(columns)
        lower = self.lower + one_of_each_draw
        upper = self.upper + one_of_each_draw
        columns = _solve(lower, upper, columns)
        return columns[..., 0]

    def _forward_log_det_jacobian(self, x: Tensor) -> Tensor:
        return total(self.log_diagonal)

    @property
    def _is_shared(self) -> bool:
        """Whether there is one matrix for all rows."""
        return len(self.lower.shape) == 2


def _multiplies_once(x: Tensor) -> bool:
    """Return whether it pays to multiply both factors, as far as the number of draws is known."""
    *draws, channels = x.shape
    number = math.prod(size or 1 for size in draws)  # a size of None counts as 1
    return channels <= _SMALL or number > channels


def _solve(lower: Tensor, upper: Tensor, columns: Tensor) -> Tensor:
    """Return (L U)^-1 columns."""
    columns = ops.solve_triangular(lower, columns, lower=True)
    return ops.solve_triangular(upper, columns, lower=False)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class InvertibleConv1x1(Flow):
    """Linear flow y = P L U x that mixes the channels; at every position alike, a 1x1 convolution.

    The permutation and the signs of the diagonal are fixed, and the diagonal moves from its start
    by a bounded factor, so the matrix can never become singular. One (channels, channels) weight
    packs it: below its diagonal L, above it U, on it the logarithm of that factor.

    Log-determinant: sum_i log|U_ii|. Cost: O(channels^2) per draw, both ways.

    Args:
        start: "orthogonal", the default, for a random rotation, or "identity". Both leave an
            isotropic Gaussian as it is.
        limit: positive float, bound of the log-factor on the diagonal. Defaults to 3.
        **kwargs: arguments of `Flow`.

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
        if self.start == "orthogonal":
            matrix = _random_rotation(size)
        permuter, lower, upper = scipy.linalg.lu(matrix)
        # Weights are larger than the triangles they hold: a step that moves every entry of a matrix
        # alike moves its norm by `channels` times that, and wide layers would soon blow up.
        self._spread = size**0.5
        triangles = np.tril(lower, -1) + np.triu(upper, 1)
        self.factors = self.add_parameter(
            "factors",
            (size, size),
            _constant(triangles * self._spread),
        )
        self.permutation = self.add_parameter(
            "permutation",
            (size,),
            _constant(permuter.argmax(axis=1)),
            dtype="int",
            trainable=False,
        )
        self.diagonal = self.add_parameter(
            "diagonal",
            (size,),
            _constant(np.diagonal(upper)),
            trainable=False,
        )

    def bijector(self, condition: Tensor | None = None) -> Conv1x1Bijector:
        packed = self.parameter(self.factors, condition)
        start = ops.convert_to_tensor(self.diagonal)
        triangles = packed * (1 / self._spread)
        log_factor = ops.diagonal(packed, axis1=-2, axis2=-1)
        ones = ops.ones_like(log_factor)
        log_factor = constraints.bounded(log_factor, self.limit)
        log_start = ops.log(ops.abs(start))
        diagonal = start * ops.exp(log_factor)
        return Conv1x1Bijector(
            permutation=ops.convert_to_tensor(self.permutation),
            lower=set_diagonal(ops.tril(triangles), ones),
            upper=set_diagonal(ops.triu(triangles), diagonal),
            log_diagonal=log_start + log_factor,
        )


def _random_rotation(size: int) -> np.ndarray:
    """Return an orthogonal matrix, repeatable after `keras.utils.set_random_seed`."""
    seed = random.getrandbits(63)
    normal = np.random.default_rng(seed).standard_normal((size, size))
    q, r = np.linalg.qr(normal)
    signs = np.sign(np.diagonal(r))
    return q * signs


def _constant(value: np.ndarray) -> Callable[..., Tensor]:
    """Return an initializer; that of Keras would round to float32 first."""
    return lambda shape, dtype: ops.convert_to_tensor(value, dtype=dtype)
