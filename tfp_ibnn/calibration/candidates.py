"""The rows of the comparison, and the rule that chooses one of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from tfp_ibnn.calibration import costs
from tfp_ibnn.calibration.examples import Examples
from tfp_ibnn.calibration.rows import row_width
from tfp_ibnn.calibration.trials import Trial
from tfp_ibnn.likelihoods import Likelihood
from tfp_ibnn.likelihoods.class_scaling import ClassScaling

_BLOCK = 2**23
"""The largest number of raw outputs that are held at once."""
NEGLIGIBLE = 0.001
"""The smallest difference of mean NLLs that is worth any cost, in nats."""


class Cost(NamedTuple):
    """The cost of a candidate; the entries that come first matter more.

    Args:
        passes: cost of a prediction in passes of the model as it is, by multiply-adds. Layers
            before the first noise count once for all draws; a fitted temperature costs nothing.
        trainings: cost of its training, in trainings of the model as it is; 0 without any.
        megabytes: of the weights, and of everything a posterior holds; 4 bytes per float32.
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
        parameter: the temperature, or a `ClassScaling`; for regression, the scale of each output,
            or their factor.
        seconds: the time of fitting and training.
        prediction: for the validation examples it was scored on, (examples, ...).
        nll: of each of these examples, in nats.
        errors: of each of them: 0 or 1 for a classifier, the squared error for a regression.
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
        """Its cost; a fitted parameter costs nothing."""
        trial = self.trial
        return Cost(
            passes=costs.passes(trial.engine, self.unit),
            trainings=trial.trainings,
            megabytes=costs.megabytes(trial.engine.network),
        )

    @property
    def price(self) -> tuple[float, float, bool]:
        """The cost that decides: passes, trainings, and whether each class has parameters.

        Parameters of each class overfit few examples, so a temperature that is as good is
        preferred.
        """
        passes, trainings, _ = self.cost
        return passes, trainings, isinstance(self.parameter, ClassScaling)

    @property
    def shown_parameter(self) -> float | str:
        """The parameter as a table shows it: a number, or several joined by commas, or words."""
        if not isinstance(self.parameter, dict):
            return _shown(self.parameter)
        # Of several outputs.
        parts = []
        for name, parameter in self.parameter.items():
            shown = _shown(parameter)
            parts.append(f"{name} {shown:.4g}" if isinstance(shown, float) else f"{name} {shown}")
        return ", ".join(parts)


def _shown(parameter: Any) -> float | str:
    """Return a number, or several joined by commas, or words."""
    if isinstance(parameter, ClassScaling):
        return str(parameter)
    numbers = np.ravel(parameter).tolist()
    if len(numbers) == 1:
        return numbers[0]
    return ", ".join(f"{number:.4g}" for number in numbers)


class Standing(NamedTuple):
    """How a candidate compares with the others.

    Args:
        candidate: the candidate.
        nll: the mean, in nats.
        distance: how much larger that is than the lowest.
        error: the standard error of the distance.
        cost: its cost.
        is_undominated: whether no other candidate matches it in NLL, passes and trainings.
    """

    candidate: Candidate
    nll: float
    distance: float
    error: float
    cost: Cost
    is_undominated: bool


def standings(
    candidates: Sequence[Candidate],
    nll: Sequence[np.ndarray],
    weight: np.ndarray | None = None,
    groups: np.ndarray | None = None,
) -> list[Standing]:
    """Return how candidates compare on some examples.

    Args:
        candidates: those that were scored.
        nll: of each candidate, (rows,), in nats.
        weight: how often each row counts; None is once.
        groups: the example of each row, if examples have several.
    """
    costs = [candidate.cost for candidate in candidates]
    distances, errors = behind(nll, weight, groups=groups)
    kept = undominated(distances, costs)
    compared = []
    for place, candidate in enumerate(candidates):
        standing = Standing(
            candidate=candidate,
            nll=float(np.average(nll[place], weights=weight)),
            distance=float(distances[place]),
            error=float(errors[place]),
            cost=costs[place],
            is_undominated=kept[place],
        )
        compared.append(standing)
    return compared


