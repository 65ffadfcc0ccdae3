"""Sylvester flow with orthogonal projections."""

from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks, constraints
from tfp_ibnn._core.backend import Tensor, matmul, set_diagonal, tanh
from tfp_ibnn.flows._rows import column, times_matrix, total
from tfp_ibnn.flows.bijector import FlowBijector
from tfp_ibnn.flows.flow import Flow
from tfp_ibnn.flows.planar import solve_monotone


class SylvesterBijector(FlowBijector):
    """y = x + Q R tanh(S Q'x + b): a planar flow with several hidden units.

    Q has orthonormal columns; R and S are upper triangular. By Sylvester's identity the
    log-determinant is sum_i log(1 + R_ii S_ii (1 - tanh^2(.)_i)). Invertible for R_ii S_ii > -1.

    Inverse: with a = Q'x and v = Q'y, v = a + R tanh(S a + b) is solved from the last row to the
    first. Once a_j is known for j > i, row i reads
        a_i + R_ii tanh(S_ii a_i + c_i) = v_i - sum_{j>i} R_ij h_j,   h = tanh(S a + b),
    and multiplied by S_ii it is the planar equation for S_ii a_i. Then x = y - Q R h.

    Cost: O(channels * units + units^2) per draw; the inverse adds `units` scalar solves.

    Args:
        q: tensor (..., channels, units), orthonormal columns.
        r: tensor (..., units, units), upper triangular.
        s: tensor (..., units, units), upper triangular, with r_ii * s_ii > -1.
        b: tensor (..., units).
    """

    parameter_ndims: ClassVar[dict[str, int]] = {"q": 2, "r": 2, "s": 2, "b": 1}

    def _inverse(self, y: Tensor) -> Tensor:
        v = times_matrix(y, self.q)
        units = self.b.shape[-1]
        a: list[Tensor] = [None] * units
        hidden: list[Tensor] = [None] * units
        for i in reversed(range(units)):
            r_ii = self.r[..., i, i]
            s_ii = self.s[..., i, i]
            offset = self.b[..., i] + _sum_after(i, self.s, a)
            target = v[..., i] - _sum_after(i, self.r, hidden)
            slope = r_ii * s_ii
            scaled_target = s_ii * target
            scaled = solve_monotone(slope, offset, scaled_target)
            bend = tanh(scaled + offset)
            hidden[i] = bend
            a[i] = target - r_ii * bend
        hidden = ops.stack(hidden, axis=-1)
        return y - self._lift(hidden)

    def forward_and_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = times_matrix(x, self.q)
        inputs = times_matrix(a, self.s, transpose=True)
        hidden = tanh(inputs + self.b)
        y = x + self._lift(hidden)
        products = _diagonal(self.r) * _diagonal(self.s)
        bends = 1 - hidden * hidden
        slopes = products * bends
        log_slopes = ops.log1p(slopes)
        return y, ops.sum(log_slopes, axis=-1)

    def _lift(self, hidden: Tensor) -> Tensor:
        """Return Q R h."""
        lifted = times_matrix(hidden, self.r, transpose=True)
        return times_matrix(lifted, self.q, transpose=True)


def _sum_after(i: int, matrix: Tensor, values: list[Tensor]) -> Tensor | int:
    """Return the sum of matrix_ij values_j over all j > i."""
    result = 0
    for j in range(i + 1, len(values)):
        entry = matrix[..., i, j]
        result = result + entry * values[j]
    return result


def _diagonal(matrix: Tensor) -> Tensor:
    return ops.diagonal(matrix, axis1=-2, axis2=-1)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Sylvester(Flow):
    """Sylvester flow, y = x + Q R tanh(S Q'x + b), of several hidden units.

    Q is a product of Householder reflections. The diagonals are S_ii = exp(bounded(.)) > 0 (its
    sign would only be traded against those of b and R) and R_ii = k_i / S_ii with k_i > -1 free
    (`constraints.above_minus_one`). R starts at 0: the identity.

    Log-determinant: sum_i log(1 + k_i (1 - tanh^2(.)_i)). Always invertible, by `units` scalar
    equations. Cost: O(channels * units + units^2) per draw.

    Args:
        units: positive int, the number of hidden units; at most `channels` are used. Defaults to 8.
        **kwargs: arguments of `Flow`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> flow = ibnn.flows.Sylvester(units=2)
        >>> flow.build((None, 3))
        >>> y, log_det = flow.forward_and_log_det(keras.ops.ones((2, 3)))
        >>> float(y[0, 0]), float(log_det[0])
        (1.0, 0.0)

    References:
        van den Berg et al., Sylvester Normalizing Flows, arXiv 1803.05649.
    """

    stackable = True

    def __init__(self, units: int = 8, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = checks.positive_integer("units", units, checks.LARGEST_SIZE)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        units = min(self.units, self.channels)
        square = (units, units)
        normal = keras.initializers.RandomNormal(stddev=1.0)
        small = keras.initializers.RandomNormal(stddev=units**-0.5)
        self.reflections = self.add_parameter(
            "reflections",
            (units, self.channels),
            normal,
        )
        self.r = self.add_parameter("r", square, "zeros")
        self.s = self.add_parameter("s", square, small)
        self.b = self.add_parameter("b", (units,), "zeros")

    def bijector_of(
        self, reflections: Tensor, r: Tensor, s: Tensor, b: Tensor
    ) -> SylvesterBijector:
        log_s_diagonal = constraints.bounded(_diagonal(s), 2.0)
        s_diagonal = ops.exp(log_s_diagonal)
        products = constraints.above_minus_one(_diagonal(r))
        r_diagonal = products / s_diagonal
        return SylvesterBijector(
            q=_orthogonal(reflections),
            r=set_diagonal(ops.triu(r), r_diagonal),
            s=set_diagonal(ops.triu(s), s_diagonal),
            b=b,
        )


def _orthogonal(vectors: Tensor) -> Tensor:
    """Return the first `units` columns of the product of reflections by (..., units, channels).

    It is I - V' T V for unit rows V, where T^-1 has 1/2 on its diagonal and V V' above it.
    """
    *_, units, channels = vectors.shape
    rows = _unit_rows(vectors)
    columns = ops.swapaxes(rows, -1, -2)
    eye = np.eye(channels)
    eye = ops.cast(eye, rows.dtype)
    diagonal = 2 * eye[:units, :units]
    products = matmul(rows, columns)
    t = _inverse_by_blocks(products, diagonal)
    reflected = matmul(t, rows[..., :units])
    reflected = matmul(columns, reflected)
    return eye[:, :units] - reflected


def _unit_rows(vectors: Tensor) -> Tensor:
    """Return vectors of length 1; of one too short to have a direction, 0: no reflection."""
    square = total(vectors * vectors)
    is_long_enough = square > 1e-24
    divisor = ops.where(is_long_enough, square, 1)
    rows = vectors * column(ops.rsqrt(divisor))
    return ops.where(column(is_long_enough), rows, 0)


def _inverse_by_blocks(products: Tensor, t: Tensor) -> Tensor:
    """Return T for the products V V' (..., units, units), from the diagonal matrix 2 I.

    T grows by blocks, since that of two products of reflections A and B is T_A and T_B on its
    diagonal, and -T_A V_A V_B' T_B above T_B.
    """
    block = np.arange(t.shape[-1])  # which block each row is in
    while block[-1] > 0:
        pair = block // 2
        are_joined = pair[:, None] == pair
        is_above = block[:, None] < block
        above = ops.where(are_joined & is_above, products, 0)
        change = matmul(t, matmul(above, t))
        t = t - change
        block = pair
    return t
