"""All of the Hessian, or its largest eigenvalues."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.weights.laplace.blocks import Block, Slope, Tap, product
from tfp_ibnn.weights.laplace.structure import Scale, Structure, all_rows, check_side, eigen

_OVERSAMPLING = 10
_TOLERANCE = 1e-4


class _Eigenvectors(Structure):
    """Eigenvectors over all weights, with their eigenvalues; the Hessian times a basis is summed.

    The basis is the identity, or the arguments of a pass.
    """

    _rank: int  # number of eigenvectors
    _wide: int  # number of columns of the basis

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"vectors": (self.size, self._rank), "values": (self._rank,)}

    def sums(self) -> list[tuple[int, ...]]:
        return [(self.size, self._wide)]

    def step(self, slopes: list[Slope], *basis: Tensor) -> list[Tensor]:
        rows = all_rows(slopes)
        in_basis = rows
        if basis:
            in_basis = ops.matmul(rows, *basis)
        return [product(rows, in_basis)]

    def scaled(self, x: Tensor, scale: Scale) -> Tensor:
        vectors, values = self._decomposition(x.dtype)
        along = ops.matmul(x, vectors)
        along = along * scale(values)
        return ops.matmul(along, ops.transpose(vectors))

    def variance(self, features: Tensor, scale: Scale) -> Tensor:
        # Of a last Dense layer alone: each vector is a kernel (inputs, outputs).
        vectors, values = self._decomposition(features.dtype)
        inputs = features.shape[-1]
        rank = vectors.shape[-1]
        by_logit = ops.reshape(vectors, (inputs, -1, rank))
        along = ops.tensordot(features, by_logit, axes=1)
        squares = ops.square(along)
        return ops.matmul(squares, scale(values))

    def _decomposition(self, dtype: str) -> tuple[Tensor, Tensor]:
        vectors, values = self.variables
        return ops.cast(vectors, dtype), ops.cast(values, dtype)


class Full(_Eigenvectors):
    """All of the Hessian; W is limited."""

    def __init__(self, blocks: list[Block], **options: Any) -> None:
        super().__init__(blocks, **options)
        check_side(self.size, f"hessian_structure='full' of {self.size:,} weights")
        self._rank = self.size
        self._wide = self.size

    def all_steps(self, taps: list[Tap], columns: Tensor) -> list[Tensor] | None:
        if not self._is_last_layer:
            return None
        (tap,) = taps
        a = tap.x[:, 0]
        # The sum of (a a^T) x (L L^T) over the examples: a C-th of the work of the steps.
        hessians = ops.einsum("cnk,cnl->nkl", columns, columns)  # of minus log p(y | z)
        right = a[:, None, :, None] * hessians[:, :, None]
        total = ops.tensordot(a, right, [[0], [0]])
        return [ops.reshape(total, (self.size, self.size))]

    def finish(self, sums: list[np.ndarray], examples: float) -> list[np.ndarray]:
        return [*eigen(sums[0])]


class LowRank(_Eigenvectors):
    """The largest `rank` eigenvalues; H is 0 along all other directions.

    They are found by subspace iteration: every pass multiplies 10 vectors more than asked for by H,
    until the eigenvalues change by less than one in ten thousand.
    """

    passes = 20

    def __init__(self, blocks: list[Block], rank: int, **options: Any) -> None:
        super().__init__(blocks, **options)
        self._rank = min(rank, self.size)
        self._wide = min(rank + _OVERSAMPLING, self.size)

    def fit(self, one_pass: Callable[..., Any]) -> tuple[Any, list[np.ndarray]]:
        product_with_h = np.random.default_rng(0).normal(size=(self.size, self._wide))
        previous = np.inf
        for _ in range(self.passes):
            basis, _ = np.linalg.qr(product_with_h)
            last_pass = one_pass(basis)
            (product_with_h,) = last_pass.values
            vectors, values = eigen(basis.T @ product_with_h)
            largest = values[-self._rank :]
            change = np.abs(largest - previous).max()
            if change <= _TOLERANCE * largest.max():
                break
            previous = largest
        else:
            warnings.warn(
                f"The eigenvalues of 'lowrank' still change after {self.passes} passes: they are "
                "close together. Take a larger `rank`.",
                stacklevel=5,
            )
        return last_pass, [basis @ vectors[:, -self._rank :], largest]

    def eigenvalues(self) -> np.ndarray:
        zeros = np.zeros(self.size - self._rank)
        return np.concatenate([super().eigenvalues(), zeros])

    def scaled(self, x: Tensor, scale: Scale) -> Tensor:
        zero = ops.zeros((), x.dtype)
        of_zero = scale(zero)
        along = super().scaled(x, lambda values: scale(values) - of_zero)
        return of_zero * x + along

    def variance(self, features: Tensor, scale: Scale) -> Tensor:
        zero = ops.zeros((), features.dtype)
        of_zero = scale(zero)
        along = super().variance(features, lambda values: scale(values) - of_zero)
        squares = ops.square(features)
        total = ops.sum(squares, axis=-1, keepdims=True)
        return of_zero * total + along
