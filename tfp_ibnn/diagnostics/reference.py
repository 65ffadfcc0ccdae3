"""Draws from the posterior itself, as a reference for all others, and the log-evidence."""

import dataclasses
import math
from typing import Any

import keras
import numpy as np
from keras import ops
from scipy.optimize import brentq
from scipy.special import logsumexp
from scipy.stats import multivariate_normal, norm

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import KEY_DTYPE, Tensor, compiled, tfp
from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn.diagnostics.scores import Estimate
from tfp_ibnn.diagnostics.targets import target_of
from tfp_ibnn.weights import WeightSets
from tfp_ibnn.weights.agreement import agreement, table
from tfp_ibnn.weights.chains import sample_chains
from tfp_ibnn.weights.density import Density
from tfp_ibnn.weights.vectors import places_of, split
from tfp_ibnn.weights.whitening import colored

_MOVES = 4  # of a particle at each temperature


@dataclasses.dataclass(repr=False)
class Reference:
    """Draws `samples` (chains, draws, size) of a posterior, whose log-density is `target`.

    `target` has `size`, `start`, and of rows (S, size) `values` and `gradients`. `seen` are the
    diagnostics: acceptance, divergences, R-hat, effective sample sizes, seconds.
    """

    samples: np.ndarray
    target: Density
    seen: dict[str, float]

    def diagnostics(self) -> dict[str, float]:
        """Return the diagnostics by name."""
        return self.seen

    def report(self) -> str:
        """Return the diagnostics as a table."""
        return table(np.swapaxes(self.samples, 0, 1).shape, self.seen)

    __str__ = report

    def predict(self, x: Any, draws: int = 100, batch_size: int = 256) -> np.ndarray:
        """Return the network's outputs (draws, N, ...) for some of the draws, evenly spread."""
        return self.target.predict(self._spread(draws), x, batch_size)

    def posterior(self, draws: int = 100) -> WeightPosterior:
        """Return some of the draws of weights, for `MonteCarlo`; those of z have `predict`."""
        variables = getattr(self.target, "variables", None)
        if variables is None:
            raise ValueError("These are not draws of weights: use reference.predict(x).")
        model, rows = self.target.network.model, self._spread(draws)
        parts = map(ops.convert_to_numpy, split(rows, variables))
        drawn = dict(zip(places_of(model, variables), parts, strict=True))
        fixed = {place: [value] * len(rows) for place, value in enumerate(model.get_weights())}
        return WeightSets.of(model, list(zip(*(fixed | drawn).values(), strict=True)))

    def _spread(self, draws: int) -> np.ndarray:
        rows = np.swapaxes(self.samples, 0, 1).reshape(-1, self.target.size)
        count = min(checks.positive_integer("draws", draws), len(rows))
        return rows[np.linspace(0, len(rows) - 1, count).round().astype(int)]


def hmc(
    model: Any,
    data: Any = None,
    *,
    over: str | None = None,
    prior_scale: float | None = None,
    noise_scale: float | None = None,
    head: str | None = None,
    from_logits: bool | None = None,
    seed: int = 0,
    verbose: Any = "auto",
    **options: Any,
) -> Reference:
    """Draw from the exact posterior of a model's z or weights, by NUTS or HMC.

    Several chains run side by side, in coordinates where a Gaussian fitted to the posterior is
    standard, with step sizes that adapt in the warm-up. Cost: a gradient over all data for each
    leapfrog step, some 5 to 100 per draw. It warns of chains that do not agree, and of divergences.

    Args:
        model: one with stochastic layers, whose weights stay fixed; a plain model; a posterior over
            weights, whose prior is taken; or a `Density`, without data.
        data: (x, y), or a dataset of such batches that ends.
        over: "z", "last_layer" or "weights", all trainable ones; None is "z" if there are
            stochastic layers, else "last_layer".
        prior_scale: of weights; None is 1.0, or that of the posterior.
        noise_scale: of the targets of a plain regression; None as for `GaussianVI`.
        head: as for `MonteCarlo`.
        from_logits: as for `MonteCarlo`.
        seed: equal seeds give equal draws.
        verbose: 0 shows no progress.
        **options: `sampler` ("nuts" or "hmc"), `chains` (4), `draws` (500) of each, after `warmup`
            (500); `start`: "gaussian", at draws of it, or "prior", far apart, so that R-hat shows
            several modes; `time_limit` (3600), seconds: what a timed gradient says takes longer is
            refused.

    Example:
        >>> import numpy as np, tfp_ibnn as ibnn
        >>> from keras import ops
        >>> bell = ibnn.diagnostics.Density(lambda w: -ops.sum(w**2, axis=-1) / 2, np.zeros(2))
        >>> ibnn.diagnostics.hmc(bell, sampler="hmc", draws=100, verbose=0).samples.shape
        (4, 100, 2)
    """
    of_head = {"head": head, "from_logits": from_logits}
    target = target_of(model, data, over, prior_scale, noise_scale, verbose, **of_head)
    sets, seen = sample_chains(target, checks.whole("seed", seed), verbose=verbose, **options)
    return Reference(np.swapaxes(sets, 0, 1), target, seen)


