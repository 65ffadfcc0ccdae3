"""Conversion of the targets, weights and masks of examples to rows."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from tfp_ibnn.calibration.network import without_graph
from tfp_ibnn.calibration.rows import Rows, drawn_places
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.data.examples import Examples
from tfp_ibnn.likelihoods import Likelihood
from tfp_ibnn.likelihoods.several import output_names
from tfp_ibnn.prediction.padding import output_masks

_BATCH = 256
"""The largest number of examples to read at once."""
_BLOCK = 2**22
"""The largest number of their positions."""


class RowReader:
    """Makes rows of examples.

    Args:
        model: a Functional or Sequential model.
        output: what its outputs mean.
    """

    def __init__(self, model: keras.Model, output: Likelihood) -> None:
        graph = functional_graph(model)
        names = output_names(model) or [""]
        self._output = output
        self._shapes = {}
        for name, tensor in zip(names, graph.outputs, strict=True):
            self._shapes[name] = tuple(tensor.shape[1:])
        self._masks = output_masks(without_graph(model))

    @property
    def is_several(self) -> bool:
        """Whether there are several outputs."""
        return len(self._shapes) > 1

    @property
    def is_needed(self) -> bool:
        """Whether an example can have several rows."""
        (name, part), *others = self._output.parts.items()
        has_rows = self._shapes[name] != part.row_shapes["outputs"]
        leaves_out = part.is_classifier and part.ignored is not None
        return bool(others) or has_rows or leaves_out

    def check(self, examples: Examples, name: str) -> dict[str, int]:
        """Return how many positions of each output count, or raise.

        Masked positions and those of weight 0 do not count, and are not checked.

        Args:
            examples: with targets and weights as a user gives them.
            name: the name of the data in errors.

        Raises:
            ValueError: for targets and weights that do not match the outputs.
        """
        totals = dict.fromkeys(self._output.parts, 0)
        for first, blocks in self._blocks(examples, name):
            for key, block in blocks.items():
                places = block.counted_places()
                block.rows(places, first)
                totals[key] += len(places)
        return totals

    def rows(self, examples: Examples, name: str, most: int, seed: int = 0) -> Examples:
        """Return the rows of positions that count.

        Args:
            examples: with targets and weights as a user gives them.
            name: the name of the data in errors.
            most: the largest number of rows of an output; if there are more, a random sample.
            seed: of that sample.

        Raises:
            ValueError: as `check` does.
        """
        totals = self.check(examples, name)
        random = np.random.default_rng(seed)
        drawn = {key: drawn_places(total, most, random) for key, total in totals.items()}
        seen = dict.fromkeys(totals, 0)
        found: dict[str, list[_RowsOfOutput]] = {key: [] for key in totals}
        for first, blocks in self._blocks(examples, name):
            for key, block in blocks.items():
                places = block.counted_places()
                start = seen[key]
                stop = start + len(places)
                lower, upper = np.searchsorted(drawn[key], [start, stop])
                chosen = drawn[key][lower:upper] - start
                rows = block.rows(places[chosen], first)
                found[key].append(rows)
                seen[key] = stop
        parts = {key: _RowsOfOutput.of(blocks) for key, blocks in found.items()}
        joined = self._joined(examples.x, parts)
        total = sum(totals.values())
        joined.x.share = joined.size / max(1, total)
        return joined

    def _blocks(
        self, examples: Examples, name: str
    ) -> Iterator[tuple[int, dict[str, "_Labelled"]]]:
        """Yield a few examples at a time: the index of the first, and their outputs by name."""
        targets = self._output.split_given("y", examples.y)
        weights = self._output.split_given("sample_weight", examples.weight, for_all=True)
        whole = {}
        for key, part in self._output.parts.items():
            what = f"{key!r} of `{name}`" if key else f"`{name}`"
            y = np.asarray(targets[key])
            sizes = _sizes_of(part, y, (examples.size, *self._shapes[key]), what)
            weight = weights[key]
            if weight is not None:
                weight = _spread(np.asarray(weight), sizes, what)
            whole[key] = _Labelled(part, y, weight, None, sizes, what)
        size = min(labelled.most_examples for labelled in whole.values())
        for first in range(0, examples.size, size):
            block = slice(first, first + size)
            x = Examples(examples.x).take(block).x
            masks = {} if self._masks is None else self._masks(x)
            blocks = {}
            for key, labelled in whole.items():
                blocks[key] = labelled.take(block, masks.get(key))
            yield first, blocks

    def _joined(self, inputs: Any, parts: "dict[str, _RowsOfOutput]") -> Examples:
        """Return the rows of all outputs, in the order of the examples."""
        of_outputs = list(parts.values())
        counts = [len(part.y) for part in of_outputs]
        numbers = np.repeat(np.arange(len(parts)), counts)
        groups = np.concatenate([part.groups for part in of_outputs])
        places = np.concatenate([part.places for part in of_outputs])
        order = np.argsort(groups, kind="stable")
        index = np.stack([groups, numbers, places])
        index = index[:, order]
        positions = {}
        targets = {}
        for name, part in parts.items():
            positions[name] = part.positions
            targets[name] = part.y
        y = self._output.join_rows("y", targets, numbers[order])
        weights = [part.weight for part in of_outputs]
        weight = _joined_weight(weights, counts)
        if weight is not None:
            weight = weight[order]
        rows = Rows(inputs, self._output, positions, index)
        return Examples(rows, y, weight)


class _RowsOfOutput(NamedTuple):
    """Rows of one output."""

    y: np.ndarray  # as a likelihood's `targets` gives them
    weight: np.ndarray | None
    groups: np.ndarray  # the example of each row
    places: np.ndarray  # the position of each row in its example
    positions: int  # of an example

    @classmethod
    def of(cls, blocks: "list[_RowsOfOutput]") -> "_RowsOfOutput":
        """Return the rows of all blocks, in order."""
        *arrays, positions = zip(*blocks, strict=True)
        joined = []
        for parts in arrays:
            joined.append(None if parts[0] is None else np.concatenate(parts))
        return cls(*joined, positions[0])


class _Labelled(NamedTuple):
    """The targets, weights and mask of one output of some examples."""

    part: Likelihood
    y: np.ndarray
    weight: np.ndarray | None  # of each position
    mask: Any  # that of Keras, or None
    sizes: tuple[int, ...]  # the number of examples, and the sizes of the positions
    what: str  # the name of the output in errors

    @property
    def positions(self) -> int:
        """How many positions an example has."""
        return math.prod(self.sizes[1:])

    @property
    def most_examples(self) -> int:
        """How many examples to read at once."""
        return max(1, min(_BATCH, _BLOCK // max(1, self.positions)))

    def take(self, block: slice, mask: Any) -> "_Labelled":
        """Return some of the examples, with their mask."""
        y = self.y[block]
        weight = None if self.weight is None else self.weight[block]
        sizes = (len(y), *self.sizes[1:])
        return self._replace(y=y, weight=weight, mask=mask, sizes=sizes)

    def counted_places(self) -> np.ndarray:
        """Return which positions count by weight, mask and label, counted over all examples."""
        is_counted = np.ones(self.sizes, bool)
        if self.weight is not None:
            is_allowed = (self.weight >= 0) & (self.weight < np.inf)
            if not np.all(is_allowed):
                raise ValueError(f"The weights of {self.what} must be finite, and 0 or above.")
            is_counted &= self.weight != 0
        if self.mask is not None:
            mask = ops.convert_to_numpy(self.mask)
            is_counted &= _spread(mask, self.sizes, self.what)
        if self.part.is_classifier and self.part.ignored is not None:
            labels = self.y if self.y.ndim == len(self.sizes) else self.y[..., 0]
            is_counted &= labels != self.part.ignored
        return np.flatnonzero(is_counted)

    def rows(self, places: np.ndarray, first: int) -> _RowsOfOutput:
        """Return some positions as rows, checked.

        Args:
            places: of `counted_places`.
            first: the index of the first example.
        """
        weight = None
        if self.weight is not None:
            flat_weight = self.weight.reshape(-1)
            weight = flat_weight[places].astype("float64")
        axes = len(self.sizes)
        further = self.y.shape[axes:]
        y = self.y.reshape(-1, *further)
        (width,) = self.part.row_shapes["outputs"]
        row = self.part.for_width(width)
        targets = checked_targets(y[places], row, self.what)
        positions = max(1, self.positions)
        groups, own_places = np.divmod(places, positions)
        return _RowsOfOutput(targets, weight, first + groups, own_places, positions)


def _sizes_of(
    part: Likelihood, y: np.ndarray, shape: tuple[int | None, ...], what: str
) -> tuple[int, ...]:
    """Return the number of examples and the sizes of the positions, or raise.

    Args:
        part: what the output means.
        y: its targets.
        shape: of the output, with the number of examples.
        what: the name of the data in errors.
    """
    expected = shape
    forms = [shape]
    if shape[-1:] == part.row_shapes["outputs"]:  # the last axis is not a position
        expected = shape[:-1]
        forms = [expected, shape]
    sizes = y.shape[: len(expected)]
    pairs = zip(expected, sizes, strict=False)
    is_alike = all(size in (None, found) for size, found in pairs)
    # The last axis of a sparse label is 1: the likelihood checks it.
    if not is_alike or y.ndim not in [len(form) for form in forms]:
        known = " or ".join(map(str, forms)).replace("None", "positions")
        raise ValueError(f"The targets of {what} must have the shape {known}; got {y.shape}.")
    return sizes


def checked_targets(y: np.ndarray, output: Likelihood, what: str) -> np.ndarray:
    """Return targets in the form that calibration uses, or raise.

    Args:
        y: those of rows.
        output: what a row means.
        what: the name of the data in errors, such as "`train`".
    """
    if output.is_classifier:  # of one label, or of classes
        labels = output.targets(y, what=f"With this loss, labels of {what}")
        return labels.ravel().astype(int)
    return output.targets(y, what=f"The targets of {what}").astype("float64")


def _spread(values: np.ndarray, sizes: tuple[int, ...], what: str) -> np.ndarray:
    """Return weights or a mask of examples, or of their positions, for each position.

    Args:
        values: for each example, or some axes of positions.
        sizes: the number of examples, and the sizes of the positions.
        what: the name of the data in errors.
    """
    if values.ndim == len(sizes) + 1 and values.shape[-1] == 1:
        values = values[..., 0]
    missing = len(sizes) - values.ndim
    pairs = zip(values.shape, sizes, strict=False)
    is_alike = all(found in (1, size) for found, size in pairs)
    if missing < 0 or not is_alike or values.shape[:1] != sizes[:1]:
        raise ValueError(
            f"The weights of {what} must be for each example, {sizes[:1]}, or for each position, "
            f"{sizes}; got {values.shape}."
        )
    ones = (1,) * missing
    with_all_axes = values.reshape(*values.shape, *ones)
    return np.broadcast_to(with_all_axes, sizes)


def _joined_weight(weights: list[np.ndarray | None], counts: list[int]) -> np.ndarray | None:
    """Return the weights of all rows, rescaled to the same mean for each output."""
    if all(weight is None for weight in weights) or 0 in counts:
        return None
    filled = []
    for weight, count in zip(weights, counts, strict=True):
        filled.append(np.ones(count) if weight is None else weight)
    means = np.array([weight.mean() for weight in filled])
    common = means.mean()
    scaled = []
    for weight, mean in zip(filled, means, strict=True):
        scaled.append(weight * common / mean)
    return np.concatenate(scaled)
