"""The training data of a student: inputs, and a teacher's predictions for them."""

import warnings
from collections.abc import Iterator
from typing import Any, Protocol

import keras
import numpy as np

from tfp_ibnn._core.backend import compiled
from tfp_ibnn.data.datasets import dataset_batches, is_dataset
from tfp_ibnn.data.examples import Examples, as_array
from tfp_ibnn.prediction.monte_carlo import MonteCarlo

_AT_ONCE = 32
"""The number of draws of a teacher that runs in every step."""

Lesson = tuple[Any, dict[str, Any]]
"""A batch of inputs, and the teacher's prediction for it."""


class Transfer(Protocol):
    """The lessons of each epoch."""

    count: int
    """The number of lessons in an epoch; 0 or less if unknown."""

    def epoch(self, number: int) -> Iterator[Lesson]:
        """Yield the lessons of an epoch."""


class StoredTransfer:
    """Arrays, which the teacher predicts once.

    Args:
        teacher: predicts with all of its draws.
        examples: those whose inputs are used.
        batch_size: of a lesson.
        seed: of the order, which differs in each epoch.
        verbose: 1 shows the progress of the teacher.
    """

    def __init__(
        self, teacher: MonteCarlo, examples: Examples, batch_size: int, seed: int, verbose: Any
    ) -> None:
        self._examples = examples
        self._batch_size = batch_size
        self._seed = seed
        self._predictions = teacher.predict(examples.x, batch_size=batch_size, verbose=verbose)
        self.count = -(-examples.size // batch_size)

    def epoch(self, number: int) -> Iterator[Lesson]:
        """Yield the lessons of an epoch, in its own order."""
        examples = self._examples
        for index in _shuffled(examples.size, self._batch_size, self._seed, number):
            prediction = {name: part[index] for name, part in self._predictions.items()}
            yield examples.take(index).x, prediction


class LiveTransfer:
    """Inputs that differ in each epoch, for which the teacher draws new networks in each step.

    Args:
        teacher: predicts with some of its draws.
        data: `Examples`, or a dataset that can be read more than once.
        augment: a Keras layer that changes a batch at random, or None.
        batch_size: of a lesson, for arrays.
        seed: of the order.
    """

    def __init__(
        self, teacher: MonteCarlo, data: Any, augment: Any, batch_size: int, seed: int
    ) -> None:
        self._data = data
        self._augment = augment
        self._batch_size = batch_size
        self._seed = seed
        self._predict = compiled(teacher.average, teacher.variables)
        self._steps = 0
        if isinstance(data, Examples):
            self.count = -(-data.size // batch_size)
        else:
            self.count, _ = dataset_batches(data, "data")

    def epoch(self, number: int) -> Iterator[Lesson]:
        """Yield the lessons of an epoch, with new draws."""
        for x in self._inputs(number):
            if self._augment is not None:
                x = _augmented(self._augment, x)
            stream = np.int32(self._steps)
            self._steps += 1
            yield x, self._predict(x, stream)

    def _inputs(self, epoch: int) -> Iterator[Any]:
        data = self._data
        if isinstance(data, Examples):
            for index in _shuffled(data.size, self._batch_size, self._seed, epoch):
                yield data.take(index).x
            return
        _, batches = dataset_batches(data, "data")
        for batch in batches:
            x, *_ = keras.utils.unpack_x_y_sample_weight(batch)
            yield keras.tree.map_structure(as_array, x)


def _augmented(augment: Any, x: Any) -> Any:
    """Return a batch that a layer has changed, or raise if it cannot take several inputs."""
    try:
        return augment(x, training=True)
    except Exception as error:  # of any type, of the layer's own
        if not isinstance(x, (dict, list, tuple)):
            raise
        raise ValueError(
            "`augment` must take and return all inputs of a batch together, here a "
            f"{type(x).__name__} of {len(x)}: write a Keras layer that changes one of them. It "
            f"raised {type(error).__name__}."
        ) from None


def transfer_of(
    teacher: MonteCarlo,
    data: Any,
    augment: Any,
    batch_size: int,
    verbose: Any,
    options: dict[str, Any],
) -> Transfer:
    """Return the lessons of a distillation.

    Args:
        teacher: as the user gives it.
        data: as the user gives it.
        augment: a Keras layer, or None.
        batch_size: of a lesson, for arrays.
        verbose: 1 shows the progress of a teacher that runs once.
        options: further options of the teacher's `MonteCarlo`, including a `seed`, which also
            sets the order.
    """
    examples = None if is_dataset(data) else Examples.of(data, "data")
    is_live = examples is None or augment is not None
    if is_live:
        options = {"samples": min(_AT_ONCE, teacher.samples), **options}
    seed = options["seed"]
    teacher = _with_options(teacher, options)
    if is_live:
        source = data if examples is None else examples
        return LiveTransfer(teacher, source, augment, batch_size, seed)
    return StoredTransfer(teacher, examples, batch_size, seed, verbose)


def _with_options(teacher: MonteCarlo, options: dict[str, Any]) -> MonteCarlo:
    """Return a teacher with other options, and without entries that a student does not need."""
    without = {"interval": None, "standard_error": False}
    options = {**teacher.options(), **without, **options}
    with warnings.catch_warnings(action="ignore"):  # the user has seen its warnings
        return MonteCarlo(teacher.inner, **options)


def _shuffled(size: int, batch_size: int, seed: int, epoch: int) -> Iterator[np.ndarray]:
    """Yield the indices of batches, in an order that depends on the seed and the epoch."""
    random = np.random.default_rng((seed, epoch))
    order = random.permutation(size)
    for start in range(0, size, batch_size):
        yield order[start : start + batch_size]
