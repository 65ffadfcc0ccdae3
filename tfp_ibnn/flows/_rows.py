"""Products with parameters that are the same for all rows of x, or differ from row to row."""

from keras import ops

from tfp_ibnn._core.backend import Tensor, matmul


def column(numbers: Tensor) -> Tensor:
    """Return numbers, () or one per row (...,), such that they multiply vectors."""
    return ops.expand_dims(numbers, -1) if len(numbers.shape) else numbers


def total(x: Tensor) -> Tensor:
    """Return the sums (...,) of vectors x (..., n)."""
    # TensorFlow's gradient of a sum over all axes is smaller, and -1 would hide that this is one.
    return ops.sum(x, axis=(len(x.shape) - 1,))


def times_matrix(x: Tensor, matrix: Tensor, transpose: bool = False) -> Tensor:
    """Return the vectors x @ matrix, or x @ matrix', for one matrix or for one per row of x."""
    if len(matrix.shape) == 2:
        return matmul(x, ops.transpose(matrix) if transpose else matrix)
    if transpose:
        return matmul(matrix, x[..., None])[..., 0]
    return matmul(x[..., None, :], matrix)[..., 0, :]


def like_rows(x: Tensor, condition: Tensor | None) -> Tensor:
    """Return x (..., n), broadcast to the leading axes of the condition where there is one."""
    return x if condition is None else x + ops.zeros_like(condition[..., :1])
