"""The one reader of examples, whether they come as arrays or as a dataset of batches."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np

from tfp_ibnn._core import checks
from tfp_ibnn._core.text import refuse_single_strings
from tfp_ibnn.data.datasets import dataset_batches, is_dataset, progress_bar


class Examples(NamedTuple):
    """Inputs with targets and weights, all of one length.

    Args:
        x: inputs, an array or any structure of arrays, such as a dict by the names of inputs.
        y: targets (examples, ...), or None; of several outputs, a dict or list of arrays.
        weight: how often each example counts, (examples,); None counts each once. Of several
            outputs, perhaps a dict or list of arrays.

    Example:
        >>> import numpy as np
        >>> examples = Examples.of((np.zeros((5, 2)), np.arange(5)), "train")
        >>> [len(part.y) for part in examples.batches(2)]
        [2, 2, 1]
    """

    x: Any
    y: Any = None
    weight: Any = None

    @classmethod
    def of(cls, arrays: Any, name: str, several: bool = False) -> "Examples":
        """Return what a user gives, as NumPy arrays.

        Args:
            arrays: (x,), (x, y) or (x, y, weight), or x alone.
            name: what the user calls it, for errors.
            several: whether targets and weights are for several outputs, so that a list of arrays
                is not one array.

        Raises:
            ValueError: if there are more than three parts.
        """
        if not isinstance(arrays, (tuple, list)):
            arrays = (arrays,)
        refuse_single_strings(arrays[:1], name)
        if not 1 <= len(arrays) <= 3:
            raise ValueError(f"`{name}` must give (x, y) or (x, y, sample_weight).")
        x, y, weight = (*arrays, None, None)[:3]
        x = keras.tree.map_structure(as_array, x)
        return cls(x, _arrays_or_none(y, several), _arrays_or_none(weight, several))

    @classmethod
    def joined(cls, parts: Iterable["Examples"]) -> "Examples":
        """Return the examples of all parts, in order."""
        return cls(*keras.tree.map_structure(_concatenated, *parts))

    @property
    def size(self) -> int:
        """The number of examples."""
        first, *_ = keras.tree.flatten(self.x)
        return len(first)

    def take(self, index: Any) -> "Examples":
        """Return some of the examples, by a slice, a mask or indices."""
        x = _taken(self.x, index)
        y = _taken(self.y, index)
        return Examples(x, y, self.weight_of(index))

    def weight_of(self, index: Any) -> Any:
        """Return the weights of some of the examples, if there are weights."""
        return _taken(self.weight, index)

    def batches(self, size: int) -> Iterator["Examples"]:
        """Yield batches of `size` examples; the last one may be smaller."""
        size = checks.positive_integer("batch_size", size)
        for start in range(0, self.size, size):
            yield self.take(slice(start, start + size))

    def check_finite(self, what: str = "inputs") -> None:
        """Raise for NaN or infinity in the inputs; `what` is what an error calls them."""
        for part in keras.tree.flatten(self.x):
            check_finite(part, what)


def read_batches(data: Any, name: str, several: bool = False) -> Iterator[Examples]:
    """Yield examples as NumPy arrays: arrays all at once, a dataset batch by batch.

    Args:
        data: arrays (x, y) or (x, y, weight), or a dataset that can be read again.
        name: what the user calls it, for errors.
        several: whether targets and weights are for several outputs.
    """
    if isinstance(data, (tuple, list)) and data:
        yield Examples.of(data, name, several)
        return
    _, batches = dataset_batches(data, name)
    for batch in batches:
        yield Examples.of(batch, name, several)


def unpacked(data: Any, name: str, verbose: Any = 0) -> Iterator[Examples]:
    """Yield the batches of a dataset as they are, not as NumPy arrays, with a progress bar.

    Args:
        data: a `tf.data.Dataset`, a `PyDataset` or a generator; it is read once.
        name: what the user calls it, for errors.
        verbose: 1 shows progress, 0 nothing.

    Raises:
        ValueError: if there is no batch.
    """
    count, batches = dataset_batches(data, name, once=True)
    bar = progress_bar(count, verbose)
    number = 0
    for number, batch in enumerate(batches, start=1):
        yield Examples(*keras.utils.unpack_x_y_sample_weight(batch))
        bar.update(number)
    if not number:
        raise ValueError(f"`{name}` must hold at least one example; got none.")


def some_at_a_time(
    x: Any, y: Any, weight: Any, batch_size: int | None, verbose: Any = 0
) -> Iterator[Examples]:
    """Yield the batches of arrays, or of a dataset as they are.

    Args:
        x: inputs, or a dataset that ends.
        y: targets of arrays, or None.
        weight: weights of arrays, or None.
        batch_size: of arrays; None is Keras's 32.
        verbose: 1 shows progress with a dataset, 0 nothing.

    Raises:
        ValueError: for `y` or `weight` beside a dataset, and for arrays of different lengths.
    """
    if not is_dataset(x):
        size = 32 if batch_size is None else batch_size
        examples = Examples.of((x, y, weight), "x")
        _check_lengths(examples)
        yield from examples.batches(size)
        return
    if y is not None or weight is not None:
        raise ValueError("`y` and `sample_weight` must come from `x`, a dataset: omit them.")
    yield from unpacked(x, "x", verbose)


def labelled_batches(
    x: Any, y: Any, batch_size: int, verbose: Any = 0, once: bool = True
) -> Iterator[tuple[Any, np.ndarray]]:
    """Yield finite inputs and targets of arrays, or of a dataset, with a progress bar.

    Args:
        x: inputs; or, if y is None, a dataset of batches (x, y) that ends.
        y: targets of arrays.
        batch_size: for arrays.
        verbose: 1 shows progress, 0 nothing.
        once: whether a dataset is read only once, so that a generator will do.

    Raises:
        ValueError: for NaN or infinity in the inputs, and if there are no examples.
    """
    for batch in labelled_examples(x, y, None, batch_size, verbose, once):
        if batch.weight is not None:
            raise ValueError("A dataset must give (x, y); got 3 parts.")
        yield batch.x, batch.y


def labelled_examples(
    x: Any, y: Any, weight: Any, batch_size: int, verbose: Any = 0, once: bool = True
) -> Iterator[Examples]:
    """Yield the same with their weights, if there are weights.

    Args:
        x: inputs; or, if y is None, a dataset of batches (x, y) or (x, y, weight) that ends.
        y: targets of arrays.
        weight: how often each example, or each of its positions, counts, for arrays; or None.
        batch_size: for arrays.
        verbose: 1 shows progress, 0 nothing.
        once: whether a dataset is read only once, so that a generator will do.

    Raises:
        ValueError: for NaN or infinity in the inputs, weights that are negative or not finite, and
            if there are no examples.
    """
    if y is not None:
        size = checks.positive_integer("batch_size", batch_size)
        examples = Examples.of((x, y, weight), "x")
        _check_lengths(examples)
        count = -(-len(examples.y) // size)
        batches = examples.batches(size)
    else:
        if weight is not None:
            raise ValueError("`sample_weight` must come from `x`, a dataset: omit it.")
        count, datasets = dataset_batches(x, "x", once)
        batches = map(_labelled, datasets)
    bar = progress_bar(count, verbose)
    number = 0
    for number, batch in enumerate(batches, start=1):
        if not len(batch.y):
            continue
        batch.check_finite()
        _check_weight(batch.weight)
        yield batch
        bar.update(number)
    if not number:
        raise ValueError("There are no examples.")


def as_array(values: Any) -> np.ndarray:
    """Return an array; strings are in one of objects, since Keras takes no others."""
    array = np.asarray(values)
    if array.dtype.kind in "SU":
        return array.astype(object)
    return array


def check_finite(values: np.ndarray, what: str) -> None:
    """Raise for NaN or infinity.

    Args:
        values: an array (rows, ...).
        what: what an error calls it.
    """
    if values.dtype.kind != "f":
        return
    is_finite = np.isfinite(values)
    if not is_finite.all():
        bad = ~is_finite.reshape(len(values), -1).all(axis=1)
        raise ValueError(
            f"The {what} hold NaN or infinity in {bad.sum()} of {len(bad)} rows; the first is "
            f"number {bad.argmax()}."
        )


def _labelled(batch: Any) -> Examples:
    if len(batch) not in (2, 3):
        raise ValueError(f"A dataset must give (x, y); got {len(batch)} parts.")
    parts = tuple(batch)
    return Examples(*keras.tree.map_structure(as_array, parts))


def _check_lengths(examples: Examples) -> None:
    arrays = keras.tree.flatten(examples.x)
    for given in (examples.y, examples.weight):
        if given is not None:
            arrays += keras.tree.flatten(given)
    lengths = {len(array) for array in arrays}
    if len(lengths) != 1:
        raise ValueError(f"`x` and `y` must have as many examples; got {sorted(lengths)}.")


def _check_weight(weight: np.ndarray | None) -> None:
    if weight is None:
        return
    is_good = np.isfinite(weight) & (weight >= 0)
    if not is_good.all():
        worst = weight[~is_good].flat[0]
        raise ValueError(f"`sample_weight` must be finite, and 0 or above; got {worst}.")


def _arrays_or_none(values: Any, several: bool) -> Any:
    """Return an array, or None; of several outputs, a dict or list of arrays if that is given."""
    if values is None:
        return None
    is_structure = isinstance(values, Mapping)
    if several and isinstance(values, (list, tuple)):
        is_structure = all(hasattr(part, "shape") for part in values)
    if is_structure:
        return keras.tree.map_structure(np.asarray, values)
    return np.asarray(values)


def _taken(arrays: Any, index: Any) -> Any:
    """Return some entries of all arrays in a structure; None stays None."""

    def take(array: np.ndarray | None) -> np.ndarray | None:
        if array is None:
            return None
        return array[index]

    return keras.tree.map_structure(take, arrays)


def _concatenated(*parts: Any) -> Any:
    return None if parts[0] is None else np.concatenate(parts)
