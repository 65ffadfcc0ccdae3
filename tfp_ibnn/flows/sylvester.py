"""Sylvester flow with orthogonal projections."""

from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks, constraints
from tfp_ibnn._core.backend import Tensor, matmul, set_diagonal, tanh
from tfp_ibnn.flows.flow import Flow, FlowBijector, column, times_matrix, total
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
        q: (..., channels, units), orthonormal columns.
        r: (..., units, units), upper triangular.
        s: (..., units, units), upper triangular, with r_ii * s_ii > -1.
        b: (..., units)
    """

    parameter_ndims: ClassVar[dict[str, int]] = {"q": 2, "r": 2, "s": 2, "b": 1}

    def _inverse(self, y: Tensor) -> Tensor:
        v = times_matrix(y, self.q)
        units = self.b.shape[-1]
        solved: list[Tensor] = [None] * units  # S a, then its tanh, from the last row up
        along: list[Tensor] = [None] * units
        for i in reversed(range(units)):
            later = range(i + 1, units)
            offset = self.b[..., i] + sum(self.s[..., i, j] * along[j] for j in later)
            target = v[..., i] - sum(self.r[..., i, j] * solved[j] for j in later)
            r, s = self.r[..., i, i], self.s[..., i, i]
            steep = solve_monotone(r * s, offset, s * target)
            solved[i] = tanh(steep + offset)
            along[i] = target - r * solved[i]
        return y - self._lift(ops.stack(solved, axis=-1))

    def forward_and_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = tanh(times_matrix(times_matrix(x, self.q), self.s, transpose=True) + self.b)
        slopes = _diagonal(self.r) * _diagonal(self.s) * (1 - hidden * hidden)
        return x + self._lift(hidden), ops.sum(ops.log1p(slopes), axis=-1)

    def _lift(self, hidden: Tensor) -> Tensor:
        lifted = times_matrix(hidden, self.r, transpose=True)
        return times_matrix(lifted, self.q, transpose=True)


def _diagonal(matrix: Tensor) -> Tensor:
    return ops.diagonal(matrix, axis1=-2, axis2=-1)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Sylvester(Flow):
    """Sylvester flow, y = x + Q R tanh(S Q'x + b), of `units` hidden units, at most of `channels`.

    Q is a product of Householder reflections. The diagonals are S_ii = exp(bounded(.)) > 0 (its
    sign would only be traded against those of b and R) and R_ii = k_i / S_ii with k_i > -1 free
    (`constraints.above_minus_one`). R starts at 0: the identity.

    References:
        van den Berg et al., Sylvester Normalizing Flows, arXiv 1803.05649.
    """

    def __init__(self, units: int = 8, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = checks.positive_integer("units", units, checks.LARGEST_SIZE)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        units = min(self.units, self.channels)
        normal = keras.initializers.RandomNormal(stddev=1.0)
        small = keras.initializers.RandomNormal(stddev=units**-0.5)
        self.reflections = self.add_parameter("reflections", (units, self.channels), normal)
        self.r = self.add_parameter("r", (units, units), "zeros")
        self.s = self.add_parameter("s", (units, units), small)
        self.b = self.add_parameter("b", (units,), "zeros")

    def bijector_of(
        self, reflections: Tensor, r: Tensor, s: Tensor, b: Tensor
    ) -> SylvesterBijector:
        s_diagonal = ops.exp(constraints.bounded(_diagonal(s), 2.0))
        r_diagonal = constraints.above_minus_one(_diagonal(r)) / s_diagonal
        r, s = set_diagonal(ops.triu(r), r_diagonal), set_diagonal(ops.triu(s), s_diagonal)
        return SylvesterBijector(q=_orthogonal(reflections), r=r, s=s, b=b)


def _orthogonal(vectors: Tensor) -> Tensor:
    """Return the first `units` columns of the product of reflections by (..., units, channels).

    It is I - V' T V for unit rows V, where T^-1 has 1/2 on its diagonal and V V' above it. T grows
    by blocks, since that of two products A and B is T_A, -T_A V_A V_B' T_B above T_B.
    """
    # A vector too short to have a direction stands for no reflection.
    square = total(vectors * vectors)
    long_enough = square > 1e-24
    factor = column(ops.rsqrt(ops.where(long_enough, square, 1)))
    rows = ops.where(column(long_enough), vectors * factor, 0)
    columns, block = ops.swapaxes(rows, -1, -2), np.arange(rows.shape[-2])
    products, eye = matmul(rows, columns), ops.cast(np.eye(rows.shape[-1]), rows.dtype)
    t = 2 * eye[: len(block), : len(block)]
    while block[-1]:
        joined = (block[:, None] // 2 == block // 2) & (block[:, None] < block)
        t, block = t - matmul(t, matmul(ops.where(joined, products, 0), t)), block // 2
    return eye[:, : t.shape[-1]] - matmul(columns, matmul(t, rows[..., : t.shape[-1]]))
