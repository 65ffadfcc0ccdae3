"""How far a posterior is from the true one: bounds of the evidence, distances, calibration."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np
from scipy.spatial.distance import cdist, pdist
from scipy.special import logsumexp
from scipy.stats import chisquare

from tfp_ibnn._core import checks
from tfp_ibnn._core.extras import needs
from tfp_ibnn.diagnostics.targets import PosteriorDensity

_SIMULATED_DRAWS = 99  # which give ranks from 0 to 99
_RANKS_PER_BIN = 10


class Estimate(NamedTuple):
    """A number with its standard error; prints with a 95 % margin.

    Attributes:
        value: the number.
        error: its standard error.
    """

    value: float
    error: float

    @classmethod
    def of_mean(cls, values: np.ndarray) -> Self:
        """Return the mean of independent values (N,)."""
        deviation = values.std(ddof=1)
        error = deviation / math.sqrt(len(values))
        return cls(float(values.mean()), float(error))

    def __str__(self) -> str:
        return f"{self.value:.4g} ± {1.96 * self.error:.2g}"


def log_weights(posterior: Any, target: Any, draws: int = 4096, seed: int = 0) -> np.ndarray:
    """Return log p(y, w) - log q(w) at draws w of q; no flow is inverted.

    Args:
        posterior: a model with stochastic layers, for the z of all; a posterior over weights that
            has a `distribution`; or a `tfd.Distribution` over vectors.
        target: that of `diagnostics.hmc`, or `ibnn.GaussianVI(model).target(x, y)`, or a function
            from rows (S, size) to log p(y, w), (S,).
        draws: how many draws of q.
        seed: equal seeds give equal draws.

    Returns:
        Log-weights (draws,) in nats.

    Raises:
        ValueError: if `target` gives another shape, NaN or infinity.

    Example:
        >>> import numpy as np, tfp_ibnn as ibnn
        >>> q = ibnn.tfd.MultivariateNormalDiag(np.zeros(2), np.ones(2))
        >>> ibnn.diagnostics.log_weights(q, lambda w: -np.sum(w**2, axis=1) / 2, draws=3)
        array([1.8379, 1.8379, 1.8379])
    """
    density = PosteriorDensity(posterior)
    w, log_q = density.sample_and_log_prob(draws, seed)
    log_joint = getattr(target, "values", target)
    log_p = np.asarray(log_joint(w), "float64")
    if log_p.shape != (draws,) or not (log_p < np.inf).all():
        raise ValueError(f"`target` must give ({draws},) numbers below infinity; got {log_p!r}.")
    return log_p - log_q


def importance_bound(
    posterior: Any, target: Any, draws: int = 4096, seed: int = 0, number: int = 64
) -> Estimate:
    """Return E[log of the mean of `number` weights p / q], a lower bound of the log evidence.

    It rises with `number` from the ELBO, at 1, to the log evidence (arXiv 1509.00519).

    Args:
        posterior: as for `log_weights`.
        target: as for `log_weights`.
        draws: how many draws of q in all, at least twice `number`.
        seed: equal seeds give equal draws.
        number: how many weights each mean is taken over.

    Returns:
        The bound in nats, with its standard error.
    """
    number = checks.positive_integer("number", number)
    draws = checks.positive_integer("draws", draws, least=2 * number)
    weights = log_weights(posterior, target, draws - draws % number, seed)
    return bound_of(weights, number)


def bound_of(log_weights: np.ndarray, number: int) -> Estimate:
    """Return the bound of `importance_bound`, given the log-weights.

    Args:
        log_weights: (draws,), a multiple of `number`.
        number: how many weights each mean is taken over.

    Returns:
        The bound in nats, with its standard error.
    """
    groups = log_weights.reshape(-1, number)
    log_means = logsumexp(groups, axis=1) - math.log(number)
    return Estimate.of_mean(log_means)


def elbo(posterior: Any, target: Any, draws: int = 4096, seed: int = 0) -> Estimate:
    """Return E_q[log p(y, w) - log q(w)], a lower bound of the log evidence.

    Args:
        posterior: as for `log_weights`.
        target: as for `log_weights`.
        draws: how many draws of q.
        seed: equal seeds give equal draws.

    Returns:
        The ELBO in nats, with its standard error.

    Example:
        >>> import numpy as np, tfp_ibnn as ibnn
        >>> q = ibnn.tfd.MultivariateNormalDiag(np.zeros(2), np.ones(2))
        >>> ibnn.diagnostics.elbo(q, lambda w: -np.sum(w**2, axis=1) / 2).value  # log 2 pi
        1.8379
    """
    return importance_bound(posterior, target, draws, seed, number=1)


def k_hat(log_weights: np.ndarray) -> float:
    """Return the Pareto k of log-weights (draws,), by ArviZ; infinity if all are equal.

    Below 0.7 the weights can correct q; above, q misses a part of the posterior (1507.02646).
    """
    with needs("diagnostics"):
        try:
            from arviz_stats.base import array_stats
        except ModuleNotFoundError as error:
            if not error.name or error.name.split(".")[0] != "arviz_stats":
                raise  # it is installed, but a package that it needs is not
            from arviz import psislw  # before 1.0

            return float(psislw(np.array(log_weights, "float64"))[1])
    log_likelihoods = -np.asarray(log_weights)  # ArviZ negates what it is given
    return float(array_stats.psislw(log_likelihoods)[1])


def mmd(x: np.ndarray, y: np.ndarray, bandwidth: float | None = None) -> Estimate:
    """Return the squared maximum mean discrepancy of rows, unbiased: it may be negative.

    The kernel is exp(-|x - y|^2 / 2 h^2). The standard error, by the jackknife, is that of
    independent rows. Costs O(n^2). Reference: Gretton et al., JMLR 13, 2012.

    Args:
        x: (n, size), rows; of the longer array only the first n count.
        y: (n, size), rows to compare them with.
        bandwidth: h; None for the median distance of all rows.

    Returns:
        The squared discrepancy, 0 on average for equal distributions, with its standard error.
    """
    count = min(len(x), len(y))
    x = x[:count]
    y = y[:count]
    if bandwidth is None:
        rows = np.concatenate([x, y])
        bandwidth = np.median(pdist(rows))
    bandwidth = checks.positive("bandwidth", bandwidth)
    scale = -0.5 / bandwidth**2

    def kernel(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        squares = cdist(first, second, "sqeuclidean")
        return np.exp(scale * squares)

    across = kernel(x, y)
    within = kernel(x, x) + kernel(y, y)
    terms = within - across - across.T
    np.fill_diagonal(terms, 0.0)
    total = terms.sum()
    pairs = count * (count - 1)
    value = total / pairs
    # The jackknife: estimates without each row in turn.
    by_row = terms.sum(axis=1)
    without = total - 2 * by_row
    without /= (count - 1) * (count - 2)
    variance = (count - 1) * without.var()
    error = np.sqrt(variance)
    return Estimate(float(value), float(error))


def sliced_wasserstein(x: np.ndarray, y: np.ndarray, number: int = 128, seed: int = 0) -> float:
    """Return the root mean square 2-Wasserstein distance of rows along random directions.

    Args:
        x: (N, size), rows.
        y: (M, size), rows to compare them with.
        number: of directions.
        seed: of the directions.

    Returns:
        The distance, in the unit of the rows.
    """
    rng = np.random.default_rng(seed)
    directions = rng.standard_normal((x.shape[1], number))
    directions /= np.linalg.norm(directions, axis=0)
    count = max(len(x), len(y))
    levels = np.arange(count) + 0.5
    levels /= count
    projected = x @ directions
    of_x = _quantiles(projected, levels)
    of_y = _quantiles(y @ directions, levels)
    difference = of_x - of_y
    mean_square = np.mean(difference**2)
    return float(np.sqrt(mean_square))


def _quantiles(values: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return quantiles (levels, ...) of values (N, ...), steps that are not interpolated."""
    places = (levels * len(values)).astype(int)
    ascending = np.sort(values, axis=0)
    return ascending[places]