def bridge(reference: Reference, *, seed: int = 0) -> Estimate:
    """Return the log-evidence by bridge sampling between a reference and a Gaussian.

    The Gaussian has the moments of the first half of the draws; the second half is used, with as
    many draws of the Gaussian. Costs as many values of the density as there are draws. Reference:
    Meng and Wong, Simulating Ratios of Normalizing Constants, Statistica Sinica 6 (1996).
    """
    first, second = np.array_split(reference.samples, 2, axis=1)
    fitted, size = first.reshape(-1, first.shape[-1]), first.shape[-1]
    if len(fitted) < 5 * size:
        need = f"a covariance of {size} numbers needs at least {10 * size}"
        raise ValueError(f"`reference` must have more draws: {need}; it has {2 * len(fitted)}.")
    gaussian = multivariate_normal(fitted.mean(axis=0), np.cov(fitted.T))
    rows = second.reshape(-1, size)
    others = gaussian.rvs(len(rows), random_state=seed).reshape(-1, size)
    here, there = (reference.target.values(w) - gaussian.logpdf(w) for w in (rows, others))
    middle = np.median(here)
    here, there = (np.exp(np.clip(x - middle, -600, 600)) for x in (here, there))

    def effective(each: np.ndarray) -> float:
        sets = (each / each.max()).reshape(second.shape[:2]).T[..., None]
        return agreement(ops.convert_to_tensor(sets))["effective draws, fewest"]

    share = effective(here) / (effective(here) + len(others))
    ratio, before = 1.0, 0.0
    while abs(ratio - before) > 1e-10 * ratio:
        top = there / (share * there + (1 - share) * ratio)
        bottom = 1 / (share * here + (1 - share) * ratio)
        ratio, before = top.mean() / bottom.mean(), ratio
    variances = np.var(top / top.mean()) / len(top), np.var(bottom / bottom.mean())
    error = math.sqrt(variances[0] + variances[1] / effective(bottom))
    return Estimate(float(middle + math.log(ratio)), error)


