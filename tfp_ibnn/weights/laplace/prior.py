"""The prior precision that suits predictions, by their NLL."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from keras import ops

from tfp_ibnn.data.examples import labelled_batches
from tfp_ibnn.layers.heads import gaussian_nll
from tfp_ibnn.prediction.monte_carlo import MonteCarlo
from tfp_ibnn.weights.features import LogitNetwork, joined
from tfp_ibnn.weights.laplace.guard import MARGIN, Reservoir, guarded

GRID = np.logspace(-4, 4, 21)
"""The prior precisions that are compared on validation data."""

_DRAWS = 32


class PredictionLoss:
    """The NLL of predictions for some examples, in nats per example.

    Args:
        posterior: a Laplace approximation; its prior precision is assigned by `at`.
        x: inputs.
        y: targets, as the likelihood takes them.
        batch_size: examples at a time.
        head: what the output means, as for `MonteCarlo`.
        from_logits: whether it is logits, as for `MonteCarlo`.
    """

    def __init__(
        self,
        posterior: Any,
        x: Any,
        y: np.ndarray,
        batch_size: int,
        head: str | None,
        from_logits: bool | None,
    ) -> None:
        self._posterior = posterior
        self._x = x
        self._y = y
        self._batch_size = batch_size
        self._head = head
        self._from_logits = from_logits
        self._averaged = self._monte_carlo(posterior, _DRAWS)

    def at(self, prior_precision: float) -> float:
        """Return the NLL of averaged predictions at a prior precision, which stays assigned."""
        self._posterior.prior_precision.assign(prior_precision)
        return self._nll(self._averaged)

    def of_network(self) -> float:
        """Return the NLL of the network at the trained weights."""
        return self._nll(self._monte_carlo(self._posterior.network, 1))

    def _monte_carlo(self, model: Any, samples: int) -> MonteCarlo:
        head = {"head": self._head, "from_logits": self._from_logits}
        return MonteCarlo(model, samples=samples, seed=0, **head)

    def _nll(self, averaged: MonteCarlo) -> float:
        predictions = averaged.predict(self._x, batch_size=self._batch_size, verbose=0)
        if self._posterior.logit_network.likelihood.free_scale:
            noise_variance = float(self._posterior.noise_scale) ** 2
            variance = predictions["total_variance"] + noise_variance
            loss = gaussian_nll(self._y, predictions["mean"], variance)
        else:
            loss = averaged.compute_loss(y=self._y, y_pred=predictions)
        return float(ops.mean(loss))


def best_of_grid(
    posterior: Any, data: Any, batch_size: int, head: str | None, from_logits: bool | None
) -> float:
    """Return the prior precision of `GRID` with the least NLL on validation data.

    Args:
        posterior: a Laplace approximation; another prior precision is assigned to it.
        data: (x, y), or a dataset of such batches.
        batch_size: examples at a time.
        head: what the output means, as for `MonteCarlo`.
        from_logits: whether it is logits, as for `MonteCarlo`.

    Returns:
        A prior precision.
    """
    network = posterior.logit_network
    x, y = joined(list(_validation_batches(network, data, batch_size)))
    loss = PredictionLoss(
        posterior,
        x,
        y,
        batch_size,
        head=head,
        from_logits=from_logits,
    )
    losses = [loss.at(prior_precision) for prior_precision in GRID]
    best = np.argmin(losses)
    return GRID[best]


def narrowed(
    posterior: Any,
    sample: Reservoir,
    validation_data: Any,
    batch_size: int,
    head: str | None,
    from_logits: bool | None,
) -> float:
    """Return the least prior precision, from the present one on, that costs at most `MARGIN`.

    Args:
        posterior: a Laplace approximation; another prior precision is assigned to it.
        sample: examples of the training data.
        validation_data: (x, y) or a dataset of such batches, to be taken instead; or None.
        batch_size: examples at a time.
        head: what the output means, as for `MonteCarlo`.
        from_logits: whether it is logits, as for `MonteCarlo`.

    Returns:
        A prior precision.
    """
    if validation_data is not None:
        sample = Reservoir()
        network = posterior.logit_network
        for inputs, targets in _validation_batches(network, validation_data, batch_size):
            sample.add(inputs, targets)
    x, y = sample.examples()
    loss = PredictionLoss(
        posterior,
        x,
        y,
        batch_size,
        head=head,
        from_logits=from_logits,
    )
    limit = loss.of_network() + MARGIN
    return guarded(float(posterior.prior_precision), loss.at, limit)


def _validation_batches(
    network: LogitNetwork, data: Any, batch_size: int
) -> Iterator[tuple[Any, np.ndarray]]:
    """Yield inputs and targets of each batch, the latter as the likelihood takes them."""
    if data is None:
        raise ValueError("`validation_data` is missing: give (x, y) or a dataset.")
    x, y = data if isinstance(data, (tuple, list)) else (data, None)
    for inputs, labels in labelled_batches(x, y, batch_size):
        yield inputs, network.likelihood.targets(labels)
