"""Training and validation data: read, checked and split."""

import warnings
from typing import Any, NamedTuple

import keras
import numpy as np

from tfp_ibnn._core import keras_internals
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.data.examples import Examples, read_batches
from tfp_ibnn.likelihoods import Likelihood

FOLDS = 5
CROSS_FIT_BELOW = 1000
FEWEST = 50
"""The smallest number of validation examples: with fewer, differences drown in noise."""
WATCHED = 2048
"""The largest number of examples that serve to fit."""
NUMBERS = 2**19
"""The largest number of outputs of one draw, for the examples that serve to fit."""
SAMPLE = 512
"""The largest number of training examples that are compared with the validation data."""


class Validation(NamedTuple):
    """What candidates are fitted to and scored on."""

    fit: Examples  # for early stopping and parameters: a half or less of them, or all
    score: Examples  # for the selection: the other half, or all
    folds: np.ndarray | None = None  # the fold of each example, where both are all

    def without_each_fold(self) -> list[np.ndarray]:
        """Return the mask (examples,) of what is outside each fold; no masks without folds."""
        if self.folds is None:
            return []
        return [self.folds != fold for fold in range(FOLDS)]

    @property
    def shares(self) -> str:
        """How many examples serve to fit, and how many to choose, in words."""
        if self.folds is not None:
            return f"{self.fit.size:,} to fit, cross-fitted"
        return f"{self.fit.size:,} to fit, {self.score.size:,} to choose"


class Training(NamedTuple):
    """What candidates are trained on: arrays (x, y) or (x, y, weight), or a dataset."""

    data: Any
    size: int
    steps: int
    batch_size: int | None
    seed: int
    has_weights: bool = False
    sample: Examples | None = None  # spread evenly over the data

    def epoch(self, network: keras.Model, number: int, *callbacks: Any) -> None:
        """Train a network for one epoch; the order of arrays follows from seed and epoch.

        Args:
            network: a compiled Keras model.
            number: of the epoch, from 1 on.
            *callbacks: Keras callbacks.
        """
        if not isinstance(self.data, tuple):
            # tf.data has its own order.
            is_shuffled = isinstance(self.data, keras.utils.PyDataset)
            network.fit(self.data, shuffle=is_shuffled, verbose=0, callbacks=list(callbacks))
            return
        random = np.random.default_rng((self.seed, number))
        order = random.permutation(self.size)
        # The last batch is filled up by examples of the first, since JAX would compile the step
        # once more for a smaller one.
        full = min(self.batch_size or 32, self.size)
        order = np.resize(order, self.steps * full)
        x, y, weight = Examples(*self.data).take(order)
        network.fit(
            x,
            y,
            batch_size=full,
            sample_weight=weight,
            shuffle=False,
            verbose=0,
            callbacks=list(callbacks),
        )


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


def read(data: Any, model: keras.Model, output: Likelihood, name: str, every: int = 1) -> Examples:
    """Return the examples of arrays, or of all batches of a dataset, checked.

    Examples of weight 0 are left out unchecked.

    Args:
        data: arrays (x, y) or (x, y, weight), or a dataset that can be read again.
        model: the network that takes the inputs.
        output: what the targets are.
        name: what the user calls the data, for errors.
        every: take every n-th example; 1 takes all.

    Raises:
        ValueError: for data that cannot be used, and if there are no examples.
    """
    parts = []
    count = 0
    for batch in read_batches(data, name):
        part = _checked(_counted(batch), model, output, name)
        first = -count % every  # so that every n-th is taken across batches
        parts.append(part.take(slice(first, None, every)))
        count += part.size
    if not count:
        raise ValueError(f"`{name}` holds no examples.")
    return Examples.joined(parts)


