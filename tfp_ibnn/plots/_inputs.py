"""Checks of the arrays that figures are drawn from."""

from typing import Any

import numpy as np


def array(name: str, value: Any, shape: tuple[int | str, ...]) -> np.ndarray:
    """Return `value` as a finite float array, or raise; a word in `shape` is any size of 1 on."""
    try:
        x = np.asarray(value, dtype="float64")
    except (TypeError, ValueError):
        raise ValueError(f"`{name}` must be an array of numbers; got {value!r:.80}.") from None
    pairs = zip(x.shape, shape, strict=False)
    fits = all(size > 0 if isinstance(wanted, str) else size == wanted for size, wanted in pairs)
    if not fits or x.ndim != len(shape):
        words = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
        raise ValueError(f"`{name}` must have the shape {words}, and not be empty; got {x.shape}.")
    bad = np.argwhere(~np.isfinite(x)).tolist()
    if bad:
        first = x[tuple(bad[0])]
        raise ValueError(f"`{name}` must be finite; got {first} at {bad[0]}, one of {len(bad)}.")
    return x


def vector(name: str, value: Any, size: int | str = "examples") -> np.ndarray:
    """Return `value`, of the shape (size,) or (size, 1), as a finite float vector, or raise."""
    is_column = np.shape(value)[1:] == (1,)
    return array(name, value, (size, 1) if is_column else (size,)).ravel()


def probabilities(name: str, value: Any) -> np.ndarray:
    """Return `value` as an array (points, classes) of rows that sum to 1, or raise."""
    found = array(name, value, ("points", "classes"))
    bad = (np.abs(found.sum(axis=-1) - 1) > 1e-3) | (found.min(axis=-1) < 0)
    if bad.any():
        row = found[bad][0]
        raise ValueError(f"`{name}` must be probabilities (apply softmax to logits); got {row}.")
    return found


def classes(name: str, value: Any, size: int, count: int) -> np.ndarray:
    """Return class indices (size,) of integers, one-hot rows or probabilities, or raise."""
    if np.ndim(value) == 2 and np.shape(value)[1] > 1:
        found = array(name, value, (size, count)).argmax(axis=-1)
    else:
        found = vector(name, value, size)
    if np.any(found != np.round(found)) or found.min() < 0:
        raise ValueError(f"`{name}` must be whole numbers, 0 or above; got {np.unique(found)}.")
    if found.max() >= count:
        raise ValueError(f"`{name}` must lie between 0 and {count - 1}; got {np.unique(found)}.")
    return found.astype(int)
