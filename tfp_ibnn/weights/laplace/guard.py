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
from tfp_ibnn.weights.flat import split

EXAMPLES = 512
"""How many examples are kept."""

MARGIN = 0.01
"""By how many nats per example averaged predictions may explain them worse than the network."""

_HALF_DECADES = 16


class Reservoir:
    """At most `size` examples of all that are added, each as likely as any other."""

    def __init__(self, size: int = EXAMPLES) -> None:
        self._size = size
        self._rng = np.random.default_rng(0)
        self._kept: list[tuple[float, int, Any]] = []  # a heap: the largest key comes first
        self._count = 0

    def add(self, inputs: Any, targets: np.ndarray) -> None:
        """Add a batch."""
        for row, key in enumerate(self._rng.random(len(targets))):
            self._count += 1
            is_full = len(self._kept) == self._size
            if is_full and key > -self._kept[0][0]:
                continue
            example = keras.tree.map_structure(
                lambda a, i=row: a[i : i + 1].copy(), (inputs, targets)
            )
            replace = heapq.heapreplace if is_full else heapq.heappush
            replace(self._kept, (-key, self._count, example))

    def examples(self) -> tuple[Any, np.ndarray]:
        """Return inputs and targets."""
        examples = [example for _, _, example in self._kept]
        return keras.tree.map_structure(lambda *rows: np.concatenate(rows), *examples)


def guarded(prior_precision: float, loss: Callable[[float], float], limit: float) -> float:
    """Return a prior precision, or the next larger half decade with a loss of at most `limit`.

    The loss is taken to fall with the precision, and to reach the limit within eight decades.
    """
    if loss(prior_precision) <= limit:
        return prior_precision
    too_small, enough = 0, _HALF_DECADES
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        if loss(prior_precision * 10 ** (middle / 2)) <= limit:
            enough = middle
        else:
            too_small = middle
    return prior_precision * 10 ** (enough / 2)


def gain_along(step: Tensor, posterior: Any, sample: Reservoir, batch_size: int) -> float:
    """Return the most that a step of the weights, its half, quarter and so on adds, at least 0.

    In nats per example of the sample.
    """
    parts = [0 * step, *(step / 2**i for i in range(8))]
    found = [_log_likelihood(part, posterior, sample, batch_size) for part in parts]
    return max(found) - found[0]


def _log_likelihood(step: Tensor, posterior: Any, sample: Reservoir, batch_size: int) -> float:
    """Return the mean log-likelihood of a sample after a step of the weights."""
    network, total = posterior.logit_network, 0.0
    x, y = sample.examples()
    values = split(posterior.center() + step, posterior.sampled)
    with values_in_place(zip(posterior.sampled, values, strict=True)):
        for inputs, targets in labelled_batches(x, y, batch_size):
            logits = network.logits(network.prefix(inputs))
            total += float(ops.sum(network.likelihood.log_prob(logits, targets)))
    return total / len(y) / float(posterior.noise_scale) ** 2
