"""Random numbers that an input decides: the same alone, in any batch, exported, on any backend."""

from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor, words
from tfp_ibnn.noise import counter
from tfp_ibnn.prediction.validation import check_input

_AT_ONCE = 1024  # examples of which all the words are held


def uniform(inputs: Any, seed: int) -> Tensor:
    """Return a number in [0, 1) for each example, (N,), a hash of its values in float32.

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
        hashed = counter.threefry(*_key(first, second, number), values, positions[None, :])
        sums = [ops.cast(ops.sum(part, axis=1), "uint32") for part in hashed]
        state = [old + new for old, new in zip(state, sums, strict=True)]
    return counter.uniform(counter.threefry(first, second, *state)[0], "float32")


def uniform_of_arrays(x: Any, seed: int) -> np.ndarray:
    """Return the same for all examples of arrays, in parts that fit into memory."""
    parts = keras.tree.flatten(x)
    if not all(hasattr(part, "__array__") for part in parts):
        kinds = sorted({type(part).__name__ for part in parts})
        raise ValueError(
            f"`x` must be arrays, from which `randomized` derives its numbers; got {kinds}. Give "
            f"them batch by batch, or leave `randomized` out."
        )
    check_input(x)
    arrays = [np.asarray(part) for part in parts]
    starts = range(0, len(arrays[0]), _AT_ONCE)
    found = [uniform([a[i : i + _AT_ONCE] for a in arrays], seed) for i in starts]
    return np.concatenate([ops.convert_to_numpy(part) for part in found])


def _numbers(part: Any) -> Tensor:
    """Return the values of one input, (N, size) in float32; -0 is 0."""
    part = ops.convert_to_tensor(part)
    if keras.backend.standardize_dtype(part.dtype) == "string":
        raise ValueError("`randomized` derives its numbers from numeric inputs; got strings.")
    values = ops.cast(part, "float32")
    flat = ops.reshape(values, (ops.shape(values)[0], -1))
    return ops.where(flat == 0, ops.zeros_like(flat), flat)


def _key(first: Tensor, second: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the key of the input of a number, so that to exchange two inputs changes the hash."""
    return first, second + ops.convert_to_tensor(np.uint32(number))
