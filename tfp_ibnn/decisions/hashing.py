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
_HASHES = 2**24  # the whole numbers that float32 holds without gaps


def uniform(inputs: Any, seed: int) -> Tensor:
    """Return a number in [0, 1) for each example, a hash of its values in float32.

    Args:
        inputs: tensors of numbers or strings, (N, ...), in any nested structure.
        seed: a whole number, the key of the hash.

    Returns:
        Numbers (N,).
    """
    parts = keras.tree.map_structure(_number_of_strings, inputs)
    bits, _ = hashed(parts, seed)
    return counter.uniform(bits, "float32")


def _number_of_strings(part: Any) -> Any:
    """Return a number for each string, by a hash that never changes; numbers stay as they are."""
    tensor = ops.convert_to_tensor(part)
    if keras.backend.standardize_dtype(tensor.dtype) != "string":
        return part
    return keras.layers.Hashing(_HASHES)(tensor)


def uniform_of_arrays(x: Any, seed: int) -> np.ndarray:
    """Return the same for all examples of arrays, in parts that fit into memory.

    Args:
        x: arrays of numbers or strings, (N, ...), in any nested structure.
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
