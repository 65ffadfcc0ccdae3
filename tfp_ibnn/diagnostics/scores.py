"""How far a posterior is from the true one: bounds of the evidence, distances, calibration."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.spatial.distance import cdist, pdist
from scipy.special import logsumexp
from scipy.stats import chisquare, gaussian_kde

from tfp_ibnn._core import checks
from tfp_ibnn._core.extras import needs
from tfp_ibnn.diagnostics.targets import PosteriorDensity, rows_of


class Estimate(NamedTuple):
    """A number with its standard error; prints with a 95 % margin."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ± {1.96 * self.error:.2g}"


def log_weights(posterior: Any, target: Any, draws: int = 4096, seed: int = 0) -> np.ndarray:
    """Return log p(y, w) - log q(w), (draws,), at draws w of q; no flow is inverted.

    `posterior` is a model with stochastic layers, for the z of all; a posterior over weights that
    has a `distribution`; or a `tfd.Distribution` over vectors. `target` is that of
    `diagnostics.hmc`, or `ibnn.GaussianVI(model).target(x, y)`, or a function from rows (S, size)
    to log p(y, w), (S,).
    """
    w, log_q = PosteriorDensity(posterior).sample_and_log_prob(draws, seed)
    log_p = np.asarray(getattr(target, "values", target)(w), "float64")
    if log_p.shape != (draws,) or not (log_p < np.inf).all():
        raise ValueError(f"`target` must give ({draws},) numbers below infinity; got {log_p!r}.")
    return log_p - log_q


def importance_bound(
    posterior: Any, target: Any, draws: int = 4096, seed: int = 0, number: int = 64
) -> Estimate:
    """Return E[log of the mean of `number` weights p / q], in nats, of `draws` weights in all.

    It rises with `number` from the ELBO, at 1, to the log evidence (arXiv 1509.00519).
    """
    number = checks.positive_integer("number", number)
    draws = checks.positive_integer("draws", draws, least=2 * number)
    return _mean(log_weights(posterior, target, draws - draws % number, seed), number)


def elbo(posterior: Any, target: Any, draws: int = 4096, seed: int = 0) -> Estimate:
    """Return E_q[log p(y, w) - log q(w)], a lower bound of the log evidence, in nats.

    Example:
        >>> import numpy as np, tfp_ibnn as ibnn
        >>> q = ibnn.tfd.MultivariateNormalDiag(np.zeros(2), np.ones(2))
        >>> ibnn.diagnostics.elbo(q, lambda w: -np.sum(w**2, axis=1) / 2).value  # log 2 pi
        1.8379
    """
    return importance_bound(posterior, target, draws, seed, number=1)


def k_hat(log_weights: np.ndarray) -> float:
    """Return the Pareto k of log-weights (draws,), by ArviZ; infinity if all are alike.

    Below 0.7 the weights can correct q; above, q misses a part of the posterior (1507.02646).
    """
    with needs("diagnostics"):
        try:
            from arviz_stats.base import array_stats
        except ModuleNotFoundError as error:
            if not error.name or error.name.split(".")[0] != "arviz_stats":
                raise  # it is there, but lacks a package of its own
            from arviz import psislw  # before 1.0

            return float(psislw(np.array(log_weights, "float64"))[1])
    return float(array_stats.psislw(-np.asarray(log_weights))[1])  # it takes log-likelihoods


def mmd(x: np.ndarray, y: np.ndarray, bandwidth: float | None = None) -> Estimate:
    """Return the squared maximum mean discrepancy of rows, unbiased: it may be negative.

    The kernel is exp(-|x - y|^2 / 2 h^2), h = `bandwidth`, None for the median distance of all
    rows. Takes the first n rows of the longer array; costs O(n^2). The standard error, by the
    jackknife, is that of independent rows. Reference: Gretton et al., JMLR 13, 2012.
    """
    n = min(len(x), len(y))
    x, y = x[:n], y[:n]
    h = np.median(pdist(np.concatenate([x, y]))) if bandwidth is None else bandwidth
    scale = -0.5 / checks.positive("bandwidth", h) ** 2
    xx, yy, xy = (np.exp(scale * cdist(*pair, "sqeuclidean")) for pair in ((x, x), (y, y), (x, y)))
    each = xx + yy - xy - xy.T
    np.fill_diagonal(each, 0.0)
    without = (each.sum() - 2 * each.sum(axis=1)) / ((n - 1) * (n - 2))
    return Estimate(float(each.sum() / (n * (n - 1))), float(np.sqrt((n - 1) * without.var())))


