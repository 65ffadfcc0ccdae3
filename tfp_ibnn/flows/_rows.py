"""Products with parameters that are the same for all rows of x, or differ from row to row."""

import math

from keras import ops

from tfp_ibnn._core.backend import Tensor, matmul


def log_normal(x: Tensor) -> Tensor:
    """Return the log-density (...,) of standard normal noise (..., channels)."""
    channels = x.shape[-1]
    square = ops.sum(x * x, axis=-1)
    constant = channels * math.log(2 * math.pi)
    return -0.5 * (square + constant)


def column(numbers: Tensor) -> Tensor:
    """Return numbers, () or one per row (...,), such that they multiply vectors."""
    if len(numbers.shape) == 0:
        return numbers
    return ops.expand_dims(numbers, -1)


def total(x: Tensor) -> Tensor:
    """Return the sums (...,) of vectors x (..., n)."""
    # TensorFlow's gradient of a sum over all axes is smaller, and -1 would hide that this is one.
    last_axis = len(x.shape) - 1
    return ops.sum(x, axis=(last_axis,))


def times_matrix(x: Tensor, matrix: Tensor, transpose: bool = False) -> Tensor:
    """Return the vectors x @ matrix, or x @ matrix'.

    Args:
        x: tensor (..., n), the vectors.
        matrix: tensor (n, m) for all rows, or (..., n, m), one per row of x.
        transpose: bool, multiply by the transposed matrix, then (m, n). Defaults to False.

    Returns:
        Tensor (..., m).
    """
    is_shared = len(matrix.shape) == 2
    if is_shared and transpose:
        return matmul(x, ops.transpose(matrix))
    if is_shared:
        return matmul(x, matrix)
    if transpose:
        return matmul(matrix, x[..., None])[..., 0]
    return matmul(x[..., None, :], matrix)[..., 0, :]


def like_rows(x: Tensor, condition: Tensor | None) -> Tensor:
    """Return x, broadcast to the leading axes of the condition.

    Args:
        x: tensor (..., n).
        condition: tensor (..., condition_size), or None to leave x as it is.

    Returns:
        Tensor (..., n) with the leading axes of both.
    """
    if condition is None:
        return x
    return x + ops.zeros_like(condition[..., :1])
