"""Functions of many rows, in bounded memory."""

from collections.abc import Callable

from keras import ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.unrolling import is_unrolled


def in_blocks(function: Callable[[Tensor], Tensor], rows: Tensor, size: int) -> Tensor:
    """Return what a function of rows gives, for some rows at a time.

    Args:
        function: of a tensor (size, ...), which returns one (size, ...), row by row.
        rows: a tensor (rows, ...); their number need not be known while a graph is built.
        size: how many rows at a time.

    Returns:
        A tensor (rows, ...).

    Example:
        >>> import keras
        >>> rows = keras.ops.reshape(keras.ops.arange(10.0), (5, 2))
        >>> in_blocks(lambda block: keras.ops.sum(block, axis=1), rows, 2).shape[0]
        5
    """
    count = rows.shape[0]
    is_small = count is not None and count <= size
    if is_small or is_unrolled():
        return function(rows)
    count = ops.shape(rows)[0]
    blocks = -(-count // size)
    places = ops.arange(blocks * size, dtype="int32")
    # The last block is filled up with the last row.
    places = ops.minimum(places, ops.cast(count, "int32") - 1)
    places = ops.reshape(places, (-1, size))
    results = ops.map(lambda block: function(ops.take(rows, block, axis=0)), places)
    flat = ops.reshape(results, (-1, *results.shape[2:]))
    return flat[:count]