def choose(
    nll: Sequence[np.ndarray],
    costs: Sequence[Any],
    weight: np.ndarray | None = None,
    groups: np.ndarray | None = None,
) -> int:
    """Return the cheapest candidate within one standard error of the best, or `NEGLIGIBLE`.

    Ties in cost go to the lowest NLL, even if that candidate is beyond the error. The error is that
    of the mean difference from the best, and is small for candidates that resemble the best, so the
    cheapest within it may be worse than an equally cheap one beyond it.

    Args:
        nll: of each candidate, (rows,), in nats.
        costs: of each candidate; any values that can be ordered.
        weight: how often each row counts; None is once.
        groups: the example of each row, if examples have several.

    Returns:
        The index of a candidate.
    """
    distance, error = behind(nll, weight, groups=groups)
    as_good = np.flatnonzero(distance <= np.maximum(error, NEGLIGIBLE))
    cheapest = min(costs[index] for index in as_good)
    equally_cheap = [index for index, cost in enumerate(costs) if cost == cheapest]
    return min(equally_cheap, key=lambda index: distance[index])


def behind(
    nll: Sequence[np.ndarray],
    weight: np.ndarray | None = None,
    best: int | None = None,
    groups: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return how far each candidate is behind one of them, on average, and the standard error.

    Rows are compared in pairs: only the spread of their differences counts. The rows of one
    example, such as the pixels of an image, are not independent; the error is clustered by example:

        variance = G / (G - 1) * sum_g (sum_i in g (d_i - mean))^2 / n^2

    for the differences d of n rows of G examples. An example of weight 2 counts as two.

    Args:
        nll: of each candidate, (rows,), or another score that is better if it is lower.
        weight: how often each row counts, (rows,); None is once.
        best: the index of the candidate to compare with; None takes the one with the lowest mean.
        groups: the example of each row, (rows,), any whole numbers; None if each row is one.

    Returns:
        The mean differences (candidates,) and their standard errors (candidates,).
    """
    scores = np.stack(nll)
    if weight is None:
        weight = np.ones(scores.shape[1])
    if best is None:
        means = np.average(scores, axis=1, weights=weight)
        best = int(np.argmin(means))
    difference = scores - scores[best]
    mean = np.average(difference, axis=1, weights=weight)
    residuals = difference - mean[:, None]
    return mean, np.sqrt(_variance_of_mean(residuals, weight, groups))


def _variance_of_mean(
    residuals: np.ndarray, weight: np.ndarray, groups: np.ndarray | None
) -> np.ndarray:
    """Return the variance of each candidate's weighted mean, clustered by group.

    Args:
        residuals: differences from that mean, (candidates, rows).
        weight: how often each row counts, (rows,).
        groups: the group of each row, (rows,), or None.
    """
    place = np.arange(len(weight))
    if groups is not None:
        _, place = np.unique(groups, return_inverse=True)
    # A group counts as often as its rows do on average; rows of weight 0, of padding, do not count.
    rows = np.bincount(place, weight > 0)
    total = np.bincount(place, weight)
    times = total / np.maximum(rows, 1)
    divisor = np.where(times > 0, times, 1)
    squares = np.zeros(len(residuals))
    for number, row in enumerate(residuals):
        sums = np.bincount(place, weight * row)
        squares[number] = np.sum(np.square(sums) / divisor)
    count = times.sum()
    correction = count / (count - 1)
    return correction * squares / np.square(weight.sum())


def undominated(scores: Sequence[float], costs: Sequence[Cost]) -> list[bool]:
    """Return for each candidate whether no other is as good and as cheap.

    Args:
        scores: of each candidate; lower is better.
        costs: of each candidate; passes and trainings count.

    Returns:
        False for those that another one matches in score, passes and trainings, and beats in one.
    """
    rows = [(score, *cost[:2]) for score, cost in zip(scores, costs, strict=True)]
    points = np.array(rows)
    kept = []
    for point in points:
        is_matched = np.all(points <= point, axis=1)
        is_beaten = np.any(points < point, axis=1)
        kept.append(not np.any(is_matched & is_beaten))
    return kept


def predict(
    trial: Trial, output: Likelihood, examples: Examples, parameters: Sequence[Any]
) -> list[np.ndarray]:
    """Return a trial's predictions with each of the parameters, a block of examples at a time.

    Args:
        trial: the trial that draws, in its best state.
        output: what the network's outputs mean.
        examples: those to predict.
        parameters: as `output.fit` returns them.

    Returns:
        For each parameter the prediction, (examples, ...).
    """
    size = max(1, _BLOCK // (trial.engine.samples * row_width(output)))
    blocks = []
    for batch in examples.batches(size):
        raw = trial.engine.draw(trial.best, batch.x)
        blocks.append([output.predict(raw, parameter) for parameter in parameters])
    return [np.concatenate(parts) for parts in zip(*blocks, strict=True)]
