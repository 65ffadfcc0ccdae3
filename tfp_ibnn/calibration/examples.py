"""Training and validation data: read, checked and split."""

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

from tfp_ibnn._core import keras_internals
from tfp_ibnn.calibration.outputs import Output
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.prediction.batches import as_array, dataset_batches
from tfp_ibnn.weights.features import check_finite

FOLDS = 5
CROSS_FIT_BELOW = 1000
FEWEST = 50
"""Examples; with fewer for validation, all differences drown in noise."""
WATCHED, NUMBERS = 2048, 2**19
"""At most so many examples, and outputs of a draw for them, serve to fit."""
SAMPLE = 512
"""At most so many training examples are compared with the validation data."""


class Examples(NamedTuple):
    """Inputs, any structure of arrays, and targets in the form of `Output.targets`.

    A weight says how often an example counts; without weights, each counts once.
    """

    x: Any
    y: np.ndarray
    weight: np.ndarray | None = None

    def take(self, index: Any) -> "Examples":
        """Return some of the examples."""
        x, y = keras.tree.map_structure(lambda part: part[index], (self.x, self.y))
        return Examples(x, y, self.weight_of(index))

    def weight_of(self, index: Any) -> np.ndarray | None:
        """Return the weights of some of the examples, if there are weights."""
        return None if self.weight is None else self.weight[index]


class Validation(NamedTuple):
    """What candidates are fitted to and scored on."""

    fit: Examples  # for early stopping and parameters (A, or an even part of it), or all
    score: Examples  # for the selection (B), or all
    folds: np.ndarray | None = None  # of each example, where both are all


class Training(NamedTuple):
    """What candidates are trained on: arrays (x, y) or (x, y, weight), or a dataset."""

    data: Any
    size: int
    steps: int
    batch_size: int | None
    seed: int
    has_weights: bool = False
    sample: Examples | None = None  # from all over the data

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


def folds_of(strata: np.ndarray, number: int, seed: int) -> np.ndarray:
    """Return the fold of each example; each stratum is spread evenly over all folds."""
    order = np.random.default_rng(seed).permutation(len(strata))
    order = order[np.argsort(strata[order], kind="stable")]
    folds = np.empty(len(order), int)
    folds[order] = np.arange(len(order)) % number
    return folds


def read(data: Any, model: keras.Model, output: Output, name: str, every: int = 1) -> Examples:
    """Return arrays, or all batches of a dataset, as checked examples: one of `every` so many.

    Examples of weight 0 are left out unchecked.
    """
    batches, seen = [], 0
    for batch in map(_counted, _batches(data, name)):
        part = _checked(batch, model, output, name)
        batches.append(part.take(slice(-seen % every, None, every)))
        seen += len(part.y)
    if not seen:
        raise ValueError(f"`{name}` holds no examples.")
    return Examples(*keras.tree.map_structure(_joined, *batches))


