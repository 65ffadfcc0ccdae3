"""Reading and checking of training, validation and test data."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tfp_ibnn._core import keras_internals
from tfp_ibnn.calibration.row_reader import RowReader, checked_targets
from tfp_ibnn.calibration.rows import row_width
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.data.examples import Examples, read_batches
from tfp_ibnn.likelihoods import Likelihood

SCORED_ROWS = 2**17
"""The largest number of validation or test positions of an output; see `Rows`."""
_NUMBERS = 2**23
"""The largest size of the prediction of these positions."""


class Reader:
    """Reads examples of a network, and checks them.

    Args:
        model: the network that takes the inputs.
        output: what the targets are.
        name: the name of the data in errors.
    """

    def __init__(self, model: keras.Model, output: Likelihood, name: str) -> None:
        self._model = model
        self._output = output
        self._name = name
        self._rows = RowReader(model, output)

    def batches(self, data: Any) -> Iterator[Examples]:
        """Yield arrays at once, or a dataset batch by batch; unchecked."""
        return read_batches(data, self._name, self._rows.is_several)

    def checked(self, examples: Examples) -> Examples:
        """Return the examples, or raise if they cannot be used.

        If each example is one row, the targets are converted for the likelihood; otherwise they
        stay as the user gave them.
        """
        if examples.y is None:
            raise ValueError(f"`{self._name}` must give (x, y) or (x, y, sample_weight).")
        if self._rows.is_needed:
            self._rows.check(examples, self._name)
        else:
            examples = _with_targets(examples, self._output, self._name)
        _check_lengths(examples, self._model, self._name)
        examples.check_finite(f"inputs of `{self._name}`")
        _check_inputs(examples.x, self._model, self._name)
        return examples

    def rows(self, examples: Examples, most: int, seed: int = 0) -> Examples:
        """Return checked examples, with a limited number of rows of each output if they have rows.

        Args:
            examples: from `checked`.
            most: the largest number of rows of an output; if there are more, a random sample.
            seed: of that sample.

        Raises:
            ValueError: if no position of an output counts.
        """
        if not self._rows.is_needed:
            return examples
        rows = self._rows.rows(examples, self._name, most, seed)
        for part in self._output.split_rows(y=rows.y).values():
            if not len(part["y"]):
                raise ValueError(
                    f"An output of `model` has no position in `{self._name}` that counts: all are "
                    "masked, or have the weight 0."
                )
        return rows

    def read(self, data: Any, every: int = 1) -> Examples:
        """Return all checked examples, without those of weight 0.

        Args:
            data: arrays (x, y) or (x, y, weight), or a dataset that can be read more than once.
            every: take every n-th example; 1 takes all.
        """
        parts = []
        count = 0
        for batch in self.batches(data):
            part = self.checked(counted(batch))
            first = -count % every  # so that every n-th is taken across batches
            parts.append(part.take(slice(first, None, every)))
            count += part.size
        if not count:
            raise ValueError(f"`{self._name}` holds no examples.")
        return joined(parts, self._name)


def read(
    data: Any, model: keras.Model, output: Likelihood, name: str, every: int = 1, seed: int = 0
) -> Examples:
    """Return the checked examples to score, from arrays or from all batches of a dataset.

    If an example has several positions, labels or outputs, the inputs are `Rows`, at most
    `SCORED_ROWS` of each output.

    Args:
        data: arrays (x, y) or (x, y, weight), or a dataset that can be read more than once.
        model: the network that takes the inputs.
        output: what the targets are.
        name: the name of the data in errors.
        every: take every n-th example; 1 takes all.
        seed: of the sample of positions, if there are more.

    Raises:
        ValueError: for data that cannot be used, and if there are no examples.
    """
    reader = Reader(model, output, name)
    most = min(SCORED_ROWS, _NUMBERS // row_width(output))
    return reader.rows(reader.read(data, every), most, seed)


def joined(parts: list[Examples], name: str) -> Examples:
    """Return the examples of all parts, or raise if their shapes differ.

    Args:
        parts: the examples of each batch.
        name: of the data, for the error.
    """
    arrays = [keras.tree.flatten(tuple(part)) for part in parts]
    for alike in zip(*arrays, strict=True):
        shapes = {array.shape[1:] for array in alike if array is not None}
        if len(shapes) > 1:
            raise ValueError(
                f"The batches of `{name}` have arrays of different shapes, {sorted(shapes)[:2]}: "
                "pad all of them to one length, and mask the padding."
            )
    return Examples.joined(parts)


def counted(examples: Examples) -> Examples:
    """Return a batch without its examples of weight 0."""
    weight = examples.weight
    if not isinstance(weight, np.ndarray) or weight.ndim != 1:
        return examples
    arrays = keras.tree.flatten(tuple(examples))
    if any(len(array) != len(weight) for array in arrays):
        return examples  # `Reader` raises for it
    return examples.take(weight != 0)


def _with_targets(examples: Examples, output: Likelihood, name: str) -> Examples:
    """Return examples of one row each with targets and weights as numbers, or raise."""
    y = checked_targets(examples.y, output, f"`{name}`")
    weight = examples.weight
    if weight is not None:
        is_allowed = (weight >= 0) & (weight < np.inf)
        if weight.shape != (len(y),) or not np.all(is_allowed):
            raise ValueError(
                f"`{name}` needs one weight, 0 or above, for each of {len(y)} targets."
            )
        weight = weight.astype("float64")
    return Examples(examples.x, y, weight)


def _check_lengths(examples: Examples, model: keras.Model, name: str) -> None:
    """Raise if the inputs are objects, or not as many as the targets."""
    first, *_ = keras.tree.flatten(examples.y)
    takes_text = any(tensor.dtype == "string" for tensor in model.inputs)
    for part in keras.tree.flatten(examples.x):
        if part.dtype.kind == "O" and not takes_text:
            raise ValueError(f"The inputs of `{name}` are objects: give x.astype('float32').")
        if part.shape[:1] != (len(first),):
            raise ValueError(f"`{name}` has inputs {part.shape} for {len(first)} targets.")


def _check_inputs(x: Any, model: keras.Model, name: str) -> None:
    """Raise if the inputs do not have the structure and the shapes that a model takes."""
    first = keras.tree.map_structure(lambda part: part[:1], x)
    graph = functional_graph(model)
    try:
        inputs = list(keras_internals.graph_inputs(graph, first))
        pairs = list(zip(inputs, graph.inputs, strict=True))
    except Exception as error:  # Keras raises errors of many types
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"`model` cannot take the inputs of `{name}`: {reason}") from error
    for part, tensor in pairs:
        shape = tuple(part.shape)
        expected_shape = tuple(tensor.shape)
        sizes = zip(shape[1:], expected_shape[1:], strict=True)
        if any(expected not in (None, size) for size, expected in sizes):
            raise ValueError(
                f"The inputs of `{name}` have the shape {shape}; `model` takes {expected_shape}."
            )
