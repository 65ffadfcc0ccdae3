"""Forms of the Hessian, each as H = Q diag(l) Q^T: the posterior precision is f H + prior I.

So sampling, the evidence and a change of the prior need no further decomposition.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.weights.flat import double
from tfp_ibnn.weights.laplace.blocks import LEAVE_OUT, Block, product

LARGEST_SIDE = 10_000
"""Of a matrix that is decomposed."""

Scale = Callable[[Tensor], Tensor]
Taps = list[tuple[Block, Tensor]]
"""The blocks, each with what its `tap` gave for the input of its layer."""


class Structure:
    """A form of the Hessian over W weights: the base of all, and the diagonal, Q the identity.

    What `once` and `step` return is summed over batches and, of `step`, over the columns of the
    likelihood's factors; `finish` makes of the sums, arrays, what the variables hold.
    """

    passes = 1
    """At most so many over the data."""

    def __init__(self, blocks: list[Block], is_last_layer: bool = False, **_: Any) -> None:
        self.blocks, self.size = blocks, sum(block.size for block in blocks)
        self._is_last_layer = is_last_layer
        self.variables: list[keras.Variable] = []

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the variables; eigenvalues come last."""
        return {"diagonal": (self.size,)}

    def sums(self) -> list[tuple[int, ...]]:
        """Return the shapes of what `step` returns."""
        return [(self.size,)]

    def once(self, taps: Taps, mask: Tensor) -> list[Tensor]:
        """Return what a batch adds whatever the column; the mask is 0 where it is filled up."""
        return []

    def step(self, taps: Taps, g: list[Tensor], *basis: Tensor) -> list[Tensor]:
        """Return what one column adds; the arguments are those of the pass."""
        return [ops.concatenate([b.squares(x, part) for (b, x), part in zip(taps, g, strict=True)])]

    def at_once(self, taps: Taps, columns: Tensor) -> list[Tensor] | None:
        """Return what all columns (C, N, K) add, if that is less work than the steps."""
        return None

    def fit(self, one_pass: Callable[..., Any]) -> tuple[Any, list[np.ndarray]]:
        """Return what the last pass over the data found, and the values of the variables."""
        found = one_pass()
        return found, self.finish(found.values, found.examples)

    def finish(self, sums: list[np.ndarray], examples: int) -> list[np.ndarray]:
        """Return the values of the variables."""
        return sums

    def eigenvalues(self) -> np.ndarray:
        """Return l, (W,)."""
        return double(self.variables[-1])

    def scaled(self, x: Tensor, scale: Scale) -> Tensor:
        """Return Q s(l) Q^T times vectors x (..., W)."""
        return x * scale(ops.cast(self.variables[0], x.dtype))

    def row_variance(self, taps: Taps, g: list[Tensor], scale: Scale) -> Tensor:
        """Return x^T Q s(l) Q^T x, (N,), of the gradients x of one logit."""
        rows = all_rows(taps, g)
        return ops.sum(rows * self.scaled(rows, scale), axis=-1)

    def variance(self, features: Tensor, scale: Scale) -> Tensor:
        """Return the variances (N, K) of the logits of a last layer with s(l), its inputs given."""
        diagonal = ops.reshape(self.variables[0], (features.shape[-1], -1))
        return ops.matmul(ops.square(features), scale(diagonal))