def prepare(
    train: Any,
    validation: Any,
    model: keras.Model,
    output: Output,
    batch_size: int | None,
    seed: int,
) -> tuple[Training, Validation]:
    """Check the data, and split what has to be split."""
    arrays, sample = _arrays(train), _Sample()
    size, steps, has_weights = 0, 0, False
    for batch in _batches(train, "train"):  # which may be more than fits into memory
        part = _checked(batch, model, output, "train")
        size, steps = size + len(part.y), steps + 1
        has_weights = len(batch) == 3
        sample.add(part)
    if not size:
        raise ValueError("`train` holds no examples.")
    if validation is None:
        if arrays is None or size < FOLDS * FEWEST:
            what = "a dataset" if arrays is None else f"{size} examples, too few to split"
            remedy = "Give validation=(x, y) that the model was not trained on."
            raise ValueError(f"`validation` is missing, and `train` is {what}. {remedy}")
        y = output.targets(arrays[1], "train")
        held = folds_of(output.strata(y), FOLDS, seed) == 0
        taken = f"No `validation` was given: {held.sum()} of the {size} training examples are taken"
        why = "A model that was trained on them is overconfident there, and so is what is chosen"
        warnings.warn(f"{taken}. {why}: give validation=(x, y) of others.", stacklevel=3)
        validation = keras.tree.map_structure(lambda part: part[held], arrays)
        arrays = keras.tree.map_structure(lambda part: part[~held], arrays)
        size -= int(held.sum())
    if arrays is not None:
        train, steps = arrays, -(-size // (batch_size or 32))
    training = Training(train, size, steps, batch_size, seed, has_weights, sample.examples)
    examples = read(validation, model, output, "validation")
    count = len(examples.y)
    if count < FEWEST:
        raise ValueError(f"`validation` must hold at least {FEWEST} examples; got {count}.")
    if examples.weight is not None and examples.weight.sum() < FEWEST:
        raise ValueError(
            f"The weights of `validation` must sum to at least {FEWEST}, since an example of "
            f"weight 2 counts twice; they sum to {examples.weight.sum():.4g}. For weights that "
            "only compare examples, write weight / weight.mean()."
        )
    if len(np.unique(examples.y)) == 1:
        only = f"All labels of `validation` are {examples.y.flat[0]}"
        raise ValueError(f"{only}: give examples of every kind, in their natural shares.")
    strata = output.strata(examples.y)
    if count < CROSS_FIT_BELOW:
        return training, Validation(examples, examples, folds_of(strata, FOLDS, seed))
    half = folds_of(strata, 2, seed)
    most = max(1, min(WATCHED, NUMBERS // output.width))
    fit, score = (examples.take(half == part) for part in (0, 1))
    return training, Validation(fit.take(slice(None, None, -(-len(fit.y) // most))), score)


class _Sample:
    """Takes examples from all over batches whose number is unknown, evenly, and few at a time."""

    examples: Examples | None = None
    _seen, _every = 0, 1

    def add(self, part: Examples) -> None:
        """Take some examples of a batch; those of weight 0 are left out."""
        taken = slice(-self._seen % self._every, None, self._every)
        self._seen += len(part.y)
        part = part.take(taken)
        if part.weight is not None:
            part = part.take(part.weight != 0)
        parts = [part] if self.examples is None else [self.examples, part]
        examples = Examples(*keras.tree.map_structure(_joined, *parts))
        while len(examples.y) > SAMPLE:
            examples = examples.take(slice(None, None, 2))
            self._every *= 2
        self.examples = examples


def _arrays(data: Any) -> tuple[Any, ...] | None:
    """Return (x, y) or (x, y, weight) as numpy arrays; None if the data is a dataset."""
    if not isinstance(data, (tuple, list)) or not data:
        return None
    x, *others = data
    return keras.tree.map_structure(as_array, x), *map(np.asarray, others)


def _batches(data: Any, name: str) -> Iterator[Any]:
    arrays = _arrays(data)
    return dataset_batches(data, name)[1] if arrays is None else iter([arrays])


def _joined(*batches: Any) -> Any:
    return None if batches[0] is None else np.concatenate(batches)


def _counted(batch: Any) -> Any:
    """Return a batch without its examples of weight 0."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 3:
        return batch
    arrays = _arrays(batch)
    weight = arrays[2]
    if weight.ndim != 1 or any(len(x) != len(weight) for x in keras.tree.flatten(arrays)):
        return batch  # which is refused
    return keras.tree.map_structure(lambda part: part[weight != 0], arrays)


def _checked(batch: Any, model: keras.Model, output: Output, name: str) -> Examples:
    """Return inputs and targets, or raise for what cannot be used."""
    if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
        raise ValueError(f"`{name}` must give (x, y) or (x, y, sample_weight).")
    x, y, *weight = _arrays(batch)
    y = output.targets(y, name)
    if not all(x.shape == (len(y),) and np.all((x >= 0) & (x < np.inf)) for x in weight):
        raise ValueError(f"`{name}` needs one weight, 0 or above, for each of {len(y)} targets.")
    for part in keras.tree.flatten(x):
        if part.dtype.kind == "O" and all(tensor.dtype != "string" for tensor in model.inputs):
            raise ValueError(f"The inputs of `{name}` are objects: give x.astype('float32').")
        if part.shape[:1] != (len(y),):
            raise ValueError(f"`{name}` has inputs {part.shape} for {len(y)} targets.")
        check_finite(part, f"inputs of `{name}`")
    first, graph = keras.tree.map_structure(lambda part: part[:1], x), functional_graph(model)
    try:
        pairs = zip(keras_internals.graph_inputs(graph, first), graph.inputs, strict=True)
    except Exception as error:  # its kinds differ
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"`model` cannot take the inputs of `{name}`: {reason}") from error
    for part, tensor in pairs:
        sizes = zip(part.shape[1:], tensor.shape[1:], strict=True)
        if any(wanted not in (None, size) for size, wanted in sizes):
            got = f"have the shape {tuple(part.shape)}; `model` takes {tuple(tensor.shape)}"
            raise ValueError(f"The inputs of `{name}` {got}.")
    return Examples(x, y, weight[0].astype("float64") if weight else None)
