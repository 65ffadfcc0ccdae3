"""Some training images held back for validation."""

import numpy as np


def validation_split(x, y, size, seed=0):
    """Return `(x_train, y_train), (x_val, y_val)`, copies; every class keeps its share.

    The class c gets size * n_c / N of the places, rounded down or up so that they add up to `size`;
    the seed decides who gets them, with every version of numpy. Both parts keep their order.

    Args:
        x: (N, ...), the images.
        y: (N,), their classes, as integers.
        size: number of images to hold back, from 1 to N - 1.
        seed: from 0 to 2**32 - 1.
    """
    x, y = np.asarray(x), np.asarray(y)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        got = f"{y.dtype} of shape {y.shape}. For one-hot labels, give `y.argmax(-1)`"
        raise ValueError(f"`y` must be integers of shape (N,); got {got}.")
    if x.ndim < 1 or len(x) != len(y):
        raise ValueError(f"`x` must have as many rows as `y`, {len(y)}; got shape {x.shape}.")
    if size not in range(1, len(y)):
        raise ValueError(f"`size` must be a whole number from 1 to {len(y) - 1}; got {size!r}.")
    # RandomState's stream is frozen, unlike that of numpy's newer generators.
    random = np.random.RandomState(seed)
    _, which, counts = np.unique(y, return_inverse=True, return_counts=True)
    # Largest remainders, lower classes first; in whole numbers, so that none differ by rounding.
    shares, remainders = np.divmod(counts.astype(np.int64) * size, len(y))
    shares[np.argsort(-remainders, kind="stable")[: size - shares.sum()]] += 1
    held_back = np.zeros(len(y), bool)
    for label, places in enumerate(shares):
        held_back[random.permutation(np.flatnonzero(which == label))[:places]] = True
    return (x[~held_back], y[~held_back]), (x[held_back], y[held_back])