class _Full(Structure):
    """All of the Hessian; W is limited."""

    def __init__(self, blocks: list[Block], **options: Any) -> None:
        super().__init__(blocks, **options)
        check_side(self.size, f"hessian_structure='full' of {self.size:,} weights")
        self._rank = self._wide = self.size

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"vectors": (self.size, self._rank), "values": (self._rank,)}

    def sums(self) -> list[tuple[int, ...]]:
        return [(self.size, self._wide)]

    def step(self, taps: Taps, g: list[Tensor], *basis: Tensor) -> list[Tensor]:
        rows = all_rows(taps, g)
        return [product(rows, ops.matmul(rows, *basis) if basis else rows)]

    def at_once(self, taps: Taps, columns: Tensor) -> list[Tensor] | None:
        if not self._is_last_layer:
            return None
        a = taps[0][1][:, 0]
        # The sum of (a a^T) x (L L^T) over the examples: a C-th of the work of the steps.
        right = a[:, None, :, None] * ops.einsum("cnk,cnl->nkl", columns, columns)[:, :, None]
        return [ops.reshape(ops.tensordot(a, right, [[0], [0]]), (self.size, self.size))]

    def finish(self, sums: list[np.ndarray], examples: int) -> list[np.ndarray]:
        return _eigen(sums[0])

    def scaled(self, x: Tensor, scale: Scale) -> Tensor:
        vectors, values = (ops.cast(v, x.dtype) for v in self.variables)
        return ops.matmul(ops.matmul(x, vectors) * scale(values), ops.transpose(vectors))

    def variance(self, features: Tensor, scale: Scale) -> Tensor:
        vectors, values = (ops.cast(v, features.dtype) for v in self.variables)
        by_logit = ops.reshape(vectors, (features.shape[-1], -1, vectors.shape[-1]))
        along = ops.square(ops.tensordot(features, by_logit, axes=1))
        return ops.matmul(along, scale(values))


class _LowRank(_Full):
    """The largest `rank` eigenvalues; H is 0 along all other directions.

    They are found by subspace iteration: every pass multiplies 10 vectors more than asked for by H,
    until the eigenvalues change by less than one in ten thousand.
    """

    passes = 20

    def __init__(self, blocks: list[Block], rank: int, **_: Any) -> None:
        Structure.__init__(self, blocks)
        self._rank, self._wide = (min(n, self.size) for n in (rank, rank + 10))

    def fit(self, one_pass: Callable[..., Any]) -> tuple[Any, list[np.ndarray]]:
        moved, old = np.random.default_rng(0).normal(size=(self.size, self._wide)), np.inf
        for _ in range(self.passes):
            basis = np.linalg.qr(moved)[0]
            found = one_pass(basis)
            (moved,) = found.values
            vectors, values = (x[..., -self._rank :] for x in _eigen(basis.T @ moved))
            if np.abs(values - old).max() <= 1e-4 * values.max():
                break
            old = values
        else:
            problem = f"The eigenvalues of 'lowrank' still change after {self.passes} passes"
            warnings.warn(f"{problem}: they are close together. Take a larger `rank`", stacklevel=4)
        return found, [basis @ vectors, values]

    def eigenvalues(self) -> np.ndarray:
        return np.concatenate([super().eigenvalues(), np.zeros(self.size - self._rank)])

    def scaled(self, x: Tensor, scale: Scale) -> Tensor:
        rest = scale(ops.zeros((), x.dtype))
        return rest * x + super().scaled(x, lambda values: scale(values) - rest)

    def variance(self, features: Tensor, scale: Scale) -> Tensor:
        rest = scale(ops.zeros((), features.dtype))
        along = super().variance(features, lambda values: scale(values) - rest)
        return rest * ops.sum(ops.square(features), axis=-1, keepdims=True) + along


