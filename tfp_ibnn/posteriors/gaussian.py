"""Gaussians whose channels depend on each other: a full covariance, and a low-rank one."""

from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks, constraints
from tfp_ibnn._core.backend import Tensor, matmul, tfd
from tfp_ibnn._core.protocols import Draw
from tfp_ibnn.posteriors.base import Component, Posterior


class _CorrelatedNormal(Posterior):
    """A Gaussian z = loc + scale * M eps; a subclass has `_mixed`, M eps, and `_traces`."""

    def __init__(self, *, initial_scale: float | None = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.initial_scale = initial_scale
        scale = self.prior_scale if initial_scale is None else initial_scale
        self._start = checks.scale("initial_scale", scale)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        constant, shape = keras.initializers.Constant, (self.channels,)
        raw = constraints.inverse_scale(self._start)
        self.loc = self._add_parameter("loc", shape, constant(self.prior_loc))
        self.raw_scale = self._add_parameter("raw_scale", shape, constant(raw))

    def transform(self, noise: Tensor, component: Component = None, training: bool = False) -> Draw:
        noise = ops.convert_to_tensor(noise, dtype=self.dtype)
        loc, scale = ops.convert_to_tensor(self.loc), self.scales()
        z = loc + scale * self._mixed(noise)
        excess, log_det = self._traces()
        kl, entropy = self._gaussian(loc, scale, z)
        entropy = entropy + log_det
        if not self._has_plain_prior:
            return Draw(z, -entropy - self._log_prior(z), entropy)
        ratio = scale / self._prior_scale()[0]
        return Draw(z, kl + ops.sum(ratio * ratio * excess) / 2 - log_det, entropy)

    def mean(self) -> Tensor:
        return ops.convert_to_tensor(self.loc)

    def scales(self) -> Tensor:
        """Return `scale`, (channels,)."""
        return constraints.scale(self.raw_scale)

    def distribution(self) -> tfd.Distribution:
        factor = self._mixed(ops.eye(self.channels, dtype=self.dtype)) * self.scales()
        factor = ops.cholesky(matmul(ops.transpose(factor), factor))
        return tfd.MultivariateNormalTriL(ops.convert_to_tensor(self.loc), factor)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class NormalFull(_CorrelatedNormal):
    """A Gaussian with a full covariance: z = loc + scale * L eps, L unit lower triangular.

    KL and entropy are closed forms, log det = sum_c log scale_c. It starts as `NormalAffine` does,
    with L = 1. Parameters: channels * (channels + 3) / 2; cost: O(channels^2) per draw. This is the
    control for any flow: what it reaches is not due to the flow's shape. `initial_scale` is that of
    `FlowPosterior`, and the other arguments are those of `Posterior`.
    """

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        if (size := self.channels) > 2**13:  # its matrix has 256 MB there
            raise ValueError(f"NormalFull takes <= 8192 channels; got {size}. Use NormalLowRank().")
        self.lower = self._add_parameter("lower", (size * (size - 1) // 2,), "zeros")

    def _matrix(self) -> Tensor:
        size = self.channels
        # Where each entry of the matrix stands among 0, 1 and the lower ones.
        place = np.zeros((size, size), "int32")
        place[np.tril_indices(size, -1)] = np.arange(size * (size - 1) // 2) + 2
        place[np.diag_indices(size)] = 1
        ends = ops.convert_to_tensor([0.0, 1.0], dtype=self.dtype)
        return ops.take(ops.concatenate([ends, ops.convert_to_tensor(self.lower)]), place)

    def _mixed(self, noise: Tensor) -> Tensor:
        return matmul(noise, ops.transpose(self._matrix()))

    def _traces(self) -> tuple[Tensor, Tensor]:
        """Return the diagonal of M M' - 1, (channels,), and log det M."""
        below = self._matrix() - ops.eye(self.channels, dtype=self.dtype)
        return ops.sum(below * below, axis=1), ops.zeros((), dtype=self.dtype)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class NormalLowRank(_CorrelatedNormal):
    """A Gaussian of covariance D + F F', D diagonal and F (channels, rank).

    Drawn as z = loc + scale * (eps + U U' eps), whose covariance scale (1 + U U')^2 scale is of
    that form, any such one for some U. KL and entropy are closed forms, log det = sum_c log scale_c
    + log det(1 + U' U). It starts as `NormalAffine` does, up to a small random U. Parameters:
    channels * (rank + 2); cost: O(channels * rank) per draw. Other arguments: see `NormalFull`.
    Reference: Ong et al., Gaussian Variational Approximation, arXiv 1701.03208.
    """

    def __init__(self, rank: int = 4, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rank = checks.positive_integer("rank", rank, checks.LARGEST_SIZE)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        # At 0 the gradient vanishes.
        small = keras.initializers.RandomNormal(stddev=0.05 / self.channels**0.5)
        self.columns = self._add_parameter("columns", (self.channels, self.rank), small)

    def _mixed(self, noise: Tensor) -> Tensor:
        columns = ops.convert_to_tensor(self.columns)
        return noise + matmul(matmul(noise, columns), ops.transpose(columns))

    def _traces(self) -> tuple[Tensor, Tensor]:
        columns = ops.convert_to_tensor(self.columns)
        inner, one = matmul(ops.transpose(columns), columns), ops.eye(self.rank, dtype=self.dtype)
        excess = ops.sum(matmul(columns, 2 * one + inner) * columns, axis=1)
        return excess, 2 * ops.sum(ops.log(ops.diagonal(ops.cholesky(one + inner))))
