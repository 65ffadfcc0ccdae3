"""A Kronecker product for each layer, the Hessian being block-diagonal."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.weights.laplace.blocks import Block, Slope, Tap, product
from tfp_ibnn.weights.laplace.structure import Scale, Structure, check_side, eigen
from tfp_ibnn.weights.vectors import double


class _Factors(NamedTuple):
    """The decomposed Hessian of a block, A x G."""

    inputs: Tensor  # eigenvectors of A, (inputs, inputs)
    outputs: Tensor  # eigenvectors of G, (outputs, outputs)
    values: Tensor  # products of the eigenvalues, (inputs, outputs)


class Kronecker(Structure):
    """A Kronecker product A x G for each layer, H being block-diagonal (K-FAC, expand).

    A is the mean of a a^T over examples and positions, the input 1 of the bias included, and G the
    sum of g g^T over them and the columns.
    """

    def __init__(self, blocks: list[Block], **options: Any) -> None:
        super().__init__(blocks, **options)
        for block in blocks:
            name = block.layer.name
            if not block.is_linear:
                raise ValueError(
                    "hessian_structure='kron' is for Dense layers, or convolutions of one group; "
                    f"{name!r} is a {type(block.layer).__name__}: use 'diag', or leave it out by "
                    "a pattern in `subset_of_weights`."
                )
            side = max(block.inputs, block.outputs)
            check_side(side, f"hessian_structure='kron' of layer {name!r}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {}
        for i, block in enumerate(self.blocks):
            shapes[f"inputs_vectors_{i}"] = (block.inputs, block.inputs)
            shapes[f"inputs_values_{i}"] = (block.inputs,)
            shapes[f"outputs_vectors_{i}"] = (block.outputs, block.outputs)
            shapes[f"outputs_values_{i}"] = (block.outputs,)
        return shapes

    def sums(self) -> list[tuple[int, ...]]:
        return [(block.outputs, block.outputs) for block in self.blocks]

    def per_batch(self, taps: list[Tap], weight: Tensor) -> list[Tensor]:
        weights = weight[:, None, None]
        terms = []
        for _, a in taps:
            positions = a.shape[1]
            total = product(a * weights, a)
            terms.append(total / positions)
        return terms

    def step(self, slopes: list[Slope], *basis: Tensor) -> list[Tensor]:
        terms = []
        for block, _, g in slopes:
            rows = block.matrix_output(g)
            terms.append(product(rows, rows))
        return terms

    def finish(self, sums: list[np.ndarray], examples: float) -> list[np.ndarray]:
        count = len(self.blocks)
        values = []
        for a, g in zip(sums[:count], sums[count:], strict=True):
            values += eigen(a / examples)
            values += eigen(g)
        return values

    def eigenvalues(self) -> np.ndarray:
        of_inputs = self.variables[1::4]
        of_outputs = self.variables[3::4]
        parts = []
        for a, g in zip(of_inputs, of_outputs, strict=True):
            products = np.outer(double(a), double(g))
            parts.append(products.ravel())
        return np.concatenate(parts)

    def scaled(self, x: Tensor, scale: Scale) -> Tensor:
        parts = []
        start = 0
        for block, factors in zip(self.blocks, self._factors(x.dtype), strict=True):
            end = start + block.size
            parts.append(_scaled_part(x[..., start:end], block, factors, scale))
            start = end
        return ops.concatenate(parts, axis=-1)

    def row_variance(self, slopes: list[Slope], scale: Scale) -> Tensor:
        all_factors = self._factors(slopes[0].g.dtype)
        total = 0.0
        for slope, factors in zip(slopes, all_factors, strict=True):
            total += _row_variance(slope, factors, scale)
        return total

    def variance(self, features: Tensor, scale: Scale) -> Tensor:
        # Without the Jacobian, which has N K W numbers.
        ((inputs, outputs, values),) = self._factors(features.dtype)
        turned = ops.matmul(features, inputs)
        squares = ops.square(turned)
        along = ops.matmul(squares, scale(values))
        squared_outputs = ops.square(outputs)
        return ops.matmul(along, ops.transpose(squared_outputs))

    def _factors(self, dtype: str) -> Iterator[_Factors]:
        """Yield the decomposed Hessian of each block."""
        values = [ops.cast(v, dtype) for v in self.variables]
        for start in range(0, len(values), 4):
            inputs, a, outputs, g = values[start : start + 4]
            products = a[:, None] * g
            yield _Factors(inputs, outputs, products)


def _scaled_part(x: Tensor, block: Block, factors: _Factors, scale: Scale) -> Tensor:
    """Return s(A x G) times vectors x (..., size) over the weights of a block."""
    inputs, outputs, values = factors
    leading = ops.shape(x)[:-1]
    matrices = ops.reshape(x, (*leading, block.inputs, block.outputs))
    turned = ops.matmul(matrices, outputs)
    turned = ops.matmul(ops.transpose(inputs), turned)
    scaled = turned * scale(values)
    back = ops.matmul(scaled, ops.transpose(outputs))
    back = ops.matmul(inputs, back)
    return ops.reshape(back, (*leading, block.size))


def _row_variance(slope: Slope, factors: _Factors, scale: Scale) -> Tensor:
    """Return the part of a block in the variance of one logit, (N,)."""
    # Inputs and outputs are turned, not their products, which are larger.
    block, x, g = slope
    inputs = ops.matmul(x, factors.inputs)
    outputs = ops.matmul(block.matrix_output(g), factors.outputs)
    rows = ops.matmul(ops.swapaxes(inputs, 1, 2), outputs)
    variances = ops.square(rows) * scale(factors.values)
    return ops.sum(variances, axis=(1, 2))