def prepare(
    train: Any,
    validation: Any,
    model: keras.Model,
    output: Likelihood,
    batch_size: int | None,
    seed: int,
) -> tuple[Training, Validation]:
    """Check the data, and split what has to be split.

    Args:
        train: arrays (x, y) or (x, y, weight), or a dataset.
        validation: the same, of other examples; None takes a fifth of the training arrays.
        model: the network that takes the inputs.
        output: what the targets are.
        batch_size: of training arrays; None is 32.
        seed: of the splits, and of the order of training arrays.

    Returns:
        What candidates are trained on, and what they are fitted to and scored on.
    """
    training = _training(train, model, output, batch_size, seed)
    if validation is None:
        training, validation = _hold_out(training, output)
    examples = read(validation, model, output, "validation")
    _check_validation(examples)
    strata = output.strata(examples.y)
    if examples.size < CROSS_FIT_BELOW:
        folds = folds_of(strata, FOLDS, seed)
        return training, Validation(examples, examples, folds)
    half = folds_of(strata, 2, seed)
    fit = examples.take(half == 0)
    score = examples.take(half == 1)
    most = min(WATCHED, NUMBERS // output.width)
    every = -(-fit.size // max(1, most))
    evenly = slice(None, None, every)
    return training, Validation(fit.take(evenly), score)


def _training(
    data: Any, model: keras.Model, output: Likelihood, batch_size: int | None, seed: int
) -> Training:
    """Return what candidates are trained on, after one pass over it that checks it."""
    size = 0
    steps = 0
    has_weights = False
    sample = _Sample()
    for batch in read_batches(data, "train"):  # which may be more than fits into memory
        part = _checked(batch, model, output, "train")
        sample.add(part)
        size += part.size
        steps += 1
        has_weights = batch.weight is not None
    if not size:
        raise ValueError("`train` holds no examples.")
    if isinstance(data, (tuple, list)):
        data = _parts(Examples.of(data, "train"))
        steps = -(-size // (batch_size or 32))
    return Training(data, size, steps, batch_size, seed, has_weights, sample.examples)


def _hold_out(training: Training, output: Likelihood) -> tuple[Training, tuple[Any, ...]]:
    """Return the training without a fifth of its examples, and this fifth as arrays."""
    if not isinstance(training.data, tuple):
        raise ValueError(
            "`validation` is missing, and `train` is a dataset. Give validation=(x, y) that the "
            "model was not trained on."
        )
    if training.size < FOLDS * FEWEST:
        raise ValueError(
            f"`validation` is missing, and `train` is {training.size} examples, too few to split. "
            "Give validation=(x, y) that the model was not trained on."
        )
    examples = Examples(*training.data)
    y = _targets(examples.y, output, "train")
    is_held = folds_of(output.strata(y), FOLDS, training.seed) == 0
    warnings.warn(
        f"No `validation` was given: {is_held.sum()} of the {training.size} training examples are "
        "taken. A model that was trained on them is overconfident there, and so is what is "
        "chosen: give validation=(x, y) of others.",
        stacklevel=4,
    )
    kept = examples.take(~is_held)
    steps = -(-kept.size // (training.batch_size or 32))
    training = training._replace(data=_parts(kept), size=kept.size, steps=steps)
    return training, _parts(examples.take(is_held))


def _check_validation(examples: Examples) -> None:
    if examples.size < FEWEST:
        raise ValueError(f"`validation` must hold at least {FEWEST} examples; got {examples.size}.")
    if examples.weight is not None and examples.weight.sum() < FEWEST:
        raise ValueError(
            f"The weights of `validation` must sum to at least {FEWEST}, since an example of "
            f"weight 2 counts twice; they sum to {examples.weight.sum():.4g}. For weights that "
            "only compare examples, write weight / weight.mean()."
        )
    if len(np.unique(examples.y)) == 1:
        raise ValueError(
            f"All labels of `validation` are {examples.y.flat[0]}: give examples of every kind, "
            "in their natural shares."
        )


class _Sample:
    """Takes an even sample of batches whose number is unknown, and holds few examples at a time."""

    examples: Examples | None = None
    _seen = 0
    _every = 1

    def add(self, part: Examples) -> None:
        """Take some examples of a batch; those of weight 0 are left out."""
        first = -self._seen % self._every
        self._seen += part.size
        examples = part.take(slice(first, None, self._every))
        if examples.weight is not None:
            examples = examples.take(examples.weight != 0)
        if self.examples is not None:
            examples = Examples.joined([self.examples, examples])
        while examples.size > SAMPLE:
            examples = examples.take(slice(None, None, 2))
            self._every *= 2
        self.examples = examples


def _parts(examples: Examples) -> tuple[Any, ...]:
    """Return (x, y), or (x, y, weight) if there are weights."""
    if examples.weight is None:
        return examples.x, examples.y
    return tuple(examples)


def _counted(examples: Examples) -> Examples:
    """Return a batch without its examples of weight 0."""
    weight = examples.weight
    if weight is None or weight.ndim != 1:
        return examples
    arrays = keras.tree.flatten(tuple(examples))
    if any(len(array) != len(weight) for array in arrays):
        return examples  # `_checked` refuses it
    return examples.take(weight != 0)


def _checked(examples: Examples, model: keras.Model, output: Likelihood, name: str) -> Examples:
    """Return the examples with targets as numbers, or raise if they cannot be used."""
    if examples.y is None:
        raise ValueError(f"`{name}` must give (x, y) or (x, y, sample_weight).")
    y = _targets(examples.y, output, name)
    weight = examples.weight
    if weight is not None:
        is_allowed = (weight >= 0) & (weight < np.inf)
        if weight.shape != (len(y),) or not np.all(is_allowed):
            raise ValueError(
                f"`{name}` needs one weight, 0 or above, for each of {len(y)} targets."
            )
        weight = weight.astype("float64")
    takes_text = any(tensor.dtype == "string" for tensor in model.inputs)
    for part in keras.tree.flatten(examples.x):
        if part.dtype.kind == "O" and not takes_text:
            raise ValueError(f"The inputs of `{name}` are objects: give x.astype('float32').")
        if part.shape[:1] != (len(y),):
            raise ValueError(f"`{name}` has inputs {part.shape} for {len(y)} targets.")
    examples.check_finite(f"inputs of `{name}`")
    _check_inputs(examples.x, model, name)
    return Examples(examples.x, y, weight)


def _targets(y: Any, output: Likelihood, name: str) -> np.ndarray:
    if output.is_classifier:  # of one label, or of classes
        labels = output.targets(y, what=f"With this loss, labels of `{name}`")
        return labels.ravel().astype(int)
    return output.targets(y, what=f"The targets of `{name}`").astype("float64")


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
