"""Adam, to fit a distribution to a density: the state is one vector in NumPy."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor, gradient
from tfp_ibnn._core.keras_internals import values_in_place
from tfp_ibnn.weights.vectors import flat, split

_CHECKS = 20


class _Adam(NamedTuple):
    """What Adam keeps between two steps: the vector, and means of gradients and their squares."""

    vector: np.ndarray
    slope: np.ndarray
    square: np.ndarray

    def step(self, slopes: np.ndarray, rate: float) -> "_Adam":
        """Return the state after a step uphill."""
        dtype = self.vector.dtype
        slope = 0.9 * self.slope + 0.1 * slopes
        square = 0.999 * self.square + 0.001 * slopes**2
        divisor = np.sqrt(square) + 1e-8
        vector = self.vector + rate * slope / divisor
        return _Adam(vector.astype(dtype), slope, square)


def ascend(
    variables: Sequence[keras.Variable],
    objective: Callable[..., Tensor],
    batch: Callable[[], tuple[Any, ...]],
    steps: int,
    learning_rate: float,
    *,
    reads: Sequence[keras.Variable] = (),
    score: Callable[[], float] | None = None,
    patience: int = 0,
    verbose: Any = 0,
) -> list[float]:
    """Maximize an objective by Adam with a cosine decay.

    With a `score` the variables end where it was highest, else where the last step led.

    Args:
        variables: what is trained; they are assigned at each check and at the end.
        objective: a scalar function of what `batch` returns; it reads the variables and `reads`.
        batch: returns the arguments of `objective`, at each step anew.
        steps: number of steps, at most.
        learning_rate: of the first step; the last one's is 0.
        reads: further variables that the objective reads, of which JAX must know.
        score: asked at the start and 20 times on the way.
        patience: end early once so many checks in a row were not better; 0, the default, never.
        verbose: 0 shows no progress.

    Returns:
        The scores on the way; an empty list without `score`.

    Raises:
        ValueError: if the gradient is not finite.
    """

    def objective_at(vector: Tensor, *args: Tensor) -> Tensor:
        values = split(vector, variables)
        with values_in_place(zip(variables, values, strict=True)):
            return objective(*args)

    def assign(vector: np.ndarray) -> None:
        for variable, value in zip(variables, split(vector, variables), strict=True):
            variable.assign(value)

    slopes_at = gradient(objective_at, list(reads))
    start = flat(variables)
    adam = _Adam(start, np.zeros_like(start), np.zeros_like(start))
    best = start
    scores = [] if score is None else [score()]
    interval = max(1, steps // _CHECKS)
    bar = keras.utils.Progbar(steps, verbose=1 if verbose == "auto" else verbose)
    for step in range(1, steps + 1):
        slopes = ops.convert_to_numpy(slopes_at(adam.vector, *batch()))
        if not np.isfinite(slopes).all():
            raise ValueError(f"The gradient became NaN or infinite at step {step}.")
        adam = adam.step(slopes, _rate(learning_rate, step, steps))
        bar.update(step)
        if score is None or (step % interval and step != steps):
            continue
        assign(adam.vector)
        scores.append(score())
        checks_since_best = _checks_since_best(scores)
        if not checks_since_best:
            best = adam.vector
        if patience and checks_since_best >= patience:
            break
    assign(adam.vector if score is None else best)
    return scores


def _rate(learning_rate: float, step: int, steps: int) -> float:
    """Return the rate of a step, counted from 1: a cosine decay, with Adam's bias correction."""
    cosine = math.cos(math.pi * step / steps)
    rate = learning_rate * (1 + cosine) / 2
    rate *= math.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    return rate


def _checks_since_best(scores: list[float]) -> int:
    """Return how many scores came after the highest one; NaN is lower than all."""
    comparable = np.nan_to_num(scores, nan=-np.inf)
    best = int(np.argmax(comparable))
    last = len(scores) - 1
    return last - best
