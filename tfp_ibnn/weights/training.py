"""Adam on a few variables, on both backends."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.backend import Tensor, gradient


def ascend(
    variables: Sequence[keras.Variable],
    objective: Callable[..., Tensor],
    batch: Callable[[], tuple[Any, ...]],
    steps: int,
    learning_rate: float,
    *,
    reads: Sequence[keras.Variable] = (),
    score: Callable[[], float] | None = None,
    patience: int = 5,
    verbose: Any = 0,
) -> list[float]:
    """Maximise an objective by Adam with a cosine decay; return the scores on the way.

    Args:
        variables: what is trained.
        objective: a scalar function of what `batch` gives; it reads the variables.
        batch: returns new arguments for each step.
        steps: how many.
        learning_rate: the first one; the last is 0.
        reads: other variables that the objective reads.
        score: is asked at the start and 20 times on the way. The variables end where it was
            highest, and training ends early once it has not risen `patience` times.
        patience: see `score`; 0 for never.
        verbose: 0 shows no progress.
    """

    def placed(values: list[Tensor], *args: Tensor) -> Tensor:
        with keras_internals.values_in_place(zip(variables, values, strict=True)):
            return objective(*args)

    def give(values: Sequence[np.ndarray]) -> None:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    slope = gradient(placed, list(reads))
    values = best = [ops.convert_to_numpy(v.value) for v in variables]
    first = second = [np.zeros_like(value) for value in values]
    scores, every = [] if score is None else [score()], max(1, steps // 20)
    bar = keras.utils.Progbar(steps, verbose=1 if verbose == "auto" else verbose)
    for step in range(1, steps + 1):
        rate = learning_rate * (1 + math.cos(math.pi * step / steps)) / 2
        rate *= math.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        slopes = [ops.convert_to_numpy(x) for x in slope(values, *batch())]
        if not all(np.isfinite(x).all() for x in slopes):
            raise ValueError(f"The gradient became NaN or infinite at step {step}.")
        first = [0.9 * m + 0.1 * g for m, g in zip(first, slopes, strict=True)]
        second = [0.999 * v + 0.001 * g * g for v, g in zip(second, slopes, strict=True)]
        moments = zip(values, first, second, strict=True)
        values = [(x + rate * m / (np.sqrt(v) + 1e-8)).astype(x.dtype) for x, m, v in moments]
        bar.update(step)
        if score is not None and (step % every == 0 or step == steps):
            give(values)
            scores.append(score())
            since = len(scores) - 1 - int(np.argmax(np.nan_to_num(scores, nan=-np.inf)))
            best = best if since else values
            if patience and since >= patience:
                break
    give(values if score is None else best)
    return scores


def mirrored(rng: np.random.Generator, pairs: int, size: int) -> np.ndarray:
    """Return normal draws (2 * pairs, size) of which half are the other half's negatives."""
    half = rng.standard_normal((pairs, size))
    return np.concatenate([half, -half])
