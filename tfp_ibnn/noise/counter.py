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
_MANTISSA_BITS = 24  # of float32


def key_from_seed(seed: int) -> np.ndarray:
    """Return the key (2,) of a non-negative seed, as int32 values of at least 0."""
    state = np.random.SeedSequence(seed).generate_state(2)
    non_negative = state >> 1
    return non_negative.astype("int32")


def key_of_part(key: Tensor, part: int) -> Tensor:
    """Return a key (2,) for one of several parts that draw from a key; parts may have parts.

    Args:
        key: int32 or int64 values of at least 0, (2,).
        part: the number of the part, at least 0.
    """
    words = ops.cast(key, "uint32")
    zero = _word(0)
    number = _word(part)
    of_part = threefry(words[0], words[1], number, zero)
    of_part = ops.stack(of_part)
    one = _word(1)
    non_negative = ops.right_shift(of_part, one)
    return ops.cast(non_negative, key.dtype)


@traced_once
def threefry(first: Tensor, second: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return two random words for each pair of counters.

    Threefry-2x32, 20 rounds: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.

    Args:
        first: one word of the key, uint32.
        second: the other word of the key, uint32.
        x: one counter, uint32; all four broadcast.
        y: the other counter, uint32.

    Returns:
        Two tensors of uint32.
    """
    parity = _word(_PARITY)
    both = ops.bitwise_xor(first, second)
    third = ops.bitwise_xor(both, parity)
    schedule = (first, second, third)
    x = x + first
    y = y + second
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = ops.bitwise_xor(x, _rotated(y, rotation))
        first_word = schedule[(group + 1) % 3]
        second_word = schedule[(group + 2) % 3]
        x = x + first_word
        y = y + second_word + _word(group + 1)
    return x, y


def _rotated(word: Tensor, places: int) -> Tensor:
    """Return a word with its bits moved to the left, around its end."""
    places_right = 32 - places
    left = ops.left_shift(word, _word(places))
    right = ops.right_shift(word, _word(places_right))
    return ops.bitwise_or(left, right)


def bits(key: Tensor, rows: Tensor, offset: int, size: Any) -> Tensor:
    """Return random words of many streams.

    Args:
        key: two words, uint32.
        rows: numbers of the streams, (rows,).
        offset: the counter of the first two words; each next one gives two more.
        size: how many words of each stream.

    Returns:
        A tensor (rows, size) of uint32.
    """
    pairs = (size + 1) // 2
    counters = offset + ops.arange(pairs, dtype="int32")
    counters = ops.cast(counters, "uint32")
    streams = ops.cast(rows, "uint32")
    streams = streams[:, None]
    first, second = key
    words = threefry(first, second, streams, counters[None, :])
    words = ops.concatenate(words, axis=1)
    return words[:, :size]


def sobol(key: Tensor, rows: Tensor, offset: int, size: int) -> Tensor:
    """Return the words of Sobol points under a digital shift that the key chooses.

    Past the last dimension that there is they are independent.

    Args:
        key: two words, uint32.
        rows: numbers of the points, (rows,).
        offset: the first dimension.
        size: how many dimensions.

    Returns:
        A tensor (rows, size) of uint32.
    """
    known = max(0, _SOBOL_DIMENSIONS - offset)
    if known == 0:
        return bits(key, rows, offset, size)
    if known < size:
        points = sobol(key, rows, offset, known)
        independent = bits(key, rows, offset + known, size - known)
        return ops.concatenate([points, independent], axis=1)
    shift_rows = ops.full(ops.shape(rows), _SHIFT_ROW, dtype="uint32")
    words = bits(key, shift_rows, offset, size)
    rows = ops.cast(rows, "uint32")
    rows = rows[:, None]
    directions = _directions(offset, size)
    for position, direction in enumerate(directions):
        place = _word(position)
        shifted = ops.right_shift(rows, place)
        digit = ops.bitwise_and(shifted, _word(1))
        direction = ops.convert_to_tensor(direction)
        flips = digit * direction[None, :]
        words = ops.bitwise_xor(words, flips)
    return words


def normal(words: Tensor, dtype: str) -> Tensor:
    """Return standard normal numbers of uniform words, by the inverse of the distribution.

    Args:
        words: uint32, of any shape.
        dtype: of the numbers, "float32" or "float64".

    Returns:
        A tensor of the same shape.
    """
    numbers = ops.cast(words, dtype) + 0.5
    centered = numbers * 2.0**-31 - 1
    distance = ops.abs(centered)
    if dtype == "float32":
        # The outermost words are rounded to the ends, whose normals are infinite.
        end = 1 - 2.0**-_MANTISSA_BITS
        distance = ops.minimum(distance, end)
    # Below 0 the inverse has more digits, and is finite on TensorFlow up to the end.
    inverse = -ops.erfinv(-distance)
    sign = ops.sign(centered)
    return sign * (2.0**0.5 * inverse)


def uniform(words: Tensor, dtype: str) -> Tensor:
    """Return numbers in [0, 1) of uniform words.

    Args:
        words: uint32, of any shape.
        dtype: of the numbers, "float32" or "float64".

    Returns:
        A tensor of the same shape.
    """
    high_bits = ops.right_shift(words, _word(32 - _MANTISSA_BITS))
    return ops.cast(high_bits, dtype) * 2.0**-_MANTISSA_BITS


@functools.lru_cache(maxsize=256)
def _directions(offset: int, size: int) -> np.ndarray:
    """Return the direction numbers (SOBOL_BITS, size) of scrambled Sobol dimensions from `offset`.

    Scrambling acts on each dimension by itself, so layers that take their dimensions one after the
    other get the same points as if they had drawn jointly.
    """
    from scipy.stats import qmc

    generator = np.random.default_rng(0)
    engine = qmc.Sobol(offset + size, scramble=True, rng=generator)
    points = [engine.random(1)]
    for position in range(SOBOL_BITS):
        power = 2**position
        engine.fast_forward(power - engine.num_generated)
        points.append(engine.random(1))
    points = np.concatenate(points)
    scaled = points[:, offset:] * 2.0**32
    words = scaled.astype("uint32")
    # SciPy counts in Gray code: point 2^j is made of the directions j and j - 1.
    first = words[0]
    differences = words[1:] ^ first
    return np.bitwise_xor.accumulate(differences, axis=0)


def _word(value: int) -> Tensor:
    return ops.convert_to_tensor(np.uint32(value))
