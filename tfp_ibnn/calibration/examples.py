"""Training and validation data: read, checked and split."""

import warnings
from typing import Any, NamedTuple

import keras
import numpy as np

from tfp_ibnn.calibration.reading import SCORED_ROWS, Reader, counted, joined, read
from tfp_ibnn.calibration.rows import (
    described,
    folds_of,
    groups_of,
    of_rows,
    row_width,
    strata_of,
    take_examples,
    thinned,
)
from tfp_ibnn.data.examples import Examples
from tfp_ibnn.likelihoods import Likelihood

FOLDS = 5
CROSS_FIT_BELOW = 1000
FEWEST = 50
"""The smallest number of validation examples: with fewer, noise hides the differences."""
WATCHED = 2048
"""The largest number of examples that serve to fit."""
NUMBERS = 2**19
"""The largest number of outputs of one draw, for the examples that serve to fit."""
SAMPLE = 512
"""The largest number of training examples that are compared with the validation data."""
FITTED_ROWS = 2**13
"""The largest number of positions of an output that serve to fit; see `Rows`."""


class Validation(NamedTuple):
    """What candidates are fitted to and scored on."""

    fit: Examples  # for early stopping and parameters: a half or less of them, or all
    score: Examples  # for the selection: the other half, or all
    folds: np.ndarray | None = None  # the fold of each example or row, where both are all

    def without_each_fold(self) -> list[np.ndarray]:
        """Return the mask (examples,) of what is outside each fold; no masks without folds."""
        if self.folds is None:
            return []
        return [self.folds != fold for fold in range(FOLDS)]

    def best_nlls(self, raw: np.ndarray, output: Likelihood) -> list[float]:
        """Return the NLLs, in nats, at a fitted temperature: on all examples, without each fold.

        Noise must not be chosen for what a temperature also does.

        Args:
            raw: the outputs for the examples to fit, (examples, draws, width).
            output: what they mean.
        """
        y = self.fit.y
        nlls = [output.best_nll(raw, y, self.fit.weight)]
        for is_kept in self.without_each_fold():
            weight = self.fit.weight_of(is_kept)
            nlls.append(output.best_nll(raw[is_kept], y[is_kept], weight))
        return nlls

    @property
    def shares(self) -> str:
        """How many examples serve to fit, and how many to choose, in words."""
        if self.folds is not None:
            return f"{described(self.fit)} to fit, cross-fitted"
        return f"{described(self.fit)} to fit, {described(self.score)} to choose"


