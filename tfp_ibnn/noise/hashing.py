"""Random words determined by an input: the same alone, in any batch, exported, on any backend."""

from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor, words
from tfp_ibnn.noise import counter

__all__ = ["hashed"]


def hashed(inputs: Any, seed: int) -> tuple[Tensor, Tensor]:
    """Return two words for each example, a hash of its values in float32.

    Args:
        inputs: tensors of numbers, (examples, ...), in any nested structure.
        seed: a whole number, the key of the hash.

    Returns:
        Two tensors (examples,) of uint32.
    """
    key = counter.key_from_seed(seed).astype("uint32")
    first = ops.convert_to_tensor(key[0])
    second = ops.convert_to_tensor(key[1])
    x = 0
    y = 0
    for number, array in enumerate(keras.tree.flatten(inputs)):
        order = ops.convert_to_tensor(np.uint32(number))
        key_of_input = second + order
        sum_x, sum_y = _sums(first, key_of_input, array)
        x = x + sum_x
        y = y + sum_y
    return counter.threefry(first, second, x, y)


def _sums(first: Tensor, second: Tensor, array: Any) -> tuple[Tensor, Tensor]:
    """Return the sums, over the values of each example, of the words of value and position.

    Sums modulo 2^32 are exact and have no order, so that devices cannot disagree.

    Args:
        first: one word of the key.
        second: the other word of the key.
        array: the values, (examples, ...).
    """
    values = words(_numbers(array))
    size = ops.shape(values)[1]
    positions = ops.arange(size, dtype="int32")
    positions = ops.cast(positions, "uint32")
    x, y = counter.threefry(first, second, values, positions[None, :])
    sum_x = ops.sum(x, axis=1)
    sum_y = ops.sum(y, axis=1)
    sum_x = ops.cast(sum_x, "uint32")
    sum_y = ops.cast(sum_y, "uint32")
    return sum_x, sum_y


def _numbers(array: Any) -> Tensor:
    """Return the values of one input, (examples, size) in float32.

    0 and -0 are equal, but differ in their bits, so -0 becomes 0.
    """
    values = ops.cast(array, "float32")
    examples = ops.shape(values)[0]
    flat = ops.reshape(values, (examples, -1))
    zeros = ops.zeros_like(flat)
    is_zero = flat == 0
    return ops.where(is_zero, zeros, flat)
