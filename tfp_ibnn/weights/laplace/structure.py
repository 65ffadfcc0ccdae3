"""Forms of the Hessian, each as H = Q diag(l) Q^T: the posterior precision is f H + prior I.

So sampling, the evidence and a change of the prior need no further decomposition.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.weights.laplace.blocks import Block, Slope, Tap
from tfp_ibnn.weights.vectors import double

LARGEST_SIDE = 10_000
"""Of a matrix that is decomposed."""

Scale = Callable[[Tensor], Tensor]
"""A function s of eigenvalues."""


class Structure:
    """A form of the Hessian over W weights: the base of all, and the diagonal, Q the identity.

    What `per_batch` and `step` return is summed over batches and, of `step`, over the columns of
    the likelihood's factors; `finish` makes of the sums, arrays, what the variables hold.

    Args:
        blocks: the layers with uncertain weights.
        is_last_layer: whether they are the last layer alone, whose outputs are the logits.
        rank: how many eigenvectors there are, for a structure that has some only.
    """

    passes = 1
    """At most so many over the data."""

    def __init__(
        self, blocks: list[Block], is_last_layer: bool = False, rank: int | None = None
    ) -> None:
        self.blocks = blocks
        self.size = sum(block.size for block in blocks)
        self._is_last_layer = is_last_layer
        self.variables: list[keras.Variable] = []

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the variables; eigenvalues come last."""
        return {"diagonal": (self.size,)}

    def sums(self) -> list[tuple[int, ...]]:
        """Return the shapes of what `step` returns."""
        return [(self.size,)]

    def per_batch(self, taps: list[Tap], weight: Tensor) -> list[Tensor]:
        """Return what a batch adds whatever the column.

        Args:
            taps: the inputs of the blocks.
            weight: (N,), how often each example counts; 0 for those that fill the batch up.

        Returns:
            Tensors that are summed over the batches; none by default.
        """
        return []

    def step(self, slopes: list[Slope], *basis: Tensor) -> list[Tensor]:
        """Return what one column adds.

        Args:
            slopes: the derivative of the column, for each block.
            *basis: the arguments of the pass.

        Returns:
            Tensors of the shapes of `sums`.
        """
        squares = [slope.squares() for slope in slopes]
        return [ops.concatenate(squares)]

    def all_steps(self, taps: list[Tap], columns: Tensor) -> list[Tensor] | None:
        """Return what all columns add, if that is less work than the steps.

        Args:
            taps: the inputs of the blocks.
            columns: those of the likelihood's factors, (C, N, K).

        Returns:
            Tensors of the shapes of `sums`; None, the default, if the steps are to be taken.
        """
        return None

    def fit(self, one_pass: Callable[..., Any]) -> tuple[Any, list[np.ndarray]]:
        """Return what the last pass over the data gave, and the values of the variables."""
        only_pass = one_pass()
        return only_pass, self.finish(only_pass.values, only_pass.examples)

    def finish(self, sums: list[np.ndarray], examples: float) -> list[np.ndarray]:
        """Return the values of the variables.

        Args:
            sums: those of `per_batch` and of `step`, over all batches.
            examples: number of examples, or the sum of their weights.

        Returns:
            One array for each variable.
        """
        return sums

    def eigenvalues(self) -> np.ndarray:
        """Return l, (W,)."""
        return double(self.variables[-1])

    def scaled(self, x: Tensor, scale: Scale) -> Tensor:
        """Return Q s(l) Q^T x.

        Args:
            x: vectors (..., W).
            scale: the function s.

        Returns:
            Vectors (..., W).
        """
        diagonal = ops.cast(self.variables[0], x.dtype)
        return x * scale(diagonal)

    def row_variance(self, slopes: list[Slope], scale: Scale) -> Tensor:
        """Return x^T Q s(l) Q^T x for the gradients x of one logit.

        Args:
            slopes: the derivative of the logit, for each block.
            scale: the function s.

        Returns:
            One number for each example, (N,).
        """
        rows = all_rows(slopes)
        return ops.sum(rows * self.scaled(rows, scale), axis=-1)

    def variance(self, features: Tensor, scale: Scale) -> Tensor:
        """Return the variances of the logits of a last layer, for weights of covariance s(H).

        Args:
            features: its inputs (N, inputs), with a 1 if there is a bias.
            scale: the function s.

        Returns:
            A tensor (N, K).
        """
        inputs = features.shape[-1]
        diagonal = ops.reshape(self.variables[0], (inputs, -1))
        squares = ops.square(features)
        return ops.matmul(squares, scale(diagonal))


def all_rows(slopes: list[Slope]) -> Tensor:
    """Return the gradients of all blocks, side by side, (N, W)."""
    rows = [slope.rows() for slope in slopes]
    return ops.concatenate(rows, axis=-1)


def check_side(side: int, what: str) -> None:
    """Raise if a matrix is too large to be decomposed.

    Args:
        side: number of its rows.
        what: needs it, as a message says it.

    Raises:
        ValueError: beyond `LARGEST_SIDE`.
    """
    if side > LARGEST_SIDE:
        size = 8e-9 * side**2
        raise ValueError(
            f"{what} needs {side:,} x {side:,} numbers, {size:.1f} GB; at most "
            f"{LARGEST_SIDE:,} x {LARGEST_SIDE:,} fit. Use 'diag' or 'lowrank', or fewer weights "
            "by `subset_of_weights`."
        )


def eigen(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the eigenvectors of a positive semidefinite matrix, and its eigenvalues, at least 0.

    They come in ascending order of the eigenvalues.
    """
    symmetric = (matrix + matrix.T) / 2
    values, vectors = np.linalg.eigh(symmetric)
    return vectors, np.maximum(values, 0)
