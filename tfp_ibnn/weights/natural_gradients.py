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

_FEWEST_PAIRS = 32
_MOST_PAIRS = 512


class _Full(NamedTuple):
    """q = N(loc, F F'), with a matrix F."""

    loc: np.ndarray
    factor: np.ndarray
    length: float = 0.0  # of the last step of the mean, in white coordinates

    def stepped(self, eps: np.ndarray, slopes: np.ndarray, rate: float) -> "_Full":
        """Return q after a step by the gradients at its draws from noise."""
        white_slopes = slopes @ self.factor
        products = (white_slopes + eps).T @ eps / len(eps)
        symmetric = (products + products.T) / 2
        excess = rate * symmetric
        identity = np.eye(len(self.loc))
        root = root_of_precision(identity - excess, excess)
        mean_slope = white_slopes.mean(axis=0)
        shift = _limited(np.linalg.solve(root, mean_slope), rate)
        factor = np.linalg.solve(root, self.factor.T).T
        loc = self.loc + factor @ shift
        length = np.linalg.norm(shift)
        return _Full(loc, factor, float(length))


class _Diagonal(NamedTuple):
    """q = N(loc, diag(factor^2))."""

    loc: np.ndarray
    factor: np.ndarray
    length: float = 0.0  # of the last step of the mean, in white coordinates

    def stepped(self, eps: np.ndarray, slopes: np.ndarray, rate: float) -> "_Diagonal":
        """Return q after a step by the gradients at its draws from noise."""
        white_slopes = slopes * self.factor
        products = (white_slopes + eps) * eps
        excess = rate * np.mean(products, axis=0)
        # The precision is exp(-excess) up to the second order, and so always positive.
        root = np.sqrt(1 - excess + excess**2 / 2)
        mean_slope = white_slopes.mean(axis=0)
        shift = _limited(mean_slope / root, rate)
        factor = self.factor / root
        loc = self.loc + factor * shift
        return _Diagonal(loc, factor, float(np.linalg.norm(shift)))


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
    scale = 0.1 * target.prior_scale
    q: _Full | _Diagonal
    if full:
        pairs = int(np.clip(1.25 * size, _FEWEST_PAIRS, _MOST_PAIRS))
        q = _Full(target.mode(), scale * np.eye(size))
    else:
        pairs = _FEWEST_PAIRS
        q = _Diagonal(target.mode(), scale * np.ones(size))
    # With fewer pairs than weights the noise of a step has eigenvalues up to size / pairs.
    most = 0.5 / max(1.0, (size / pairs) ** 0.5) ** 2
    bar = keras.utils.Progbar(steps, verbose=1 if verbose == "auto" else verbose)
    for step in range(steps):
        # Constant at first; then such that all later steps count alike in the result.
        steps_of_decay = max(0.0, step - 0.4 * steps)
        rate = most / (1 + most * steps_of_decay)
        eps = balanced(rng, pairs, size)
        slopes = target.gradients(colored(eps, q.loc, q.factor))
        if not np.isfinite(slopes).all():
            raise ValueError(
                f"The gradient became NaN or infinite at step {step + 1}: give a smaller "
                "`prior_scale`, or scale `x`."
            )
        q = q.stepped(eps, slopes, rate)
        bar.update(step + 1, [("step", q.length)])
    if full:
        return q.loc, triangular(q.factor)
    return q.loc, q.factor


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
    width = len(shift) ** 0.5
    return shift * (rate * min(1.0, width / length))
