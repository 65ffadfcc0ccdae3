"""Datasets: what counts as one, and how its batches are read."""

from collections.abc import Iterable, Iterator
from typing import Any

import keras

_ENDLESS = -1
_UNKNOWN = -2
"""The values of `tf.data.Dataset.cardinality` for such datasets."""


def is_dataset(x: Any) -> bool:
    """Whether these are batches of examples, and not arrays in any nested structure."""
    if isinstance(x, keras.utils.PyDataset) or hasattr(x, "cardinality"):
        return True
    is_structure = isinstance(x, (list, tuple, dict, str, bytes))
    return isinstance(x, Iterable) and not is_structure and not hasattr(x, "shape")


def dataset_batches(data: Any, name: str, once: bool = False) -> tuple[int, Iterator[Any]]:
    """Return how many batches a dataset has, and an iterator over them.

    Args:
        data: a `tf.data.Dataset`, a `PyDataset`, or any other object that gives batches and ends.
        name: what the user calls it, for errors.
        once: whether the batches are read only once, so that a generator will do.

    Returns:
        The number of batches, -2 if it is unknown, and the iterator.

    Raises:
        ValueError: for arrays, an endless dataset, or a generator that is to be read twice.
    """
    if not is_dataset(data):
        raise ValueError(
            f"Give arrays x and y, a tf.data.Dataset or a PyDataset; `{name}` is a "
            f"{type(data).__name__}."
        )
    if isinstance(data, keras.utils.PyDataset):
        count = _ENDLESS if data.num_batches is None else data.num_batches
        batches = map(data.__getitem__, range(count))
    else:
        count = int(data.cardinality()) if hasattr(data, "cardinality") else _UNKNOWN
        batches = iter(data)
    if count == _ENDLESS:
        raise ValueError(f"`{name}` never ends: give a dataset of one pass over the examples.")
    is_used_up = batches is data
    if is_used_up and not once:
        raise ValueError(
            f"`{name}` is a {type(data).__name__}, which can be read only once: give arrays, a "
            "tf.data.Dataset or a PyDataset."
        )
    return count, batches


def progress_bar(count: int, verbose: Any) -> keras.utils.Progbar:
    """Return a progress bar.

    Args:
        count: number of batches; 0 or less if it is unknown.
        verbose: as in Keras: 0 shows nothing, "auto" is 1.
    """
    target = count if count > 0 else None
    return keras.utils.Progbar(target, verbose=1 if verbose == "auto" else verbose)
