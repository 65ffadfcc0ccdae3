"""Checks of the arrays that figures are drawn from."""

from typing import Any

import numpy as np

__all__ = ["array", "classes", "image", "images", "integers", "names", "probabilities", "vector"]


def array(name: str, value: Any, shape: tuple[int | str, ...]) -> np.ndarray:
    """Return `value` as a finite float array, or raise if it is not of the shape.

    Args:
        name: of the argument.
        value: what was given for it.
        shape: the size of each axis; a word stands for any size of at least 1.
    """
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
        place = tuple(int(i) for i in bad[0])
        raise ValueError(
            f"`{name}` must be finite; got {found[place]} at {list(place)} and "
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
    off = np.abs(found.sum(axis=-1) - 1) > 1e-3
    if found.min() < 0 or np.any(off):
        row = int(np.argmax(off | (found.min(axis=-1) < 0)))
        raise ValueError(
            f"`{name}` must be probabilities, with rows that sum to 1; got {found[row]} in row "
            f"{row}. If they are logits, apply softmax first."
        )
    return found


def integers(name: str, value: Any, size: int) -> np.ndarray:
    """Return `value`, of the shape (size,) or (size, 1), as whole numbers from 0 on, or raise."""
    found = vector(name, value, size)
    if np.any(found != np.round(found)) or found.min() < 0:
        raise ValueError(
            f"`{name}` must be whole numbers, 0 or above, one per class; got {np.unique(found)}."
        )
    return found.astype(int)


def classes(name: str, value: Any, size: int, count: int | None = None) -> np.ndarray:
    """Return class indices (size,) from themselves or from rows (size, classes), or raise.

    Args:
        name: of the argument.
        value: (size,) integers, or (size, classes) one-hot rows or probabilities.
        size: how many there must be.
        count: how many classes there are, if that is known.
    """
    shape = np.shape(value)
    if len(shape) == 2 and shape[1] > 1:
        wanted = "classes" if count is None else count
        found = array(name, value, (size, wanted)).argmax(axis=-1)
    else:
        found = integers(name, value, size)
    if count is not None and found.max() >= count:
        raise ValueError(f"`{name}` must lie between 0 and {count - 1}; got {np.unique(found)}.")
    return found


def images(name: str, value: Any) -> np.ndarray:
    """Return grey (N, H, W) or colour (N, H, W, 3) images between 0 and 1, or raise.

    The least value of all images becomes 0 and the largest 1.
    """
    shape = np.shape(value)
    if len(shape) == 4 and shape[-1] in (1, 3):
        found = array(name, value, ("images", "height", "width", shape[-1]))
    elif len(shape) == 3:
        found = array(name, value, ("images", "height", "width"))
    else:
        raise ValueError(
            f"`{name}` must have the shape (images, height, width), or that with a last axis of 1 "
            f"or 3; got {shape}."
        )
    found = found[..., 0] if shape[-1] == 1 and len(shape) == 4 else found
    low, high = found.min(), found.max()
    return (found - low) / (high - low) if high > low else np.zeros_like(found)


def image(name: str, value: Any) -> np.ndarray:
    """Return one grey (H, W) or colour (H, W, 3) image between 0 and 1, or raise."""
    shape = np.shape(value)
    if len(shape) != 2 and not (len(shape) == 3 and shape[-1] in (1, 3)):
        raise ValueError(
            f"`{name}` must have the shape (height, width), or that with a last axis of 1 or 3; "
            f"got {shape}."
        )
    return images(name, np.asarray(value)[None])[0]


def names(name: str, value: Any, count: int) -> list[str]:
    """Return `count` names as strings, or the numbers from 0 on if `value` is None."""
    if value is None:
        return [str(i) for i in range(count)]
    if isinstance(value, str) or len(value) != count:
        raise ValueError(f"`{name}` must be a list of {count} names, one per class; got {value!r}.")
    return [str(entry) for entry in value]


def _words(shape: tuple[int | str, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
