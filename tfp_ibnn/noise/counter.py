"""Random bits as a pure function of a key and two counters, on every backend and compiler alike."""

import functools
from typing import Any

import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor, traced_once

SOBOL_BITS = 16
"""Sobol points repeat after 2 ** SOBOL_BITS samples."""

_SOBOL_DIMENSIONS = 21201  # as many as SciPy has direction numbers for
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_SHIFT_ROW = 0xFFFFFFFF


def key_from_seed(seed: int) -> np.ndarray:
    """Return the key (2,) of a non-negative seed, as int32 values of at least 0."""
    return (np.random.SeedSequence(seed).generate_state(2) >> 1).astype("int32")


@traced_once
def threefry(first: Tensor, second: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return two words for each pair of counters x and y, by the two words of a key, all uint32.

    Threefry-2x32, 20 rounds: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.
    """
    schedule = (first, second, ops.bitwise_xor(ops.bitwise_xor(first, second), _word(_PARITY)))
    x, y = x + first, y + second
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            left = ops.left_shift(y, _word(rotation))
            right = ops.right_shift(y, _word(32 - rotation))
            y = ops.bitwise_xor(x, ops.bitwise_or(left, right))
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + _word(group + 1)
    return x, y


def bits(key: Tensor, rows: Tensor, offset: int, size: Any) -> Tensor:
    """Return uint32 words (rows, size): those at `offset` of the streams of `rows`."""
    half = (size + 1) // 2
    low = ops.cast(offset + ops.arange(half, dtype="int32"), "uint32")
    both = threefry(*key, ops.cast(rows, "uint32")[:, None], low[None, :])
    return ops.concatenate(both, axis=1)[:, :size]


def sobol(key: Tensor, rows: Tensor, offset: int, size: int) -> Tensor:
    """Return the words (rows, size) of Sobol points under a digital shift that the key chooses.

    Past the last dimension that there is they are independent.
    """
    if (known := max(0, _SOBOL_DIMENSIONS - offset)) < size:
        rest = bits(key, rows, offset + known, size - known)
        parts = [sobol(key, rows, offset, known), rest] if known else [rest]
        return ops.concatenate(parts, axis=1)
    words = bits(key, ops.full(ops.shape(rows), _SHIFT_ROW, dtype="uint32"), offset, size)
    rows = ops.cast(rows, "uint32")[:, None]
    for position, direction in enumerate(_directions(offset, size)):
        digit = ops.bitwise_and(ops.right_shift(rows, _word(position)), _word(1))
        words = ops.bitwise_xor(words, digit * ops.convert_to_tensor(direction[None, :]))
    return words


def normal(words: Tensor, dtype: str) -> Tensor:
    """Return standard normal numbers of uniform words, by the inverse of the distribution."""
    centered = (ops.cast(words, dtype) + 0.5) * 2.0**-31 - 1
    # In float32 the outermost words are rounded to the ends, whose normals are infinite.
    end = 1 - 2.0**-24 if dtype == "float32" else 1.0
    distance = ops.minimum(ops.abs(centered), end)
    # Below 0 the inverse has more digits, and is finite on TensorFlow up to the end.
    return ops.sign(centered) * (-(2.0**0.5) * ops.erfinv(-distance))


def uniform(words: Tensor, dtype: str) -> Tensor:
    """Return numbers in [0, 1) of uniform words."""
    return ops.cast(ops.right_shift(words, _word(8)), dtype) * 2.0**-24


@functools.lru_cache(maxsize=256)
def _directions(offset: int, size: int) -> np.ndarray:
    """Return the direction numbers (SOBOL_BITS, size) of scrambled Sobol dimensions from `offset`.

    Scrambling acts on each dimension by itself, so layers that take their dimensions one after the
    other get the same points as if they had drawn jointly.
    """
    from scipy.stats import qmc

    engine = qmc.Sobol(offset + size, scramble=True, rng=np.random.default_rng(0))
    points = [engine.random(1)[0, offset:]]
    for position in range(SOBOL_BITS):
        engine.fast_forward(2**position - engine.num_generated)
        points.append(engine.random(1)[0, offset:])
    words = (np.stack(points) * 2.0**32).astype("uint32")
    # SciPy counts in Gray code: point 2^j is made of the directions j and j - 1.
    return np.bitwise_xor.accumulate(words[1:] ^ words[0], axis=0)


def _word(value: int) -> Tensor:
    return ops.convert_to_tensor(np.uint32(value))