def total_variation(p: np.ndarray, q: np.ndarray) -> Estimate:
    """Return the mean over inputs of the total variation of predicted probabilities.

    Args:
        p: (inputs, classes), probabilities.
        q: (inputs, classes), probabilities to compare them with.

    Returns:
        The mean, from 0 to 1, with its standard error over inputs.

    Example:
        >>> import numpy as np, tfp_ibnn as ibnn
        >>> p, q = np.array([[0.9, 0.1], [0.5, 0.5]]), np.array([[0.7, 0.3], [0.5, 0.5]])
        >>> ibnn.diagnostics.total_variation(p, q).value
        0.1
    """
    p, q = _checked_classes(p, q)
    distances = np.abs(p - q).sum(axis=-1) / 2
    return Estimate.of_mean(distances)


def agreement(p: np.ndarray, q: np.ndarray) -> Estimate:
    """Return the share of inputs for which predicted probabilities name the same class.

    Args:
        p: (inputs, classes), probabilities.
        q: (inputs, classes), probabilities to compare them with.

    Returns:
        The share, from 0 to 1, with its standard error over inputs.
    """
    p, q = _checked_classes(p, q)
    is_same = p.argmax(axis=-1) == q.argmax(axis=-1)
    return Estimate.of_mean(1.0 * is_same)