class _Kronecker(Structure):
    """A Kronecker product A x G for each layer, H being block-diagonal (K-FAC, expand).

    A is the mean of a a^T over examples and positions, the input 1 of the bias included, and G the
    sum of g g^T over them and the columns.
    """

    def __init__(self, blocks: list[Block], **_: Any) -> None:
        super().__init__(blocks)
        for block in blocks:
            if not block.is_linear:
                kinds = "hessian_structure='kron' is for Dense layers, or convolutions of one group"
                what = f"{block.layer.name!r} is a {type(block.layer).__name__}"
                raise ValueError(f"{kinds}; {what}: use 'diag', or {LEAVE_OUT}.")
            side = max(block.inputs, block.outputs)
            check_side(side, f"hessian_structure='kron' of layer {block.layer.name!r}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {}
        for i, block in enumerate(self.blocks):
            for name, side in (("inputs", block.inputs), ("outputs", block.outputs)):
                shapes |= {f"{name}_vectors_{i}": (side, side), f"{name}_values_{i}": (side,)}
        return shapes

    def sums(self) -> list[tuple[int, ...]]:
        return [(block.outputs, block.outputs) for block in self.blocks]

    def once(self, taps: Taps, mask: Tensor) -> list[Tensor]:
        return [product(a * mask[:, None, None], a) / a.shape[1] for _, a in taps]

    def step(self, taps: Taps, g: list[Tensor], *basis: Tensor) -> list[Tensor]:
        outputs = [b.matrix_output(part) for (b, _), part in zip(taps, g, strict=True)]
        return [product(part, part) for part in outputs]

    def finish(self, sums: list[np.ndarray], examples: int) -> list[np.ndarray]:
        count = len(self.blocks)
        pairs = zip(sums[:count], sums[count:], strict=True)
        return [x for a, g in pairs for x in (*_eigen(a / examples), *_eigen(g))]

    def eigenvalues(self) -> np.ndarray:
        pairs = zip(self.variables[1::4], self.variables[3::4], strict=True)
        return np.concatenate([np.outer(double(a), double(g)).ravel() for a, g in pairs])

    def scaled(self, x: Tensor, scale: Scale) -> Tensor:
        found, start = [], 0
        for block, inputs, outputs, values in self._factors(x.dtype):
            shape = (*ops.shape(x)[:-1], block.inputs, block.outputs)
            part = ops.reshape(x[..., start : start + block.size], shape)
            part = ops.matmul(ops.transpose(inputs), ops.matmul(part, outputs)) * scale(values)
            part = ops.matmul(inputs, ops.matmul(part, ops.transpose(outputs)))
            found.append(ops.reshape(part, (*ops.shape(x)[:-1], block.size)))
            start += block.size
        return ops.concatenate(found, axis=-1)

    def row_variance(self, taps: Taps, g: list[Tensor], scale: Scale) -> Tensor:
        found, factors = 0.0, self._factors(g[0].dtype)
        for (_, x), part, (block, inputs, outputs, values) in zip(taps, g, factors, strict=True):
            # Inputs and outputs are turned, not their products, which are larger.
            left = ops.swapaxes(ops.matmul(x, inputs), 1, 2)
            rows = ops.matmul(left, ops.matmul(block.matrix_output(part), outputs))
            found += ops.sum(ops.square(rows) * scale(values), axis=(1, 2))
        return found

    def variance(self, features: Tensor, scale: Scale) -> Tensor:
        # Without the Jacobian, which has N K W numbers.
        ((_, inputs, outputs, values),) = self._factors(features.dtype)
        turned = ops.matmul(ops.square(ops.matmul(features, inputs)), scale(values))
        return ops.matmul(turned, ops.transpose(ops.square(outputs)))

    def _factors(self, dtype: str) -> Iterator[tuple[Block, Tensor, Tensor, Tensor]]:
        """Yield the blocks with the eigenvectors of A and of G, and the products of eigenvalues."""
        for i, block in enumerate(self.blocks):
            inputs, a, outputs, g = (ops.cast(v, dtype) for v in self.variables[4 * i : 4 * i + 4])
            yield block, inputs, outputs, a[:, None] * g


STRUCTURES = {"diag": Structure, "kron": _Kronecker, "full": _Full, "lowrank": _LowRank}


def all_rows(taps: Taps, g: list[Tensor]) -> Tensor:
    """Return the gradients (N, W) of all blocks."""
    rows = [block.rows(x, part) for (block, x), part in zip(taps, g, strict=True)]
    return ops.concatenate(rows, axis=-1)


def check_side(side: int, what: str) -> None:
    """Raise if a matrix is too large."""
    if side > LARGEST_SIDE:
        need = f"{what} needs {side:,} x {side:,} numbers, {8 * side**2 / 1e9:.1f} GB"
        remedy = "Use 'diag' or 'lowrank', or fewer weights by `subset_of_weights`"
        raise ValueError(f"{need}; at most {LARGEST_SIDE:,} x {LARGEST_SIDE:,} fit. {remedy}.")


def _eigen(matrix: np.ndarray) -> list[np.ndarray]:
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return [vectors, np.maximum(values, 0)]