class Training(NamedTuple):
    """What candidates are trained on: arrays (x, y) or (x, y, weight), or a dataset."""

    data: Any
    size: int
    steps: int
    batch_size: int | None
    seed: int
    sample: Examples | None = None  # spread evenly over the data
    is_short: bool = False  # whether an epoch goes through a part of the data

    @property
    def is_assumed(self) -> bool:
        """Whether the batch size is 32 for want of a better one."""
        return self.batch_size is None and isinstance(self.data, tuple)

    def in_batches(self, size: int | None) -> "Training":
        """Return the same arrays in batches of another size; None is 32."""
        return self._replace(batch_size=size, steps=-(-self.size // (size or 32)))

    def shortened(self, steps: int) -> "Training":
        """Return the same data with fewer steps in an epoch."""
        return self._replace(steps=steps, is_short=True)

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
            network.fit(
                self.data,
                steps_per_epoch=self.steps if self.is_short else None,
                shuffle=is_shuffled,
                verbose=0,
                callbacks=list(callbacks),
            )
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
        batch_size: of training arrays; None takes that of the model's last training, or 32.
        seed: of the splits, and of the order of training arrays.

    Returns:
        What candidates are trained on, and what they are fitted to and scored on.
    """
    reader = Reader(model, output, "train")
    training = _training(train, reader, batch_size, seed)
    if training.is_assumed:
        training = training.in_batches(batch_size_of(model, training.size))
    if validation is None:
        training, validation = _hold_out(training, reader, output)
    examples = read(validation, model, output, "validation", seed=seed)
    _check_validation(examples, output)
    strata = strata_of(examples, output)
    most = max(1, NUMBERS // row_width(output))
    most_rows = min(FITTED_ROWS, most)
    if len(strata) < CROSS_FIT_BELOW:
        examples = thinned(examples, most_rows, seed)
        folds = folds_of(strata, FOLDS, seed)
        row_folds = of_rows(examples, folds)
        return training, Validation(examples, examples, row_folds)
    half = folds_of(strata, 2, seed)
    to_fit = np.sum(half == 0)
    most_examples = min(WATCHED, most)
    every = -(-to_fit // most_examples)
    # A part of the first half, in the same order: folds of a multiple are parts of its folds.
    is_fitted = folds_of(strata, 2 * every, seed) == 0
    fit = take_examples(examples, is_fitted)
    fit = thinned(fit, most_rows, seed)
    score = take_examples(examples, half == 1)
    return training, Validation(fit, score)


def _training(data: Any, reader: Reader, batch_size: int | None, seed: int) -> Training:
    """Return what candidates are trained on, after one pass over it that checks it."""
    size = 0
    steps = 0
    sample = _Sample()
    for batch in reader.batches(data):  # which may be more than fits into memory
        sample.add(reader.checked(batch))
        size += batch.size
        steps += 1
    if not size:
        raise ValueError("`train` holds no examples.")
    rows = reader.rows(sample.examples, FITTED_ROWS)
    training = Training(data, size, steps, batch_size, seed, rows)
    if not isinstance(data, (tuple, list)):
        return training
    return training._replace(data=_parts(batch)).in_batches(batch_size)


def batch_size_of(model: keras.Model, size: int) -> int | None:
    """Return in which batches a model was last trained, by the steps of its history, or None.

    Several sizes give as many steps: it is a power of 2 if there is one, or the smallest.

    Args:
        model: the trained model; one from a file has no history.
        size: the number of training examples.
    """
    params = getattr(getattr(model, "history", None), "params", None) or {}
    steps = params.get("steps")
    if not steps or steps > size:  # the latter is of other data
        return None
    smallest = -(-size // steps)
    power = 1 << (smallest - 1).bit_length()
    is_as_many = -(-size // power) == steps
    return power if is_as_many else smallest


def _hold_out(
    training: Training, reader: Reader, output: Likelihood
) -> tuple[Training, tuple[Any, ...]]:
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
    rows = reader.rows(reader.checked(examples), SCORED_ROWS)
    is_held = folds_of(strata_of(rows, output), FOLDS, training.seed) == 0
    warnings.warn(
        f"No `validation` was given: {is_held.sum()} of the {training.size} training examples are "
        "taken. A model that was trained on them is overconfident there, and so is the chosen "
        "one: give validation=(x, y) with other examples.",
        stacklevel=4,
    )
    kept = examples.take(~is_held)
    training = training._replace(data=_parts(kept), size=kept.size)
    return training.in_batches(training.batch_size), _parts(examples.take(is_held))


def _check_validation(examples: Examples, output: Likelihood) -> None:
    groups = groups_of(examples)
    count = examples.size if groups is None else len(np.unique(groups))
    if count < FEWEST:
        raise ValueError(f"`validation` must hold at least {FEWEST} examples; got {count}.")
    if examples.weight is not None and count * examples.weight.mean() < FEWEST:
        raise ValueError(
            f"The weights of `validation` must sum to at least {FEWEST}, since an example of "
            f"weight 2 counts twice; they sum to {count * examples.weight.mean():.4g}. For "
            "relative weights, write weight / weight.mean()."
        )
    for part in output.split_rows(y=examples.y).values():
        if len(np.unique(part["y"])) == 1:
            raise ValueError(
                f"All labels of `validation` are {part['y'].flat[0]}: give examples of every "
                "class, in their natural proportions."
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
        examples = counted(part.take(slice(first, None, self._every)))
        if self.examples is not None:
            examples = joined([self.examples, examples], "train")
        while examples.size > SAMPLE:
            examples = examples.take(slice(None, None, 2))
            self._every *= 2
        self.examples = examples


def _parts(examples: Examples) -> tuple[Any, ...]:
    """Return (x, y), or (x, y, weight) if there are weights."""
    if examples.weight is None:
        return examples.x, examples.y
    return tuple(examples)
