"""Checks of the arrays that figures are drawn from."""

from typing import Any

import numpy as np

__all__ = ["array", "classes", "images", "names", "probabilities", "vector"]


def array(name: str, value: Any, shape: tuple[int | str, ...]) -> np.ndarray:
    """Return `value` as a finite float array, or raise; a word in `shape` is any size of 1 on."""
    try:
        found = np.asarray(value, dtype="float64")
    except (TypeError, ValueError):
        raise ValueError(
            f"`{name}` must be an array of numbers of the shape {_words(shape)}; got {value!r:.80}."
        ) from None
    fits = found.ndim == len(shape) and all(
        size > 0 if isinstance(wanted, str) else size == wanted
        for size, wanted in zip(found.shape, shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"`{name}` must have the shape {_words(shape)}, and not be empty; got {found.shape}."
        )
    bad = np.argwhere(~np.isfinite(found))
    if len(bad):
        raise ValueError(
            f"`{name}` must be finite; got {found[tuple(bad[0])]} at {bad[0].tolist()} and "
            f"{len(bad)} such of {found.size} in all. Leave them out."
        )
    return found


def vector(name: str, value: Any, size: int | str = "examples") -> np.ndarray:
    """Return `value`, of the shape (size,) or (size, 1), as a finite float vector, or raise."""
    shape = np.shape(value) if not isinstance(value, str) else ()
    if len(shape) == 2 and shape[1] == 1:
        return array(name, value, (size, 1))[:, 0]
    return array(name, value, (size,))


def probabilities(name: str, value: Any, rows: str = "examples") -> np.ndarray:
    """Return `value` as an array (rows, classes) of rows that sum to 1, or raise."""
    found = array(name, value, (rows, "classes"))
    bad = (np.abs(found.sum(axis=-1) - 1) > 1e-3) | (found.min(axis=-1) < 0)
    if bad.any():
        raise ValueError(
            f"`{name}` must be probabilities, with rows that sum to 1; got {found[bad][0]} in row "
            f"{bad.argmax()}. If they are logits, apply softmax first."
        )
    return found


def classes(name: str, value: Any, size: int, count: int | None = None) -> np.ndarray:
    """Return class indices (size,), below `count` if it is known, or raise.

    They are given as integers (size,) or (size, 1), one-hot rows or probabilities (size, classes).
    """
    shape = np.shape(value)
    if len(shape) == 2 and shape[1] > 1:
        found = array(name, value, (size, count or "classes")).argmax(axis=-1)
    else:
        found = vector(name, value, size)
    if np.any(found != np.round(found)) or found.min() < 0:
        raise ValueError(f"`{name}` must be whole numbers, 0 or above; got {np.unique(found)}.")
    if count is not None and found.max() >= count:
        raise ValueError(f"`{name}` must lie between 0 and {count - 1}; got {np.unique(found)}.")
    return found.astype(int)


def images(
    name: str, value: Any, axes: tuple[str, ...] = ("images", "height", "width")
) -> np.ndarray:
    """Return grey images, or colour ones with a last axis of 3, scaled to [0, 1], or raise."""
    shape = np.shape(value)
    has_channels = len(shape) == len(axes) + 1 and shape[-1] in (1, 3)
    if not has_channels and len(shape) != len(axes):
        raise ValueError(
            f"`{name}` must have the shape {_words(axes)}, or that with a last axis of 1 or 3; got "
            f"{shape}."
        )
    found = array(name, value, (*axes, shape[-1]) if has_channels else axes)
    found = found[..., 0] if has_channels and shape[-1] == 1 else found
    low, high = found.min(), found.max()
    return (found - low) / (high - low) if high > low else np.zeros_like(found)


def names(name: str, value: Any, count: int) -> list[str]:
    """Return `count` names as strings, or the numbers from 0 on if `value` is None."""
    if value is None:
        return [str(i) for i in range(count)]
    if isinstance(value, str) or len(value) != count:
        raise ValueError(f"`{name}` must be a list of {count} names, one per class; got {value!r}.")
    return [str(entry) for entry in value]


def _words(shape: tuple[int | str, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