def sliced_wasserstein(x: np.ndarray, y: np.ndarray, number: int = 128, seed: int = 0) -> float:
    """Return the root mean square 2-Wasserstein distance of rows along `number` directions."""
    ways = np.random.default_rng(seed).standard_normal((x.shape[1], number))
    ways /= np.linalg.norm(ways, axis=0)
    levels = (np.arange(max(len(x), len(y))) + 0.5) / max(len(x), len(y))
    a, b = (np.sort(z @ ways, axis=0)[(levels * len(z)).astype(int)] for z in (x, y))
    return float(np.sqrt(np.mean((a - b) ** 2)))


def total_variation(p: np.ndarray, q: np.ndarray) -> Estimate:
    """Return the mean over inputs of the total variation of probabilities (inputs, classes)."""
    return _mean(np.abs(np.subtract(*_classes(p, q))).sum(axis=-1) / 2)


def agreement(p: np.ndarray, q: np.ndarray) -> Estimate:
    """Return the share of inputs for which probabilities (inputs, classes) name the same class."""
    return _mean(1.0 * np.equal(*(x.argmax(axis=-1) for x in _classes(p, q))))


def disagreement(predictions: np.ndarray) -> np.ndarray:
    """Return the total variation (S, S) between draws that predict (S, inputs, classes)."""
    return np.array([[total_variation(p, q).value for q in predictions] for p in predictions])


def simulation_based_calibration(
    simulate: Callable[..., Any], sample: Callable[..., Any], runs: int = 200, seed: int = 0
) -> tuple[np.ndarray, float]:
    """Return ranks (runs, size) of the truth among 99 draws for simulated data, and a p-value.

    If the sampler is right, they are uniform on 0 to 99 (arXiv 1804.06788). The p-value is that of
    chi-squared tests in ten bins, times the number of tests, one for each coordinate.
    `simulate(rng)` returns w (size,) from the prior and data from p(y | w); `sample(data, 99, rng)`
    returns as many independent draws (99, size). Ties are broken at random.
    """
    rng, ranks = np.random.default_rng(seed), []
    for _ in range(checks.positive_integer("runs", runs, least=50)):
        w, data = simulate(rng)
        drawn = np.asarray(sample(data, 99, rng))
        is_bad = np.ndim(w) != 1 or not np.size(w) or drawn.shape != (99, len(w))
        if is_bad or not (np.isfinite(w).all() and np.isfinite(drawn).all()):
            wanted = "w (size,), size at least 1, and (99, size), all finite"
            got = f"{np.shape(w)} and {drawn.shape}, or NaN or infinity"
            raise ValueError(f"`simulate` and `sample` must give {wanted}; got {got}.")
        ties = rng.integers(0, np.sum(drawn == w, axis=0), endpoint=True)
        ranks.append(np.sum(drawn < w, axis=0) + ties)
    tests = [chisquare(np.bincount(x, minlength=10)).pvalue for x in np.transpose(ranks) // 10]
    return np.stack(ranks), float(min(1.0, len(tests) * min(tests)))


class Report(NamedTuple):
    """A table of scores, printed, and the rows of posterior and reference that it compares."""

    scores: dict[str, tuple[Any, Any]]
    draws: np.ndarray
    reference: np.ndarray

    def __str__(self) -> str:
        lines = {"": ("posterior", "reference"), **self.scores}
        return "\n".join(f"{name:<32}{a!s:>22}{b!s:>22}" for name, (a, b) in lines.items())

    def plot(self, count: int = 4) -> Any:
        """Draw marginals and pairs of the first coordinates; contours hold 50 and 90 % of draws."""
        with needs("plots"):
            import matplotlib.pyplot as plt

            from tfp_ibnn.plots.style import COLORS, LEGEND, LINES, line, tidy
        size, both = min(count, self.draws.shape[1]), (self.draws, self.reference)
        look = {"squeeze": False, "sharex": "col", "layout": "constrained"}
        figure, grid = plt.subplots(size, size, figsize=(1.8 * size + 0.8,) * 2, **look)
        for (j, i), ax in np.ndenumerate(grid):
            label = "density" if i == j else f"w[{j}]"
            tidy(ax).set(xlabel=f"w[{i}]", ylabel=label, visible=i <= j)
            ends = np.quantile(np.concatenate(both)[:, [i, j]], (0.001, 0.999), axis=0)
            mesh = np.meshgrid(*np.linspace(*ends, 50).T)
            for k, rows in ((1, self.reference), (0, self.draws)):
                if i == j:
                    bins = {"bins": mesh[0][0, ::2], "density": True, "histtype": "step"}
                    ax.hist(rows[:, i], label=("posterior", "reference")[k], **bins, **line(k))
                elif i < j:
                    density = gaussian_kde(rows[:1000, [i, j]].T)
                    levels = np.quantile(density(density.dataset), (0.1, 0.5))
                    heights = density(np.reshape(mesh, (2, -1))).reshape(50, 50)
                    ax.contour(*mesh, heights, levels, colors=COLORS[k], linestyles=LINES[k])
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="upper right", **LEGEND)
        return figure