def disagreement(predictions: np.ndarray) -> np.ndarray:
    """Return the total variation (S, S) between draws that predict (S, inputs, classes)."""
    count = len(predictions)
    distances = np.zeros((count, count))
    for i, j in np.ndindex(count, count):
        distances[i, j] = total_variation(predictions[i], predictions[j]).value
    return distances


def _checked_classes(p: Any, q: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities (inputs, classes) of two predictors as arrays, or raise."""
    p = np.asarray(p)
    q = np.asarray(q)
    if p.shape != q.shape or p.ndim != 2 or p.shape[1] < 2:
        raise ValueError(
            "Probabilities must be (inputs, 2 or more classes), alike; got "
            f"{p.shape} and {q.shape}."
        )
    return p, q


def simulation_based_calibration(
    simulate: Callable[..., Any], sample: Callable[..., Any], runs: int = 200, seed: int = 0
) -> tuple[np.ndarray, float]:
    """Return ranks of the truth among draws for simulated data, and a p-value.

    If the sampler is right, they are uniform on 0 to 99 (arXiv 1804.06788). The p-value is that of
    chi-squared tests in ten bins, times the number of tests, one for each coordinate. Ties are
    broken at random.

    Args:
        simulate: `simulate(rng)` returns w (size,) from the prior and data from p(y | w).
        sample: `sample(data, 99, rng)` returns as many independent draws (99, size).
        runs: how many data sets, at least 50.
        seed: of the generator `rng`.

    Returns:
        Ranks (runs, size) from 0 to 99, and the p-value: small if the sampler is wrong.

    Raises:
        ValueError: if a function returns other shapes, NaN or infinity.
    """
    rng = np.random.default_rng(seed)
    ranks = []
    runs = checks.positive_integer("runs", runs, least=50)
    for _ in range(runs):
        w, data = simulate(rng)
        draws = np.asarray(sample(data, _SIMULATED_DRAWS, rng))
        _check_simulation(w, draws)
        below = np.sum(draws < w, axis=0)
        ties = np.sum(draws == w, axis=0)
        ranks.append(below + rng.integers(0, ties, endpoint=True))
    all_ranks = np.stack(ranks)
    p_values = []
    for bins in all_ranks.T // _RANKS_PER_BIN:
        counts = np.bincount(bins, minlength=10)
        p_values.append(chisquare(counts).pvalue)
    corrected = len(p_values) * min(p_values)
    return all_ranks, float(min(1.0, corrected))


def _check_simulation(w: Any, draws: np.ndarray) -> None:
    is_vector = np.ndim(w) == 1 and np.size(w) > 0
    fits = is_vector and draws.shape == (_SIMULATED_DRAWS, len(w))
    is_finite = fits and np.isfinite(w).all() and np.isfinite(draws).all()
    if not is_finite:
        raise ValueError(
            "`simulate` and `sample` must give w (size,), size at least 1, and (99, size), all "
            f"finite; got {np.shape(w)} and {draws.shape}, or NaN or infinity."
        )
