"""The log-evidence log p(y), by bridge sampling and by sequential Monte Carlo."""

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
from tfp_ibnn.diagnostics.reference import Reference
from tfp_ibnn.diagnostics.scores import Estimate
from tfp_ibnn.diagnostics.targets import target_of
from tfp_ibnn.weights.agreement import agreement
from tfp_ibnn.weights.density import Density
from tfp_ibnn.weights.whitening import colored

_MOVES = 4  # of a particle at each temperature
_EFFECTIVE_SHARE = 0.9  # of the particles, after a step to the next temperature
_ACCEPTANCE = 0.7  # that step sizes aim at
_LARGEST_EXPONENT = 600


def bridge(reference: Reference, *, seed: int = 0) -> Estimate:
    """Return the log-evidence by bridge sampling between a reference and a Gaussian.

    The Gaussian has the moments of the first half of the draws; the second half is used, with as
    many draws of the Gaussian. Costs as many values of the density as there are draws. Reference:
    Meng and Wong, Simulating Ratios of Normalizing Constants, Statistica Sinica 6 (1996).

    Args:
        reference: what `diagnostics.hmc` returns, of a normalized prior and likelihood.
        seed: of the Gaussian's draws.

    Returns:
        The log-evidence in nats, with its standard error.

    Raises:
        ValueError: if there are too few draws for a covariance.
    """
    first, second = np.array_split(reference.samples, 2, axis=1)
    size = first.shape[-1]
    fitted = first.reshape(-1, size)
    if len(fitted) < 5 * size:
        raise ValueError(
            f"`reference` must have more draws: a covariance of {size} numbers needs at least "
            f"{10 * size}; it has {2 * len(fitted)}."
        )
    gaussian = multivariate_normal(fitted.mean(axis=0), np.cov(fitted.T))

    def log_ratios(w: np.ndarray) -> np.ndarray:
        log_joint = reference.target.values(w)
        return log_joint - gaussian.logpdf(w)

    draws = second.reshape(-1, size)
    proposals = gaussian.rvs(len(draws), random_state=seed)
    proposals = proposals.reshape(-1, size)
    log_at_draws = log_ratios(draws)
    log_at_proposals = log_ratios(proposals)
    middle = np.median(log_at_draws)
    at_draws = _bounded_exp(log_at_draws - middle)
    at_proposals = _bounded_exp(log_at_proposals - middle)
    chains = second.shape[:2]
    effective = _effective_draws(at_draws, chains)
    share = effective / (effective + len(proposals))
    ratio, numerators, denominators = _bridge_ratio(at_draws, at_proposals, share)
    # The relative variances of the two means add up, since log ratio is a difference of logs.
    variance = _relative_variance(numerators) / len(numerators)
    effective = _effective_draws(denominators, chains)
    variance += _relative_variance(denominators) / effective
    value = middle + math.log(ratio)
    return Estimate(float(value), math.sqrt(variance))


