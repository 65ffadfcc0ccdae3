"""Random words determined by an input: the same alone, in any batch, exported, on any backend."""

from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor, words
from tfp_ibnn.noise import counter

__all__ = ["hashed"]


def hashed(inputs: Any, seed: int) -> tuple[Tensor, Tensor]:
    """Return two words for each example, (N,) uint32, a hash of its values in float32.

    Args:
        inputs: tensors of numbers, (N, ...), in any nested structure.
        seed: a whole number, the key of the hash.
    """
    first, second = (ops.convert_to_tensor(k) for k in counter.key_from_seed(seed).astype("uint32"))
    state = (0, 0)
    for number, array in enumerate(keras.tree.flatten(inputs)):
        values = words(_numbers(array))
        # Sums modulo 2^32 are exact and have no order, so that devices cannot disagree.
        positions = ops.cast(ops.arange(ops.shape(values)[1], dtype="int32"), "uint32")
        key = first, second + ops.convert_to_tensor(np.uint32(number))  # inputs have an order
        parts = counter.threefry(*key, values, positions[None, :])
        sums = [ops.cast(ops.sum(part, axis=1), "uint32") for part in parts]
        state = tuple(old + new for old, new in zip(state, sums, strict=True))
    return counter.threefry(first, second, *state)


def _numbers(part: Any) -> Tensor:
    """Return the values of one input, (N, size) in float32; -0 is 0."""
    values = ops.cast(part, "float32")
    flat = ops.reshape(values, (ops.shape(values)[0], -1))
    return ops.where(flat == 0, ops.zeros_like(flat), flat)