def report(
    posterior: Any, reference: Any, target: Any = None, evidence: Any = None, seed: int = 0
) -> Report:
    """Compare a posterior with a reference: a table, and a figure by its `plot()`.

    Distances are from one half of the reference, in its standard deviations. Beside them stand
    those of the other half, below which differences mean nothing. `posterior` and `target` are as
    for `log_weights`; `reference` is what `diagnostics.hmc` returns, which has a target, an
    `ibnn.LastLayerHMC`, or samples (..., size), and the posterior may be samples, too. `evidence`
    is log p(y), or a pair with its standard error.
    """
    chains = getattr(reference, "samples", reference)
    if isinstance(chains, np.ndarray) and chains.ndim == 3:  # halves that share no chain
        y, other = (rows_of(part, 2000, seed + 1) for part in np.array_split(chains, 2))
    else:
        y, other = np.array_split(rows_of(reference, 4000, seed + 1), 2)
    x, table = rows_of(posterior, len(y), seed), {}
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"`posterior` has {x.shape[1]} numbers, `reference` {y.shape[1]}.")
    target = target or getattr(getattr(reference, "target", None), "values", None)
    if target and not hasattr(posterior, "samples") and not isinstance(posterior, np.ndarray):
        weights = log_weights(posterior, target, seed=seed)
        lower = _mean(weights)
        table |= {"ELBO, nats": (lower, ""), "bound by 64 weights": (_mean(weights, 64), "")}
        if evidence is not None:
            value, error = np.append(evidence, 0.0)[:2]
            gap = Estimate(value - lower.value, math.hypot(error, lower.error))
            table["log evidence - ELBO"] = (gap, "")
        table["k-hat, good below 0.7"] = (round(k_hat(weights), 3), "")
    scaled = [(z - y.mean(axis=0)) / y.std(axis=0) for z in (x, other, y)]
    for name, score in _DISTANCES.items():
        table[name] = tuple(score(z, scaled[2]) for z in scaled[:2])
    return Report(table, x, y)


def _classes(*both: Any) -> list[np.ndarray]:
    shapes = {np.shape(p) for p in both}
    if len(shapes) > 1 or len(shape := shapes.pop()) != 2 or shape[1] < 2:
        got = " and ".join(f"{np.shape(p)}" for p in both)
        raise ValueError(f"Probabilities must be (inputs, 2 or more classes), alike; got {got}.")
    return [np.asarray(p) for p in both]


def _mean(values: np.ndarray, number: int = 1) -> Estimate:
    """Return the mean, or that of the log mean exponentials of `number` values at a time."""
    each = logsumexp(values.reshape(-1, number), axis=1) - math.log(number)
    return Estimate(float(each.mean()), float(each.std(ddof=1) / math.sqrt(len(each))))


_DISTANCES = {
    "MMD, squared": mmd,
    "sliced Wasserstein distance": lambda x, y: round(sliced_wasserstein(x, y), 4),
    "largest error of a mean": lambda x, y: round(float(np.abs(x.mean(axis=0)).max()), 4),
    "largest error of a deviation": lambda x, y: round(float(np.abs(x.std(axis=0) - 1).max()), 4),
}
