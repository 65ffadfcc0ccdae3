"""Training and validation data: read, checked and split."""

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

from tfp_ibnn.calibration.outputs import Output

FOLDS = 5
CROSS_FIT_BELOW = 1000
FEWEST = 50
"""Examples; with fewer for validation, all differences drown in noise."""


class Examples(NamedTuple):
    """Inputs, any structure of arrays, and targets in the form of `Output.targets`."""

    x: Any
    y: np.ndarray

    def take(self, index: Any) -> "Examples":
        """Return some of the examples."""
        return Examples(*keras.tree.map_structure(lambda part: part[index], (self.x, self.y)))

    def thinned(self, most: int) -> "Examples":
        """Return `most` of the examples or fewer, at even distances."""
        return self.take(slice(None, None, -(-len(self.y) // most)))


class Validation(NamedTuple):
    """What candidates are fitted to and scored on.

    Attributes:
        fit: for early stopping and parameters (A), or all examples.
        score: for the selection (B), or all examples.
        folds: of each example, where both are all examples; else None.
    """

    fit: Examples
    score: Examples
    folds: np.ndarray | None


class Training(NamedTuple):
    """What candidates are trained on: arrays (x, y) or (x, y, weight), or a dataset."""

    data: Any
    size: int
    steps: int
    batch_size: int | None
    seed: int
    has_weights: bool = False

    def epoch(self, network: keras.Model, number: int, callback: Any) -> None:
        """Train a network for one epoch; the order of arrays follows from seed and epoch."""
        options = {"verbose": 0, "callbacks": [callback]}
        if not isinstance(self.data, tuple):
            # tf.data has its own order.
            options["shuffle"] = isinstance(self.data, keras.utils.PyDataset)
            network.fit(self.data, **options)
            return
        order = np.random.default_rng((self.seed, number)).permutation(self.size)
        # The last batch is filled up by examples of the first, since JAX would compile the step
        # once more for a smaller one.
        full = min(self.batch_size or 32, self.size)
        order = np.resize(order, self.steps * full)
        arrays = keras.tree.map_structure(lambda part: part[order], self.data)
        x, y, weight = (*arrays, None)[:3]
        network.fit(x, y, batch_size=full, shuffle=False, sample_weight=weight, **options)

    def thinned(self, model: keras.Model, output: Output, most: int) -> Examples:
        """Return `most` of the examples or fewer, at even distances."""
        return read(self.data, model, output, "train", -(-self.size // most))


def folds_of(strata: np.ndarray, number: int, seed: int) -> np.ndarray:
    """Return the fold of each example; each stratum is spread evenly over all folds."""
    order = np.random.default_rng(seed).permutation(len(strata))
    order = order[np.argsort(strata[order], kind="stable")]
    folds = np.empty(len(order), int)
    folds[order] = np.arange(len(order)) % number
    return folds


def read(data: Any, model: keras.Model, output: Output, name: str, every: int = 1) -> Examples:
    """Return arrays, or all batches of a dataset, as checked examples; weights are not used.

    `every` leaves all but the first of so many examples out.
    """
    batches, seen = [], 0
    for batch in _batches(data, name):
        part = _checked(batch, model, output, name)
        batches.append(part.take(slice(-seen % every, None, every)))
        seen += len(part.y)
    if not batches:
        raise ValueError(f"`{name}` holds no examples.")
    return Examples(*keras.tree.map_structure(lambda *parts: np.concatenate(parts), *batches))


def prepare(
    train: Any,
    validation: Any,
    model: keras.Model,
    output: Output,
    batch_size: int | None,
    seed: int,
) -> tuple[Training, Validation]:
    """Check the data, and split what has to be split."""
    arrays = _arrays(train)
    size, steps, values, has_weights = 0, 0, set(), False
    for batch in _batches(train, "train"):  # which may be more than fits into memory
        y = _checked(batch, model, output, "train").y
        size, steps, has_weights = size + len(y), steps + 1, len(batch) == 3
        values.update(np.unique(y)[:2].tolist())
    if not size:
        raise ValueError("`train` holds no examples.")
    _check_differ(values, "train")
    if size < FEWEST:
        warnings.warn(
            f"`train` holds {size} examples only: at least {FEWEST} would be better, since what is "
            "trained on fewer hardly gains.",
            stacklevel=3,
        )
    if validation is None:
        if arrays is None or size < FOLDS * FEWEST:
            what = "a dataset" if arrays is None else f"{size} examples, too few to split"
            raise ValueError(
                f"`validation` is missing, and `train` is {what}. Give validation=(x, y), examples "
                "that the model was not trained on."
            )
        y = output.targets(arrays[1], "train")
        held = folds_of(output.strata(y), FOLDS, seed) == 0
        warnings.warn(
            f"No `validation` was given: {held.sum()} of the {size} training examples are taken "
            "for it. If the model was trained on them, its confidence there is too high, and so "
            "is that of what is chosen: give validation=(x, y) that it has not seen.",
            stacklevel=3,
        )
        validation = keras.tree.map_structure(lambda part: part[held], arrays)
        arrays = keras.tree.map_structure(lambda part: part[~held], arrays)
        size -= int(held.sum())
    examples = read(validation, model, output, "validation")
    count = len(examples.y)
    if count < FEWEST:
        raise ValueError(f"`validation` must hold at least {FEWEST} examples; got {count}.")
    _check_differ(set(np.unique(examples.y)[:2].tolist()), "validation")
    strata = output.strata(examples.y)
    if count < CROSS_FIT_BELOW:
        parts = Validation(examples, examples, folds_of(strata, FOLDS, seed))
    else:
        half = folds_of(strata, 2, seed)
        parts = Validation(examples.take(half == 0), examples.take(half == 1), None)
    if arrays is not None:
        train, steps = arrays, -(-size // (batch_size or 32))
    return Training(train, size, steps, batch_size, seed, has_weights), parts


def _arrays(data: Any) -> tuple[Any, ...] | None:
    """Return (x, y) or (x, y, weight) as numpy arrays; None if the data is a dataset."""
    if not isinstance(data, (tuple, list)) or not data:
        return None
    x, *others = data
    return keras.tree.map_structure(np.asarray, x), *map(np.asarray, others)


def _batches(data: Any, name: str) -> Iterator[Any]:
    arrays = _arrays(data)
    if arrays is not None:
        return iter([arrays])
    if isinstance(data, keras.utils.PyDataset):
        count = data.num_batches
        infinite, batches = count is None, (data[i] for i in range(count or 0))
    elif hasattr(data, "cardinality"):
        infinite, batches = int(data.cardinality()) == -1, iter(data)
    else:
        raise ValueError(
            f"`{name}` must be arrays (x, y), a tf.data.Dataset or a PyDataset; got "
            f"{type(data).__name__}."
        )
    if infinite:
        raise ValueError(f"`{name}` never ends: give a dataset of one pass over the examples.")
    return batches


def _check_differ(values: set[Any], name: str) -> None:
    if len(values) == 1:
        raise ValueError(
            f"All labels of `{name}` are {values.pop()}: give examples of every kind, in their "
            "natural shares."
        )


def _checked(batch: Any, model: keras.Model, output: Output, name: str) -> Examples:
    """Return inputs and targets, or raise for what cannot be used."""
    if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
        raise ValueError(f"`{name}` must give (x, y) or (x, y, sample_weight).")
    x, y, *weight = _arrays(batch)
    y = output.targets(y, name)
    if weight and not (
        len(weight[0]) == len(y) and np.all((weight[0] >= 0) & (weight[0] < np.inf))
    ):
        raise ValueError(
            f"`{name}` must have one weight, 0 or above, for each of {len(y)} targets."
        )
    for part, tensor in _paired(x, model, name):
        wanted = tuple(tensor.shape[1:])
        if not _fits(part.shape, wanted):
            shape = ", ".join(["N", *("any" if size is None else str(size) for size in wanted)])
            raise ValueError(
                f"The inputs of `{name}` have the shape {part.shape}; `model` takes ({shape})."
            )
        if part.dtype.kind == "O" and tensor.dtype != "string":
            raise ValueError(f"The inputs of `{name}` are objects: give x.astype('float32').")
        if len(part) != len(y):
            raise ValueError(f"`{name}` has {len(part)} inputs for {len(y)} targets.")
        if part.dtype.kind == "f" and not np.isfinite(part).all():
            bad = ~np.isfinite(part).reshape(len(part), -1).all(axis=1)
            raise ValueError(
                f"The inputs of `{name}` hold NaN or infinity in {bad.sum()} of {len(part)} "
                f"examples; the first is number {bad.argmax()}."
            )
    return Examples(x, y)


def _paired(x: Any, model: keras.Model, name: str) -> list[tuple[np.ndarray, Any]]:
    """Return each input with the symbolic one of the model that it belongs to."""
    tensors = model.inputs
    if isinstance(x, dict):
        own = getattr(model, "input", None)
        known = own if isinstance(own, dict) else {tensor.name: tensor for tensor in tensors}
        if known.keys() <= x.keys():
            return [(x[key], tensor) for key, tensor in known.items()]
        found, wanted = ", ".join(map(str, x)), ", ".join(known)
    else:
        parts = keras.tree.flatten(x)
        if len(parts) == len(tensors):
            return list(zip(parts, tensors, strict=True))
        found, wanted = f"{len(parts)} arrays", f"{len(tensors)}"
    raise ValueError(f"The inputs of `{name}` are {found}; `model` takes {wanted}.")


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    """Whether an array can be an input; Keras adds or removes a last axis of size 1 by itself."""
    shape = shape[1:] if shape else (0, 0)
    if len(shape) == len(wanted) + 1 and shape[-1] == 1:
        shape = shape[:-1]
    elif len(shape) == len(wanted) - 1 and wanted[-1] == 1:
        shape = (*shape, 1)
    return len(shape) == len(wanted) and all(
        size in (None, own) for own, size in zip(shape, wanted, strict=True)
    )
