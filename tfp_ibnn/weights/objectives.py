"""What the flows of a refined posterior are trained by: the ELBO, or given samples."""

import math
from typing import Any, NamedTuple, Protocol

import numpy as np
from keras import ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.backend import Tensor, compiled, mean
from tfp_ibnn.data.datasets import is_dataset
from tfp_ibnn.weights.refinement import RefinedPosterior
from tfp_ibnn.weights.target import Target
from tfp_ibnn.weights.vectors import mirrored

_PATIENCE = 5
_LARGER = 8
"""How many times as many draws and examples as in a step decide which check is best."""


class Objective(Protocol):
    """What is maximized by gradients, and the score that decides which check is best."""

    patience: int  # end after so many checks without a better one; 0 never

    def batch(self) -> tuple[Any, ...]:
        """Return the arguments of `value` for a step."""

    def value(self, *batch: Any) -> Tensor:
        """Return what is maximized."""

    def score(self) -> float:
        """Return how good the posterior is now, in nats; higher is better."""


class SamplesObjective:
    """The mean log-density of given draws; a tenth of them, held out, is the score.

    Args:
        refined: the posterior that is trained.
        samples: draws (n, size).
        draws: how many of them a step takes, at least 64.
        rng: source of the choice.
    """

    patience = _PATIENCE

    def __init__(
        self,
        refined: RefinedPosterior,
        samples: np.ndarray,
        draws: int,
        rng: np.random.Generator,
    ) -> None:
        self._refined = refined
        self._draws = max(draws, 64)
        self._rng = rng
        shuffled = rng.permutation(samples).astype(refined.variable_dtype)
        tenth = len(samples) // 10
        self._held_out = shuffled[:tenth]
        self._training = shuffled[tenth:]
        self._score = compiled(self.value, refined.weights)

    def batch(self) -> tuple[np.ndarray]:
        """Return some of the draws."""
        rows = self._rng.integers(0, len(self._training), self._draws)
        return (self._training[rows],)

    def value(self, w: Tensor) -> Tensor:
        """Return the mean log-density of draws."""
        return mean(self._refined.log_prob(w))

    def score(self) -> float:
        """Return that of the draws held out."""
        return float(self._score(self._held_out))


class Sizes(NamedTuple):
    """How much a step of the ELBO takes."""

    draws: int  # of the weights, rounded up to pairs
    examples: int | None  # None takes all

    def times(self, factor: int) -> "Sizes":
        """Return sizes that are larger by a factor."""
        examples = self.examples
        if examples is not None:
            examples *= factor
        return Sizes(factor * self.draws, examples)


class ElboObjective:
    """The ELBO; the score is that of fixed draws, or the log-likelihood of validation data.

    Args:
        refined: the posterior that is trained.
        target: log p(y | x, w) + log p(w).
        sizes: of each step.
        path_gradients: see `elbo`.
        validation: (x, y), or a dataset of such batches, for the score; None takes the ELBO.
        rng: source of the draws.
    """

    def __init__(
        self,
        refined: RefinedPosterior,
        target: Target,
        sizes: Sizes,
        *,
        path_gradients: bool,
        validation: Any,
        rng: np.random.Generator,
    ) -> None:
        self._refined = refined
        self._target = target
        self._sizes = sizes
        self._path_gradients = path_gradients
        self._rng = rng
        fixed = self._batch_of(sizes.times(_LARGER))
        score = self.value
        self.patience = 0
        if validation is not None:
            x, y = (validation, None) if is_dataset(validation) else validation
            fixed = (fixed[0], *target.prepared(x, y, verbose=0))
            score = self._log_likelihood
            self.patience = _PATIENCE
        self._fixed = fixed
        self._score = compiled(score, refined.weights)

    def batch(self) -> tuple[Any, ...]:
        """Return noise, the scale of the likelihood, and examples."""
        return self._batch_of(self._sizes)

    def value(self, eps: Tensor, scale: Tensor, *data: Tensor) -> Tensor:
        """Return the ELBO of draws from noise.

        Args:
            eps: standard normal rows (S, size).
            scale: number of all examples over those given.
            *data: inputs and targets, as the target caches them.
        """
        return elbo(self._refined, self._target, self._path_gradients, eps, scale, *data)

    def score(self) -> float:
        """Return the ELBO of fixed draws, or the log-likelihood of the validation data."""
        return float(self._score(*self._fixed))

    def _batch_of(self, sizes: Sizes) -> tuple[Any, ...]:
        target = self._target
        pairs = (sizes.draws + 1) // 2
        eps = mirrored(self._rng, pairs, self._refined.size)
        part = target.part(sizes.examples, self._rng)
        return eps.astype(target.dtype), *part

    def _log_likelihood(self, eps: Tensor, *data: Tensor) -> Tensor:
        """Return the mean log-likelihood of examples under the average network."""
        draws = eps.shape[0]
        w, _ = self._refined.transform(eps)
        of_each = self._target.log_likelihoods(w, *data)
        sums = ops.logsumexp(of_each, axis=0)
        return mean(sums) - math.log(draws)


def elbo(
    refined: RefinedPosterior,
    target: Target,
    path_gradients: bool,
    eps: Tensor,
    scale: float | Tensor,
    *data: Any,
) -> Tensor:
    """Return the ELBO, E_q[log p(y | x, w) + log p(w) - log q(w)], over draws.

    Args:
        refined: q.
        target: log p(y | x, w) + log p(w).
        path_gradients: leave out the part of the gradient that is 0 on average.
        eps: standard normal rows (S, size), one per draw.
        scale: number of all examples over those given.
        *data: inputs and targets, as `target` caches them.

    Returns:
        A scalar, in nats.
    """
    w, log_q = refined.transform(eps)
    if path_gradients:
        # log q by constant flows: what depends on the flows directly has the mean gradient 0.
        constants = [(v, ops.stop_gradient(ops.convert_to_tensor(v))) for v in refined.trained]
        with keras_internals.values_in_place(constants):
            log_q = refined.log_prob(w)
    log_p = target.log_prob(w, *data, scale)
    return mean(log_p - log_q)
