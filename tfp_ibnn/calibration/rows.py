"""Rows: what is fitted and scored if an example has several positions, labels or outputs."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from tfp_ibnn.data.examples import Examples
from tfp_ibnn.likelihoods import Likelihood

_BATCH = 256
"""The largest number of examples that are predicted at once."""
_BLOCK = 2**23
"""The largest size of all draws of such a batch."""

Draw = Callable[[Any], Mapping[str, np.ndarray]]
"""Returns the outputs by name for inputs: (examples, draws, positions..., width)."""


class Rows:
    """The inputs of examples, each of which has several rows.

    A row is a position of an output, such as a pixel or a step, or one of several labels. `Rows`
    take the place of the inputs in `Examples`; targets, weights and predictions are then per row.
    Rows can be indexed like an array.

    Args:
        inputs: of the examples, an array or any structure of arrays.
        output: the likelihood of all outputs.
        positions: how many positions each output has for an example, by name.
        index: (3, rows): the example, the place of the output among all, and the position in it.
        share: the fraction of the positions that count that are rows; 1 is all of them.
    """

    def __init__(
        self,
        inputs: Any,
        output: Likelihood,
        positions: Mapping[str, int],
        index: np.ndarray,
        share: float = 1.0,
    ) -> None:
        self.inputs = inputs
        self.share = share
        self._output = output
        self._positions = positions
        self._index = index

    def __len__(self) -> int:
        return self._index.shape[1]

    def __getitem__(self, rows: Any) -> "Rows":
        index = self._index[:, rows]
        return Rows(self.inputs, self._output, self._positions, index, self.share)

    @property
    def groups(self) -> np.ndarray:
        """The example of each row, (rows,)."""
        return self._index[0]

    def some(self, most: int, seed: int) -> np.ndarray:
        """Return the indices of a random sample of the rows of each output.

        Args:
            most: the largest number of rows of an output.
            seed: of the sample.
        """
        random = np.random.default_rng(seed)
        chosen = []
        for number in range(len(self._positions)):
            rows = np.flatnonzero(self._index[1] == number)
            places = drawn_places(len(rows), most, random)
            chosen.append(rows[places])
        return np.sort(np.concatenate(chosen))

    def outputs(self, draw: Draw, draws: int) -> np.ndarray:
        """Return what a network returns for the rows, (rows, draws, width).

        Examples are predicted a few at a time, and only outputs that belong to a row are kept.

        Args:
            draw: returns the outputs for inputs.
            draws: how many draws it makes.
        """
        examples, local = np.unique(self.groups, return_inverse=True)
        size = self.batch_size(draws)
        order = np.argsort(local, kind="stable")
        in_order = local[order]
        starts = np.arange(0, len(examples), size)
        first_rows = np.searchsorted(in_order, starts[1:])
        rows_of_batches = np.split(order, first_rows)
        parts = []
        for start, rows in zip(starts, rows_of_batches, strict=True):
            stop = start + size
            # The last batch is filled up, since JAX would recompile for a smaller one.
            batch = np.resize(examples[start:stop], size)
            inputs = keras.tree.map_structure(lambda part, batch=batch: part[batch], self.inputs)
            outputs = draw(inputs)
            places = local[rows] - start
            parts.append(self._taken(outputs, rows, places))
        in_batches = np.concatenate(parts)
        original_order = np.argsort(order)
        return in_batches[original_order]

    def batch_size(self, draws: int) -> int:
        """Return how many examples to predict at once, of a few sizes, since JAX compiles each."""
        examples = len(np.unique(self.groups))
        enough = 1 << (examples - 1).bit_length()
        return max(1, min(_BATCH, enough, self.most_at_once(draws)))

    def most_at_once(self, draws: int) -> int:
        """Return of how many examples the draws may be held at once."""
        numbers = draws
        for name, part in self._output.parts.items():
            numbers += draws * self._positions[name] * part.row_shapes["outputs"][0]
        return _BLOCK // numbers

    def _taken(
        self, outputs: Mapping[str, np.ndarray], rows: np.ndarray, local: np.ndarray
    ) -> np.ndarray:
        """Return some rows of a batch's outputs.

        Args:
            outputs: of each output, (batch, draws, positions..., width).
            rows: indices of those that belong to the batch.
            local: the place of each row's example in the batch.
        """
        _, numbers, places = self._index[:, rows]
        taken = {}
        for number, (name, part) in enumerate(self._output.parts.items()):
            array = outputs[name]
            batch, draws = array.shape[:2]
            flat = array.reshape(batch, draws, -1, *part.row_shapes["outputs"])
            positions = self._positions[name]
            if flat.shape[2] != positions:
                raise ValueError(
                    f"The targets have {positions} positions for each example, but `model` returns "
                    f"{flat.shape[2]}, in the shape {array.shape[2:]}."
                )
            is_own = numbers == number
            taken[name] = flat[local[is_own], :, places[is_own]]
        return self._output.join_rows("outputs", taken, numbers)


def drawn_places(count: int, most: int, random: np.random.Generator) -> np.ndarray:
    """Return a random sample of the numbers below a count, in order.

    Args:
        count: the number of places.
        most: the largest number to return.
        random: draws them.
    """
    if count <= most:
        return np.arange(count)
    drawn = random.choice(count, most, replace=False, shuffle=False)
    return np.sort(drawn)


def groups_of(examples: Examples) -> np.ndarray | None:
    """Return the example of each row; None where each example is one row."""
    return examples.x.groups if isinstance(examples.x, Rows) else None


def of_rows(examples: Examples, values: np.ndarray) -> np.ndarray:
    """Return the value of each row's example; without `Rows`, the same values.

    Args:
        examples: with or without `Rows`.
        values: of the examples, (examples,).
    """
    groups = groups_of(examples)
    return values if groups is None else values[groups]


def take_examples(examples: Examples, is_chosen: np.ndarray) -> Examples:
    """Return some examples, with all of their rows.

    Args:
        examples: with or without `Rows`.
        is_chosen: whether to take each example, (examples,).
    """
    return examples.take(of_rows(examples, is_chosen))


def thinned(examples: Examples, most: int, seed: int) -> Examples:
    """Return examples with a random sample of the rows of each output; without `Rows`, all of them.

    Args:
        examples: with or without `Rows`.
        most: the largest number of rows of an output.
        seed: of the sample.
    """
    if not isinstance(examples.x, Rows):
        return examples
    index = examples.x.some(most, seed)
    share = examples.x.share * len(index) / examples.size
    some = examples.take(index)
    some.x.share = share
    return some


def strata_of(examples: Examples, output: Likelihood) -> np.ndarray:
    """Return the strata of examples, whole numbers: splits spread each of them evenly.

    An example with several rows is in the stratum of its rarest class, or of its mean.

    Args:
        examples: with or without `Rows`.
        output: what the targets are.
    """
    if not isinstance(examples.x, Rows):
        return output.strata(examples.y)
    first, *_ = keras.tree.flatten(examples.x.inputs)
    parts = output.split_rows(y=examples.y, groups=examples.x.groups)
    strata = []
    for name, part in output.parts.items():
        y = parts[name]["y"]
        groups = parts[name]["groups"]
        if part.is_classifier:
            strata.append(_rarest_classes(y, groups, len(first)))
        else:
            means = _means(y[:, 0], groups, len(first))
            strata.append(part.strata(means[:, None]))
    by_output = np.stack(strata, axis=1)
    _, combined = np.unique(by_output, axis=0, return_inverse=True)
    return combined.ravel()


def folds_of(strata: np.ndarray, number: int, seed: int) -> np.ndarray:
    """Return the fold of each example; each stratum is spread evenly over all folds.

    Args:
        strata: the stratum of each example, whole numbers (examples,).
        number: of folds.
        seed: of the order within a stratum.
    """
    count = len(strata)
    shuffled = np.random.default_rng(seed).permutation(count)
    by_stratum = np.argsort(strata[shuffled], kind="stable")
    order = shuffled[by_stratum]
    folds = np.empty(count, int)
    folds[order] = np.arange(count) % number
    return folds


def every_nth(examples: Examples, every: int, output: Likelihood, seed: int) -> Examples:
    """Return every n-th example of each stratum, with all of its rows.

    Args:
        examples: with or without `Rows`.
        every: 1 takes all.
        output: what the targets are.
        seed: of the order within a stratum.
    """
    strata = strata_of(examples, output)
    return take_examples(examples, folds_of(strata, every, seed) == 0)


def _rarest_classes(y: np.ndarray, groups: np.ndarray, count: int) -> np.ndarray:
    """Return the rarest class in each of `count` examples, as its rank from the rarest."""
    frequency = np.bincount(y)
    order = np.argsort(frequency)
    place = np.argsort(order)
    rarest = np.full(count, len(place))
    np.minimum.at(rarest, groups, place[y])
    return rarest


def _means(values: np.ndarray, groups: np.ndarray, count: int) -> np.ndarray:
    """Return the mean of the rows of each of `count` examples."""
    rows = np.bincount(groups, minlength=count)
    sums = np.bincount(groups, weights=values, minlength=count)
    return sums / np.maximum(rows, 1)


def row_width(output: Likelihood) -> int:
    """Return the largest number of values that a network returns for a row."""
    return max(part.row_shapes["outputs"][0] for part in output.parts.values())


def described(examples: Examples, what: str = "") -> str:
    """Return how many examples there are, and how many of their outputs, in words.

    Args:
        examples: with or without `Rows`.
        what: kind of examples, such as "validation examples"; "" is the number alone.
    """
    groups = groups_of(examples)
    if groups is None:
        return f"{examples.size:,} {what}".strip()
    count = len(np.unique(groups))
    text = f"{count:,} {what}".strip()
    text = f"{text} with {examples.size:,} outputs"
    if examples.x.share < 1:
        text = f"{text} ({examples.x.share:.2g} of all, drawn at random)"
    return text
