"""The Gaussian of the largest ELBO, by natural gradients.

In coordinates where q is N(0, 1), the precision becomes 1 - rate * (1 + E[g eps']), with g the
gradient of the log-density at the draw eps (arXiv 2002.10060, 2107.04562).
"""

from typing import Any, NamedTuple

import keras
import numpy as np

from tfp_ibnn.weights.density import Density
from tfp_ibnn.weights.vectors import balanced, triangular
from tfp_ibnn.weights.whitening import colored

_PAIRS_OF_DIAGONAL = 32
_MOST_PAIRS = 512


class _Full(NamedTuple):
    """q = N(loc, F F'), with a matrix F."""

    loc: np.ndarray
    factor: np.ndarray

    def stepped(self, eps: np.ndarray, slopes: np.ndarray, rate: float) -> tuple["_Full", float]:
        """Return q after a step, and the length of the step of the mean, in white coordinates."""
        white_slopes = slopes @ self.factor
        excess = (white_slopes + eps).T @ eps / len(eps)
        excess = rate * (excess + excess.T) / 2
        root = root_of_precision(np.eye(len(self.loc)) - excess, excess)
        shift = _limited(np.linalg.solve(root, white_slopes.mean(axis=0)), rate)
        factor = np.linalg.solve(root, self.factor.T).T
        return _Full(self.loc + factor @ shift, factor), float(np.linalg.norm(shift))


class _Diagonal(NamedTuple):
    """q = N(loc, diag(factor^2))."""

    loc: np.ndarray
    factor: np.ndarray

    def stepped(
        self, eps: np.ndarray, slopes: np.ndarray, rate: float
    ) -> tuple["_Diagonal", float]:
        """Return q after a step, and the length of the step of the mean, in white coordinates."""
        white_slopes = slopes * self.factor
        excess = rate * np.mean((white_slopes + eps) * eps, axis=0)
        # The precision is exp(-excess) up to the second order, and so always positive.
        root = np.sqrt(1 - excess + excess**2 / 2)
        shift = _limited(white_slopes.mean(axis=0) / root, rate)
        factor = self.factor / root
        return _Diagonal(self.loc + factor * shift, factor), float(np.linalg.norm(shift))


def natural_gradients(
    target: Density, full: bool, steps: int, rng: np.random.Generator, verbose: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Fit a Gaussian q to a density.

    Args:
        target: the density; q starts at its mode, at a tenth of `prior_scale`.
        full: whether q has a full covariance, or else a diagonal one.
        steps: number of steps.
        rng: source of the draws.
        verbose: 0 shows no progress.

    Returns:
        The mean (size,), and the lower triangular factor of the covariance (size, size) or the
        standard deviations (size,).

    Raises:
        ValueError: if a gradient is not finite.
    """
    size = target.size
    pairs = int(np.clip(1.25 * size, 32, _MOST_PAIRS)) if full else _PAIRS_OF_DIAGONAL
    # With fewer pairs than weights the noise of a step has eigenvalues up to this.
    most = 0.5 / max(1.0, (size / pairs) ** 0.5) ** 2
    scale = 0.1 * target.prior_scale
    if full:
        q = _Full(target.mode(), scale * np.eye(size))
    else:
        q = _Diagonal(target.mode(), scale * np.ones(size))
    bar = keras.utils.Progbar(steps, verbose=1 if verbose == "auto" else verbose)
    for step in range(steps):
        # Constant at first; then such that all later steps count alike in the result.
        rate = most / (1 + most * max(0.0, step - 0.4 * steps))
        eps = balanced(rng, pairs, size)
        slopes = target.gradients(colored(eps, q.loc, q.factor))
        if not np.isfinite(slopes).all():
            raise ValueError(
                f"The gradient became NaN or infinite at step {step + 1}: give a smaller "
                "`prior_scale`, or scale `x`."
            )
        q, length = q.stepped(eps, slopes, rate)
        bar.update(step + 1, [("step", length)])
    factor = triangular(q.factor) if full else q.factor
    return q.loc, factor


def root_of_precision(precision: np.ndarray, excess: np.ndarray) -> np.ndarray:
    """Return a root of the new precision, made definite where noise has made it indefinite.

    Args:
        precision: the new precision, 1 - excess.
        excess: by how much it falls, symmetric.

    Returns:
        A matrix R with R R' = `precision`, or else R R' = 1 - excess + excess^2 / 2, which is
        positive definite for any excess.
    """
    try:
        return np.linalg.cholesky(precision)
    except np.linalg.LinAlgError:
        values, vectors = np.linalg.eigh(excess)
        return vectors * np.sqrt(1 - values + values**2 / 2)


def _limited(shift: np.ndarray, rate: float) -> np.ndarray:
    """Return a step of the mean, not longer than q is wide."""
    length = max(np.linalg.norm(shift), 1e-30)
    return shift * (rate * min(1.0, len(shift) ** 0.5 / length))