def smc(
    model: Any,
    data: Any = None,
    *,
    particles: int = 512,
    runs: int = 8,
    seed: int = 0,
    verbose: Any = "auto",
    **options: Any,
) -> Estimate:
    """Return the log-evidence by sequential Monte Carlo, from the prior to the posterior.

    Each temperature leaves 90 % of the particles effective; these are drawn anew, then move by HMC.
    It finds modes that chains miss. Cost: `4 * particles * runs` short trajectories at each of some
    20 temperatures. The error is from the spread of the runs. Reference: Del Moral et al.,
    Sequential Monte Carlo Samplers, JRSS B 68 (2006).

    Args:
        model: as for `hmc`; of a `Density`, the Gaussian N(prior_loc, prior_scale^2) comes first.
        data: (x, y), or a dataset of such batches that ends.
        particles: of each run.
        runs: independent ones, at least 2.
        seed: equal seeds give equal results.
        verbose: 0 shows no progress.
        **options: `over`, `prior_scale`, `noise_scale`, `head` and `from_logits` as for `hmc`.
    """
    particles = checks.positive_integer("particles", particles, least=4)
    runs = checks.positive_integer("runs", runs, least=2)
    target = target_of(model, data, verbose=verbose, **options)
    size, rng = target.size, np.random.default_rng(checks.whole("seed", seed))
    leapfrog, count = math.ceil(1.5 * size**0.25), runs * particles
    prior = [np.broadcast_to(x, size) for x in (target.prior_loc, target.prior_scale)]
    first, prior = norm(*prior), [x.astype(target.dtype) for x in prior]

    def move(w: Tensor, key: Tensor, heat: Tensor, step: Tensor, factor: Tensor, *data: Any) -> Any:
        loc, scale, *data = data

        def log_prob(white: Tensor) -> Tensor:
            moved = colored(white, w, factor)
            before = -ops.sum(ops.square((moved - loc) / scale), axis=-1) / 2
            value = ops.cast(target.log_prob(moved, *data), w.dtype)
            value = before + heat * (value - before)
            return ops.where(ops.isfinite(value), value, -float("inf") * ops.ones_like(value))

        kernel = tfp.mcmc.HamiltonianMonteCarlo(log_prob, step, leapfrog)
        trace = {"kernel": kernel, "seed": key, "trace_fn": lambda _, x: x.is_accepted}
        states, accepted = tfp.mcmc.sample_chain(_MOVES, ops.zeros_like(w), **trace)
        return colored(states[-1], w, factor), ops.mean(ops.cast(accepted, w.dtype))

    def excess(hotter: float) -> float:
        each = (hotter - heat) * gain
        return 2 * logsumexp(each) - logsumexp(2 * each) - math.log(0.9 * count)

    move, step, heat = compiled(move, target.reads), 1.5 / leapfrog, 0.0
    w, logs, run = first.rvs((count, size), random_state=rng), 0.0, np.arange(runs)[:, None]
    bar = keras.utils.Progbar(100, verbose=1 if verbose == "auto" else verbose)
    while heat < 1:
        gain = np.nan_to_num(target.values(w) - first.logpdf(w).sum(axis=1), nan=-np.inf)
        gain = gain.reshape(runs, particles)
        before, heat = heat, 1.0 if excess(1.0) >= 0 else brentq(excess, heat, 1.0)
        each = (heat - before) * gain
        totals = logsumexp(each, axis=1, keepdims=True)
        logs += totals[:, 0] - math.log(particles)
        # Each run draws its own particles anew, at equal distances.
        chances = np.cumsum(np.exp(each - totals), axis=1)
        chances = chances / chances[:, -1:] + run
        points = (rng.random((runs, 1)) + np.arange(particles)) / particles + run
        w = w[np.searchsorted(chances.ravel(), points.ravel())]
        full = 10 * size <= count
        factor = np.linalg.cholesky(np.atleast_2d(np.cov(w.T))) if full else w.std(axis=0)
        numbers, moved = [np.asarray(x, target.dtype) for x in (heat, step, factor)], []
        for part in np.array_split(w.astype(target.dtype), math.ceil(count / target.rows)):
            key = rng.integers(0, 2**31 - 1, 2).astype(KEY_DTYPE)
            found = move(part, key, *numbers, *prior, *target.data)
            moved.append([ops.convert_to_numpy(x) for x in found])
        w = np.concatenate([x for x, _ in moved]).astype("float64")
        # Beyond a quarter of a Gaussian's period, particles swing between two sides of it.
        step = min(step * math.exp(np.mean([x for _, x in moved]) - 0.7), 1.5 / leapfrog)
        bar.update(int(100 * heat))
    ratios = np.exp(logs - logs.max())
    error = ratios.std(ddof=1) / ratios.mean() / math.sqrt(runs)
    return Estimate(float(logs.max() + math.log(ratios.mean())), float(error))
