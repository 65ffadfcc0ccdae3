"""The rows of the comparison: what was scored, and the rule by which one is chosen."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from tfp_ibnn.calibration import costs
from tfp_ibnn.calibration.examples import Examples
from tfp_ibnn.calibration.trials import Trial
from tfp_ibnn.likelihoods import Likelihood

_BLOCK = 2**23
"""How many numbers of raw outputs are held at once."""


class Cost(NamedTuple):
    """What a candidate takes; those that come first weigh more.

    Args:
        passes: of one prediction, in passes of the model as it is, by multiply-adds. What runs
            before the first noise counts once for all draws; a fitted temperature costs nothing.
        trainings: what its training took, in trainings of the model as it is; 0 without any.
        megabytes: of the weights, and of all that a posterior holds; 4 bytes a float32.
    """

    passes: float
    trainings: float
    megabytes: float

    def columns(self) -> dict[str, float]:
        """Return the columns of a table."""
        return {"passes": self.passes, "trainings": self.trainings, "MB": self.megabytes}


@dataclasses.dataclass(eq=False)
class Candidate:
    """A row of the table.

    Args:
        name: that of its trial, with a suffix such as " + temperature" if a parameter was fitted.
        trial: its network, and how it draws.
        parameter: the temperature; of a regression the scale of each output, or their factor.
        seconds: what fitting and training took.
        prediction: for the validation examples it was scored on, (examples, ...).
        nll: of each of these examples, in nats.
        errors: of each of them: 0 or 1 of a class, the squared error of a regression.
        unit: the network in whose passes its cost is counted; None takes its own. A `Report` sets
            the model as it is.
    """

    name: str
    trial: Trial = dataclasses.field(repr=False)
    parameter: Any
    seconds: float
    prediction: np.ndarray = dataclasses.field(repr=False)
    nll: np.ndarray = dataclasses.field(repr=False)
    errors: np.ndarray = dataclasses.field(repr=False)
    unit: keras.Model | None = dataclasses.field(default=None, repr=False)

    @property
    def cost(self) -> Cost:
        """What it takes; a fitted parameter costs nothing."""
        trial = self.trial
        return Cost(
            passes=costs.passes(trial.engine, self.unit),
            trainings=trial.trainings,
            megabytes=costs.megabytes(trial.engine, trial.best),
        )

    @property
    def shown_parameter(self) -> float | str:
        """The parameter as a table shows it: a number, or several joined by commas."""
        numbers = np.ravel(self.parameter).tolist()
        if len(numbers) == 1:
            return numbers[0]
        return ", ".join(f"{number:.4g}" for number in numbers)


def choose(
    nll: Sequence[np.ndarray], costs: Sequence[Any], weight: np.ndarray | None = None
) -> int:
    """Return the cheapest candidate within one standard error of the best.

    Ties in cost go to the lowest NLL, even of a candidate beyond that error: the error is that of
    the mean difference from the best, and small for what resembles the best, so the cheapest within
    it may be worse than an equally cheap one beyond.

    Args:
        nll: of each candidate, (examples,), in nats.
        costs: of each candidate; any values that can be ordered.
        weight: how often each example counts; None is once.

    Returns:
        The index of a candidate.
    """
    distance, error = behind(nll, weight)
    within_error = np.flatnonzero(distance <= error)
    cheapest = min(costs[index] for index in within_error)
    equally_cheap = [index for index, cost in enumerate(costs) if cost == cheapest]
    return min(equally_cheap, key=lambda index: distance[index])


def behind(
    nll: Sequence[np.ndarray], weight: np.ndarray | None = None, best: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return how far each candidate is behind one of them, on average, and the standard error.

    Examples are compared in pairs: only the spread of their differences counts.

    Args:
        nll: of each candidate, (examples,), or another score that is better if it is lower.
        weight: how often each example counts, (examples,); None is once.
        best: the index of the candidate to compare with; None takes that with the lowest mean.

    Returns:
        The mean differences (candidates,) and their standard errors (candidates,).
    """
    scores = np.stack(nll)
    count = np.float64(scores.shape[1])
    if weight is not None:
        count = np.float64(weight.sum())
    if best is None:
        means = np.average(scores, axis=1, weights=weight)
        best = int(np.argmin(means))
    difference = scores - scores[best]
    mean = np.average(difference, axis=1, weights=weight)
    squares = np.square(difference - mean[:, None])
    variance = np.average(squares, axis=1, weights=weight)
    return mean, np.sqrt(variance / (count - 1))


def predict(
    trial: Trial, output: Likelihood, examples: Examples, parameters: Sequence[Any]
) -> list[np.ndarray]:
    """Return a trial's predictions with each of the parameters, a block of examples at a time.

    Args:
        trial: what draws, in its best state.
        output: what the network's outputs mean.
        examples: those to predict.
        parameters: as `output.fit` returns them.

    Returns:
        For each parameter the prediction, (examples, ...).
    """
    size = max(1, _BLOCK // (trial.engine.samples * output.width))
    blocks = []
    for batch in examples.batches(size):
        raw = trial.engine.draw(trial.best, batch.x)
        blocks.append([output.predict(raw, parameter) for parameter in parameters])
    return [np.concatenate(parts) for parts in zip(*blocks, strict=True)]