def _bounded_exp(x: np.ndarray) -> np.ndarray:
    bounded = np.clip(x, -_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    return np.exp(bounded)


def _relative_variance(x: np.ndarray) -> float:
    return np.var(x / x.mean())


def _effective_draws(values: np.ndarray, chains: tuple[int, ...]) -> float:
    """Return how many independent values are worth as much as those (N,) of correlated chains."""
    scaled = values / values.max()
    by_chain = scaled.reshape(chains)
    sets = ops.convert_to_tensor(by_chain.T[..., None])
    diagnostics = agreement(sets)
    return diagnostics["effective draws, fewest"]


def _bridge_ratio(
    at_draws: np.ndarray, at_proposals: np.ndarray, share: float
) -> tuple[float, np.ndarray, np.ndarray]:
    """Return the fixed point of Meng and Wong's iteration for the ratio of evidences.

    Args:
        at_draws: density of the posterior, not normalized, over the Gaussian's, at its draws.
        at_proposals: the same at the Gaussian's draws.
        share: of the posterior's draws among all.

    Returns:
        The ratio, and the terms whose means it is the quotient of.
    """
    ratio = 1.0
    while True:
        of_gaussian = (1 - share) * ratio
        numerators = at_proposals / (share * at_proposals + of_gaussian)
        denominators = 1 / (share * at_draws + of_gaussian)
        updated = numerators.mean() / denominators.mean()
        # Written so that NaN ends it.
        if not abs(updated - ratio) > 1e-10 * updated:
            return updated, numerators, denominators
        ratio = updated


def smc(
    model: Any,
    data: Any = None,
    *,
    particles: int = 512,
    runs: int = 8,
    over: str | None = None,
    prior_scale: float | None = None,
    noise_scale: float | None = None,
    head: str | None = None,
    from_logits: bool | None = None,
    seed: int = 0,
    verbose: Any = "auto",
) -> Estimate:
    """Return the log-evidence by sequential Monte Carlo, from the prior to the posterior.

    Each temperature leaves 90 % of the particles effective; these are drawn anew, then move by HMC.
    It finds modes that chains miss. Cost: `4 * particles * runs` short trajectories at each of some
    20 temperatures. The error is from the spread of the runs. Reference: Del Moral et al.,
    Sequential Monte Carlo Samplers, JRSS B 68 (2006).

    Args:
        model: as for `hmc`; of a `Density`, the Gaussian N(prior_loc, prior_scale^2) comes first.
        data: (x, y), or a dataset of such batches that ends.
        particles: of each run, at least 4.
        runs: independent ones, at least 2.
        over: "z", "last_layer" or "weights", as for `hmc`.
        prior_scale: of weights, as for `hmc`.
        noise_scale: of the targets of a plain regression, as for `hmc`.
        head: as for `MonteCarlo`.
        from_logits: as for `MonteCarlo`.
        seed: equal seeds give equal results.
        verbose: 0 shows no progress.

    Returns:
        The log-evidence in nats, with its standard error.

    Example:
        >>> import numpy as np, tfp_ibnn as ibnn
        >>> from keras import ops
        >>> bell = ibnn.diagnostics.Density(lambda w: -ops.sum(w**2, axis=-1) / 2, np.zeros(2))
        >>> evidence = ibnn.diagnostics.smc(bell, particles=256, runs=4, verbose=0)
        >>> bool(abs(evidence.value - np.log(2 * np.pi)) < 0.1)
        True
    """
    particles = checks.positive_integer("particles", particles, least=4)
    runs = checks.positive_integer("runs", runs, least=2)
    target = target_of(
        model,
        data,
        over,
        prior_scale,
        noise_scale,
        head=head,
        from_logits=from_logits,
        verbose=verbose,
    )
    rng = np.random.default_rng(checks.whole("seed", seed))
    cloud = _Cloud(target, (runs, particles), rng)
    bar = keras.utils.Progbar(100, verbose=1 if verbose == "auto" else verbose)
    while cloud.heat < 1:
        cloud.advance()
        bar.update(int(100 * cloud.heat))
    # The mean of the runs' evidences, which are unbiased where their logarithms are not.
    largest = cloud.log_evidences.max()
    ratios = np.exp(cloud.log_evidences - largest)
    mean = ratios.mean()
    value = largest + math.log(mean)
    deviation = ratios.std(ddof=1) / mean
    error = deviation / math.sqrt(runs)
    return Estimate(float(value), float(error))


class _Cloud:
    """The particles of all runs at a temperature: draws of prior * (joint / prior)^heat.

    Attributes:
        heat: from 0 at the prior to 1 at the posterior.
        log_evidences: (runs,), of the density at this temperature.
    """

    def __init__(self, target: Density, shape: tuple[int, int], rng: np.random.Generator) -> None:
        self._target = target
        self._runs, self._particles = shape
        self._rng = rng
        size = target.size
        loc = np.broadcast_to(target.prior_loc, size)
        scale = np.broadcast_to(target.prior_scale, size)
        self._prior = norm(loc, scale)
        count = self._runs * self._particles
        self._w = self._prior.rvs((count, size), random_state=rng)
        self._moves = _Moves(target, loc, scale)
        self.heat = 0.0
        self.log_evidences = np.zeros(self._runs)

    def advance(self) -> None:
        """Heat the particles by one step: weigh them, draw them anew, and move them."""
        gains = self._gains()
        hotter = self._next_heat(gains)
        log_weights = (hotter - self.heat) * gains
        totals = logsumexp(log_weights, axis=1)
        self.log_evidences += totals - math.log(self._particles)
        weights = np.exp(log_weights - totals[:, None])
        places = self._survivors(weights)
        survivors = self._w[places]
        self._w = self._moves(survivors, hotter, self._rng)
        self.heat = hotter

    def _gains(self) -> np.ndarray:
        """Return by how much the joint density is above the prior, in nats, (runs, particles)."""
        log_prior = self._prior.logpdf(self._w)
        log_prior = log_prior.sum(axis=1)
        log_joint = self._target.values(self._w)
        gains = log_joint - log_prior
        gains = np.nan_to_num(gains, nan=-np.inf)
        return gains.reshape(self._runs, self._particles)

    def _next_heat(self, gains: np.ndarray) -> float:
        """Return the temperature at which 90 % of the particles are effective, at most 1."""
        enough = math.log(_EFFECTIVE_SHARE * gains.size)

        def excess(hotter: float) -> float:
            log_weights = (hotter - self.heat) * gains
            log_effective = 2 * logsumexp(log_weights) - logsumexp(2 * log_weights)
            return log_effective - enough

        if excess(1.0) >= 0:
            return 1.0
        return brentq(excess, self.heat, 1.0)

    def _survivors(self, weights: np.ndarray) -> np.ndarray:
        """Return which particles survive, (runs * particles,), by weights (runs, particles).

        Each run draws its own particles anew, at equal distances: the cumulative weights of run r
        fill the interval from r to r + 1.
        """
        places = np.arange(self._particles)
        runs = np.arange(self._runs)
        runs = runs[:, None]
        cumulative = np.cumsum(weights, axis=1)
        total = cumulative[:, -1:]
        ends = cumulative / total
        ends += runs
        offsets = self._rng.random(runs.shape)
        points = (offsets + places) / self._particles
        points += runs
        return np.searchsorted(ends.ravel(), points.ravel())


class _Moves:
    """HMC at a temperature, in coordinates where the particles' moments are standard."""

    def __init__(self, target: Density, prior_loc: np.ndarray, prior_scale: np.ndarray) -> None:
        self._target = target
        self._prior = (
            prior_loc.astype(target.dtype),
            prior_scale.astype(target.dtype),
        )
        self._leapfrog = math.ceil(1.5 * target.size**0.25)
        # Beyond a quarter of a Gaussian's period, particles swing between two sides of it.
        self._longest_step = 1.5 / self._leapfrog
        self._step = self._longest_step
        self._compiled = compiled(self._move, target.reads)

    def __call__(self, w: np.ndarray, heat: float, rng: np.random.Generator) -> np.ndarray:
        """Return particles (N, size) after some moves, and adapt the step size."""
        dtype = self._target.dtype
        settings = (
            np.asarray(heat, dtype),
            np.asarray(self._step, dtype),
            self._factor(w).astype(dtype),
        )
        count = math.ceil(len(w) / self._target.rows)
        parts = np.array_split(w.astype(dtype), count)
        moved = []
        acceptances = []
        for part in parts:
            key = rng.integers(0, 2**31 - 1, 2)
            state, acceptance = self._compiled(
                part,
                key.astype(KEY_DTYPE),
                *settings,
                *self._prior,
                *self._target.data,
            )
            moved.append(ops.convert_to_numpy(state))
            acceptances.append(ops.convert_to_numpy(acceptance))
        change = math.exp(np.mean(acceptances) - _ACCEPTANCE)
        self._step = min(self._step * change, self._longest_step)
        return np.concatenate(moved).astype("float64")

    def _factor(self, w: np.ndarray) -> np.ndarray:
        """Return a factor of the particles' covariance, or deviations where they are too few."""
        count, size = w.shape
        if 10 * size > count:
            return w.std(axis=0)
        covariance = np.atleast_2d(np.cov(w.T))
        return np.linalg.cholesky(covariance)

    def _move(
        self,
        w: Tensor,
        key: Tensor,
        heat: Tensor,
        step: Tensor,
        factor: Tensor,
        prior_loc: Tensor,
        prior_scale: Tensor,
        *data: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return particles after some trajectories, and the share that was accepted."""

        def log_prob(white: Tensor) -> Tensor:
            moved = colored(white, w, factor)
            standard = (moved - prior_loc) / prior_scale
            squares = ops.square(standard)
            log_prior = -ops.sum(squares, axis=-1) / 2
            log_joint = self._target.log_prob(moved, *data)
            log_joint = ops.cast(log_joint, w.dtype)
            value = log_prior + heat * (log_joint - log_prior)
            refused = ops.full_like(value, -math.inf)
            return ops.where(ops.isfinite(value), value, refused)

        states, is_accepted = tfp.mcmc.sample_chain(
            _MOVES,
            ops.zeros_like(w),
            kernel=tfp.mcmc.HamiltonianMonteCarlo(log_prob, step, self._leapfrog),
            seed=key,
            trace_fn=lambda _, results: results.is_accepted,
        )
        moved = colored(states[-1], w, factor)
        accepted = ops.cast(is_accepted, w.dtype)
        return moved, ops.mean(accepted)
