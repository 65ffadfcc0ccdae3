"""How wide a posterior may be, by examples that are kept from the pass over the data."""

import heapq
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.keras_internals import values_in_place
from tfp_ibnn.data.examples import labelled_batches
from tfp_ibnn.weights.features import joined
from tfp_ibnn.weights.vectors import split

EXAMPLES = 512
"""How many examples are kept."""

MARGIN = 0.01
"""By how many nats per example averaged predictions may explain them worse than the network."""

FAR = 0.3
"""By how many nats per example a step may raise the log-likelihood of a trained network."""

_HALF_DECADES = 16
_HALVINGS = 8


class Reservoir:
    """A random sample of all examples that are added, each as likely as any other.

    Each example draws a number, and those of the smallest numbers are kept.

    Args:
        size: how many are kept, at most.
    """

    def __init__(self, size: int = EXAMPLES) -> None:
        self._size = size
        self._rng = np.random.default_rng(0)
        self._kept: list[tuple[float, int, Any]] = []  # a heap: the largest number comes first
        self._count = 0

    def add(self, inputs: Any, targets: np.ndarray) -> None:
        """Add a batch.

        Args:
            inputs: its inputs, an array or a nested structure of them.
            targets: its targets.
        """
        for row, number in enumerate(self._rng.random(len(targets))):
            self._count += 1
            is_full = len(self._kept) == self._size
            if is_full and number > -self._kept[0][0]:
                continue
            example = _row((inputs, targets), row)
            entry = (-number, self._count, example)
            if is_full:
                heapq.heapreplace(self._kept, entry)
            else:
                heapq.heappush(self._kept, entry)

    def examples(self) -> tuple[Any, np.ndarray]:
        """Return inputs and targets."""
        examples = [example for _, _, example in self._kept]
        return joined(examples)


def _row(batch: Any, row: int) -> Any:
    """Return a copy of one example, as a batch."""
    place = slice(row, row + 1)
    return keras.tree.map_structure(lambda a: a[place].copy(), batch)


def guarded(prior_precision: float, loss: Callable[[float], float], limit: float) -> float:
    """Return a prior precision, or the next larger half decade that costs little enough.

    Args:
        prior_precision: the smallest one.
        loss: a function of the precision, taken to fall, and to reach the limit within eight
            decades.
        limit: the largest loss.

    Returns:
        A prior precision.
    """
    if loss(prior_precision) <= limit:
        return prior_precision
    too_small = 0
    enough = _HALF_DECADES
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        if loss(prior_precision * 10 ** (middle / 2)) <= limit:
            enough = middle
        else:
            too_small = middle
    return prior_precision * 10 ** (enough / 2)


def newton_gain(
    posterior: Any, gradient: np.ndarray, examples: int, sample: Reservoir, batch_size: int
) -> float:
    """Return by how much a Newton step of the weights, or a part of it, helps the network.

    Args:
        posterior: a Laplace approximation.
        gradient: that of the log-likelihood of all examples, (W,), by the temperature.
        examples: number of all examples.
        sample: some of them.
        batch_size: examples at a time.

    Returns:
        A gain of the log-likelihood in nats per example; above `FAR` that of the sample.
    """
    gradient = gradient.astype(posterior.logit_network.dtype)
    slope = ops.convert_to_tensor(gradient)
    step = posterior.structure.scaled(slope, posterior.scale)
    promised = float(ops.sum(slope * step)) / 2 / examples
    if promised <= FAR:
        return promised
    # The quadratic promises more than there is where a prediction is confident and wrong.
    return _gain_along(step, posterior, sample, batch_size)


def _gain_along(step: Tensor, posterior: Any, sample: Reservoir, batch_size: int) -> float:
    """Return the most that a step, its half, quarter and so on adds for a sample, at least 0."""
    at_start = _log_likelihood(0 * step, posterior, sample, batch_size)
    gains = [0.0]
    for halvings in range(_HALVINGS):
        part = step / 2**halvings
        gains.append(_log_likelihood(part, posterior, sample, batch_size) - at_start)
    return max(gains)


def _log_likelihood(step: Tensor, posterior: Any, sample: Reservoir, batch_size: int) -> float:
    """Return the mean log-likelihood of a sample after a step of the weights."""
    network = posterior.logit_network
    x, y = sample.examples()
    sampled = posterior.sampled
    values = split(posterior.center() + step, sampled)
    total = 0.0
    with values_in_place(zip(sampled, values, strict=True)):
        for inputs, targets in labelled_batches(x, y, batch_size):
            logits = network.logits(network.prefix(inputs))
            each = network.likelihood.log_prob(logits, targets)
            total += float(ops.sum(each))
    noise_variance = float(posterior.noise_scale) ** 2
    return total / len(y) / noise_variance
