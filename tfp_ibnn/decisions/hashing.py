"""Random numbers that an input decides, for the sets of `Conformal`."""

from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.noise import counter
from tfp_ibnn.noise.hashing import hashed
from tfp_ibnn.prediction.validation import check_input

_AT_ONCE = 1024  # examples of which all the words are held


def uniform(inputs: Any, seed: int) -> Tensor:
    """Return a number in [0, 1) for each example, a hash of its values in float32.

    Args:
        inputs: tensors of numbers, (N, ...), in any nested structure.
        seed: a whole number, the key of the hash.

    Returns:
        Numbers (N,).

    Raises:
        ValueError: if inputs are strings.
    """
    for part in keras.tree.flatten(inputs):
        dtype = ops.convert_to_tensor(part).dtype
        if keras.backend.standardize_dtype(dtype) == "string":
            raise ValueError("`randomized` derives its numbers from numeric inputs; got strings.")
    bits, _ = hashed(inputs, seed)
    return counter.uniform(bits, "float32")


def uniform_of_arrays(x: Any, seed: int) -> np.ndarray:
    """Return the same for all examples of arrays, in parts that fit into memory.

    Args:
        x: arrays of numbers, (N, ...), in any nested structure.
        seed: a whole number, the key of the hash.

    Returns:
        Numbers (N,).

    Raises:
        ValueError: if `x` is not arrays, such as a generator, or holds NaN.
    """
    parts = keras.tree.flatten(x)
    if not all(hasattr(part, "__array__") for part in parts):
        kinds = sorted({type(part).__name__ for part in parts})
        raise ValueError(
            f"`x` must be arrays, from which `randomized` derives its numbers; got {kinds}. Give "
            f"them batch by batch, or leave `randomized` out."
        )
    check_input(x)
    arrays = [np.asarray(part) for part in parts]
    numbers = []
    for start in range(0, len(arrays[0]), _AT_ONCE):
        examples = slice(start, start + _AT_ONCE)
        drawn = uniform([array[examples] for array in arrays], seed)
        numbers.append(ops.convert_to_numpy(drawn))
    return np.concatenate(numbers)
