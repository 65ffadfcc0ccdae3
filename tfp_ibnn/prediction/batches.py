"""Datasets: batches of examples, and how they are read."""

from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np


def is_dataset(x: Any) -> bool:
    """Whether these are batches of examples, and not arrays in any nested structure."""
    if isinstance(x, keras.utils.PyDataset) or hasattr(x, "cardinality"):
        return True
    is_structure = isinstance(x, (list, tuple, dict, str, bytes))
    return isinstance(x, Iterable) and not is_structure and not hasattr(x, "shape")


def as_array(values: Any) -> np.ndarray:
    """Return an array; one of objects for strings, since Keras takes no others."""
    array = np.asarray(values)
    return array.astype(object) if array.dtype.kind in "SU" else array


def dataset_batches(data: Any, name: str, once: bool = False) -> tuple[int, Iterator[Any]]:
    """Return the number of batches of a dataset that ends, -2 if it is unknown, and these.

    Args:
        data: a `tf.data.Dataset`, a `PyDataset`, or any other object that gives batches.
        name: what the user calls it.
        once: whether the batches are read once, as a generator allows.
    """
    if not is_dataset(data):
        raise ValueError(
            f"Give arrays x and y, a tf.data.Dataset or a PyDataset; `{name}` is a "
            f"{type(data).__name__}."
        )
    if isinstance(data, keras.utils.PyDataset):
        count = -1 if data.num_batches is None else data.num_batches
        found = map(data.__getitem__, range(count))
    else:
        count = int(data.cardinality()) if hasattr(data, "cardinality") else -2
        found = iter(data)
    if count == -1:
        raise ValueError(f"`{name}` never ends: give a dataset of one pass over the examples.")
    if found is data and not once:
        raise ValueError(
            f"`{name}` is a {type(data).__name__}, which can be read only once: give arrays, a "
            "tf.data.Dataset or a PyDataset."
        )
    return count, found


def unpacked(data: Any, name: str, verbose: Any = 0) -> Iterator[tuple[Any, Any, Any]]:
    """Yield inputs, labels and weights of the batches of a dataset, with a progress bar."""
    count, found = dataset_batches(data, name, once=True)
    bar = progress_bar(count, verbose)
    number = 0
    for number, batch in enumerate(found, start=1):
        yield keras.utils.unpack_x_y_sample_weight(batch)
        bar.update(number)
    if not number:
        raise ValueError(f"`{name}` must hold at least one example; got none.")


def progress_bar(count: int, verbose: Any) -> keras.utils.Progbar:
    """Return a bar for so many batches, which may be unknown; nothing is shown for 0."""
    return keras.utils.Progbar(max(count, 0) or None, verbose=1 if verbose == "auto" else verbose)
