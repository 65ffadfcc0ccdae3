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


def probabilities(name: str, value: Any, rows: str = "examples") -> np.ndarray:
    """Return `value` as an array (rows, classes) of rows that sum to 1, or raise."""
    found = array(name, value, (rows, "classes"))
    bad = (np.abs(found.sum(axis=-1) - 1) > 1e-3) | (found.min(axis=-1) < 0)
    if bad.any():
        row = found[bad][0]
        raise ValueError(f"`{name}` must be probabilities (apply softmax to logits); got {row}.")
    return found


def classes(name: str, value: Any, size: int, count: int | None = None) -> np.ndarray:
    """Return class indices (size,) of integers, one-hot rows or probabilities, or raise."""
    if np.ndim(value) == 2 and np.shape(value)[1] > 1:
        found = array(name, value, (size, count or "classes")).argmax(axis=-1)
    else:
        found = vector(name, value, size)
    if np.any(found != np.round(found)) or found.min() < 0:
        raise ValueError(f"`{name}` must be whole numbers, 0 or above; got {np.unique(found)}.")
    if count is not None and found.max() >= count:
        raise ValueError(f"`{name}` must lie between 0 and {count - 1}; got {np.unique(found)}.")
    return found.astype(int)


def images(value: Any) -> np.ndarray:
    """Return grey images, or colour ones with a last axis of 3, scaled to [0, 1], or raise."""
    shape = np.shape(value)
    channels = shape[3:]
    if channels not in ((), (1,), (3,)):
        raise ValueError(f"`images` must have a last axis of 1 or 3, or none; got {shape}.")
    found = array("images", value, ("images", "height", "width", *channels))
    found = found[..., 0] if channels == (1,) else found
    return (found - found.min()) / (np.ptp(found) or 1)


def names(name: str, value: Any, count: int) -> list[str]:
    """Return `count` names as strings, or the numbers from 0 on if `value` is None."""
    value = range(count) if value is None else value
    if isinstance(value, str) or len(value) != count:
        raise ValueError(f"`{name}` must be a list of {count} names, one per class; got {value!r}.")
    return [str(entry) for entry in value]
