"""Hold part of the training images back for validation."""

from typing import Any

import numpy as np

from tfp_ibnn._core import checks

__all__ = ["validation_split"]


def validation_split(
    x: Any, y: Any, size: int, seed: int = 0
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return `(x_train, y_train), (x_val, y_val)`, copies; every class keeps its share.

    The class c gets size * n_c / N of the places, rounded down or up so that they add up to `size`.
    The seed alone decides who gets them, with every version of numpy. Both parts keep the order of
    the original.

    Args:
        x: (N, ...), the images.
        y: (N,), their classes, as integers.
        size: number of images to hold back, from 1 to N - 1.
        seed: from 0 to 2**32 - 1.

    Example:
        >>> import numpy as np
        >>> from tfp_ibnn.data import validation_split
        >>> x, y = np.arange(6), np.array([0, 0, 0, 0, 1, 1])
        >>> (x_train, y_train), (x_val, y_val) = validation_split(x, y, 3)
        >>> y_train, y_val
        (array([0, 0, 1]), array([0, 0, 1]))
    """
    x, y = np.asarray(x), np.asarray(y)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise ValueError(
            f"`y` must be integers of shape (N,); got {y.dtype} of shape {y.shape}. "
            "For one-hot labels, give `y.argmax(-1)`."
        )
    if x.ndim < 1 or len(x) != len(y):
        raise ValueError(f"`x` must have as many rows as `y`, {len(y)}; got shape {x.shape}.")
    size = checks.positive_integer("size", size)
    if size >= len(y):
        raise ValueError(f"`size` must leave some to train on: at most {len(y) - 1}; got {size}.")
    seed = checks.whole("seed", seed)
    if seed >= 2**32:
        raise ValueError(f"`seed` must be below 2**32; got {seed}.")

    # RandomState's stream is frozen, unlike that of numpy's newer generators.
    random = np.random.RandomState(seed)
    _, which, counts = np.unique(y, return_inverse=True, return_counts=True)
    # Largest remainders, lower classes first; in whole numbers, so that none differ by rounding.
    shares, remainders = np.divmod(counts.astype(np.int64) * size, len(y))
    shares[np.argsort(-remainders, kind="stable")[: size - shares.sum()]] += 1
    held_back = np.zeros(len(y), bool)
    for label, places in enumerate(shares):
        positions = np.flatnonzero(which == label)
        held_back[random.permutation(positions)[:places]] = True
    return (x[~held_back], y[~held_back]), (x[held_back], y[held_back])
