"""Hamiltonian Monte Carlo: of any log-density, and over the last layer's weights."""

import math
import time
import warnings
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import KEY_DTYPE, Tensor, compiled, matmul, mean, tfp
from tfp_ibnn.weights.gaussian_vi import natural_gradients
from tfp_ibnn.weights.target import Density, LastLayerPosterior, Target

_MOST_WEIGHTS = 5_000
_MOST_NUMBERS = 2**28
_CHUNKS, _FIT_STEPS = 20, 50


def sample_chains(
    target: Density,
    seed: int | np.random.Generator = 0,
    *,
    sampler: str = "nuts",
    chains: int = 4,
    draws: int = 500,
    warmup: int = 500,
    start: str = "gaussian",
    time_limit: float = 3600.0,
    verbose: Any = "auto",
) -> tuple[np.ndarray, dict[str, float]]:
    """Return draws (draws, chains, size) of a density, and their diagnostics by name.

    `ibnn.diagnostics.hmc` says what the arguments are. The Gaussian in whose coordinates the chains
    run has a full covariance up to 5,000 numbers; if the first half of the warm-up shows that it
    does not fit, it takes the moments of the draws.
    """
    checks.one_of("sampler", sampler, ("nuts", "hmc"))
    checks.one_of("start", start, ("gaussian", "prior"))
    chains = checks.positive_integer("chains", chains, least=2)
    draws = checks.positive_integer("draws", draws, least=4)
    warmup = checks.positive_integer("warmup", warmup)
    size, dtype, rng = target.size, target.dtype, np.random.default_rng(seed)
    full, leapfrog = size <= _MOST_WEIGHTS, math.ceil(1.5 * size**0.25)
    # Of NUTS, four times the leapfrogs of HMC is a guess. The Gaussian takes gradients, too.
    count = (warmup + draws) * leapfrog * (4 if sampler == "nuts" else 1)
    count += _FIT_STEPS * min(2.5 * size, 1024) / chains
    limit = checks.positive("time_limit", time_limit)
    rows = np.repeat(target.start[None], chains, axis=0)
    if not np.isfinite(target.gradients(rows)).all():  # which compiles it
        raise ValueError("The gradient of the log-density is NaN or infinite at its start.")
    begun = time.perf_counter()
    target.gradients(rows)
    seconds = count * (time.perf_counter() - begun)
    if seconds > limit:
        got = f"{chains} chains over {size} numbers would take about {seconds:,.0f} s"
        remedy = "fewer examples, `draws` or steps of `warmup`, or a longer `time_limit`"
        raise ValueError(f"{got}, and `time_limit` is {limit:,.0f} s: give {remedy}.")
    begun = time.perf_counter()
    loc, factor = natural_gradients(target, full, _FIT_STEPS, rng, verbose)

    def kernel(step_size: Tensor, loc: Tensor, factor: Tensor, *data: Tensor) -> Any:
        # Of all chains together; where one of them leaves the numbers, its step is refused.
        def log_prob(white: Tensor) -> Tensor:
            value = target.log_prob(colored(white, loc, factor), *data)
            value = ops.cast(value, white.dtype)
            return ops.where(ops.isfinite(value), value, -float("inf") * ops.ones_like(value))

        adaptive = tfp.mcmc.DualAveragingStepSizeAdaptation
        accept, steps = ops.cast([0.8, 0.9], step_size.dtype), warmup * 2 // 5
        if sampler == "nuts":
            # Trees of 2^10 steps are rarely of use here, and all that a resonance would leave.
            inner = tfp.mcmc.NoUTurnSampler(log_prob, step_size, max_tree_depth=6)
            return adaptive(inner, steps, target_accept_prob=accept[1])
        inner = tfp.mcmc.HamiltonianMonteCarlo(log_prob, step_size, leapfrog)
        options = {"step_size_setter_fn": shorten, "target_accept_prob": accept[0]}
        return adaptive(inner, steps, **options)

    def shorten(results: Any, step_size: Tensor) -> Any:
        # Beyond a quarter of a Gaussian's period, chains swing between two sides of it.
        shorter = ops.minimum(step_size, ops.cast(1.5 / leapfrog, step_size.dtype))
        accepted = results.accepted_results
        return results._replace(accepted_results=accepted._replace(step_size=shorter))

    def trace(_: Tensor, results: Any) -> tuple[Tensor, Tensor]:
        ratio = results.inner_results.log_accept_ratio
        nuts, missed = sampler == "nuts", ops.logical_not(ratio > -1000)  # TFP's limit for NUTS
        diverged = results.inner_results.has_divergence if nuts else missed
        return ops.exp(ops.minimum(ratio, ops.zeros_like(ratio))), diverged

    def advance(state: Tensor, results: Any, key: Tensor, *args: Tensor) -> tuple[Any, ...]:
        options = {"previous_kernel_results": results, "kernel": kernel(*args), "seed": key}
        options |= {"trace_fn": trace, "return_final_kernel_results": True}
        steps = math.ceil((warmup + draws) / _CHUNKS)
        return tuple(tfp.mcmc.sample_chain(steps, state, **options))

    state = rng.standard_normal((chains, size))
    if start == "prior":
        state = whitened(target.prior_loc + target.prior_scale * state, loc, factor)
    if not np.isfinite(target.values(colored(state, loc, factor))).all():
        raise ValueError("The log-density is NaN or infinite where a chain starts.")
    begin = compiled(lambda x, *args: kernel(*args).bootstrap_results(x), target.reads)
    advance, step_size = compiled(advance, target.reads), np.full((chains, 1), 1.5 / leapfrog)
    bar = keras.utils.Progbar(_CHUNKS, verbose=1 if verbose == "auto" else verbose)
    found, half = [], round(_CHUNKS * warmup / (warmup + draws) / 2)
    for number in range(_CHUNKS):
        if number in (0, half):  # where step sizes begin to adapt
            recent = [x for x, *_ in found[number // 2 :]] or [state[None]]
            loc, factor, state = _adapted(loc, factor, np.asarray(state), np.concatenate(recent))
            state, *args = (x.astype(dtype) for x in (state, step_size, loc, factor))
            results = begin(state, *args, *target.data)
        key = rng.integers(0, 2**31 - 1, 2).astype(KEY_DTYPE)
        states, traced, results = advance(state, results, key, *args, *target.data)
        state = states[-1]
        found.append([ops.convert_to_numpy(x) for x in (states, *traced)])
        bar.update(number + 1, [("acceptance", float(found[-1][1].mean()))])
    white, accepted, diverged = (np.concatenate(x)[-draws:] for x in zip(*found, strict=True))
    sets = colored(white.astype("float64"), loc, factor)
    seen = {"acceptance": float(accepted.mean()), "divergences": int(diverged.sum())}
    seen |= {**agreement(ops.convert_to_tensor(sets)), "seconds": time.perf_counter() - begun}
    if verbose:
        print(table(sets.shape, seen))
    if not (r_hat := seen["R-hat, largest"]) < 1.1:
        problem = f"The chains do not agree: R-hat is {r_hat:.3f}, and should be below 1.1"
        more = f"more than {warmup} steps of `warmup` and {draws} `draws`"
        warnings.warn(f"{problem}. Give {more}.", stacklevel=3)
    if seen["divergences"]:
        problem = f"{seen['divergences']} of {chains * draws} steps diverged"
        warnings.warn(f"{problem}: draws may be missing where the density is steep.", stacklevel=3)
    return sets, seen


def colored(white: Any, loc: Any, factor: Any) -> Any:
    """Return draws of a Gaussian from standard normal rows; its factor may be a diagonal."""
    if len(factor.shape) == 1 or isinstance(white, np.ndarray):
        return loc + (white * factor if len(factor.shape) == 1 else white @ factor.T)
    return loc + matmul(white, ops.transpose(factor))


def whitened(w: np.ndarray, loc: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Return standard normal rows from draws of a Gaussian."""
    return (w - loc) / factor if factor.ndim == 1 else np.linalg.solve(factor, (w - loc).T).T


def _adapted(loc: Any, factor: Any, state: np.ndarray, recent: np.ndarray) -> tuple[Any, Any, Any]:
    """Return a Gaussian with the moments of draws that it does not fit, and the state under it."""
    rows = recent.reshape(-1, state.shape[-1]).astype("float64")
    spread, fewest = rows.std(axis=0), 20 if factor.ndim == 1 else 10 * rows.shape[1]
    if len(rows) < fewest or (0.5 < spread.min() and spread.max() < 2):
        return loc, factor, state
    if factor.ndim == 1:
        changed = factor * spread
    else:
        covariance = np.atleast_2d(np.cov(rows.T)) + np.diag(1e-6 * spread**2)
        changed = factor @ np.linalg.cholesky(covariance)
    center = colored(rows.mean(axis=0), loc, factor)
    return center, changed, whitened(colored(state, loc, factor), center, changed)


def agreement(sets: Tensor) -> dict[str, float]:
    """Return R-hat and effective sample sizes of draws (draws, chains, size) by name."""
    r_hat = tfp.mcmc.potential_scale_reduction(sets, split_chains=sets.shape[0] % 2 == 0)
    options = {"filter_beyond_positive_pairs": True, "cross_chain_dims": 1}
    ess = ops.convert_to_numpy(tfp.mcmc.effective_sample_size(sets, **options))
    return {
        "R-hat, largest": float(ops.convert_to_numpy(r_hat).max()),
        "effective draws, fewest": float(ess.min()),
        "effective draws, median": float(np.median(ess)),
    }


def table(shape: tuple[int, ...], numbers: dict[str, float], of: str = "numbers") -> str:
    """Return the diagnostics of draws of that shape, (draws, chains, size), as a table."""
    head = f"{shape[1]} chains of {shape[0]} draws, {shape[2]} {of}"
    return "\n".join([head, *(f"{name:<24} {x:10.3f}" for name, x in numbers.items())])


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class LastLayerHMC(LastLayerPosterior):
    """Draws from the exact posterior of the last layer's weights, by Hamiltonian Monte Carlo.

    Log-density: log p(y | x, w) + log p(w), with the prior w ~ N(0, prior_scale^2), on cached
    features. A Gaussian of full covariance comes first; the chains start from its draws and run
    in coordinates where it is N(0, 1). The step size adapts in the warm-up to 80 % acceptance.
    `report` has R-hat and effective sample sizes. Reference: Neal, MCMC Using Hamiltonian Dynamics,
    arXiv 1206.1901.

    Cost: (warmup + draws) * leapfrog gradients of all chains together, each O(N * D) per chain for
    N examples and D weights. Stores chains * draws sets of the last layer's weights.

    Args:
        model: a built Functional or Sequential model that ends in a Dense layer; it is not changed.
        chains: number of independent chains, at least 2.
        draws: from each chain, after the warm-up.
        warmup: steps of each chain that are not kept.
        **kw: `prior_scale` (1.0), `noise_scale`, `head` and `from_logits` as for `GaussianVI`,
            whose example shows the steps.
    """

    def __init__(
        self, model: keras.Model, *, chains: int = 4, draws: int = 250, warmup: int = 300, **kw: Any
    ) -> None:
        super().__init__(model, **kw)
        self.chains = checks.positive_integer("chains", chains, least=2)
        self.draws = checks.positive_integer("draws", draws, least=4)
        self.warmup = checks.positive_integer("warmup", warmup)
        self.count = self.chains * self.draws
        if self.size > _MOST_WEIGHTS or self.count * self.size > _MOST_NUMBERS:
            most = f"at most {_MOST_WEIGHTS} weights, and {_MOST_NUMBERS} numbers in all"
            remedy = "Take fewer `draws`, or ibnn.GaussianVI(model, covariance='lowrank')"
            got = f"{self.count} draws of {self.size} weights are too many"
            raise ValueError(f"{got}: {most}. {remedy}.")
        self._sets = self._add("sets", (self.draws, self.chains, self.size))
        self._acceptance = self._add("acceptance", ())

    def fit_to(self, target: Target, rng: np.random.Generator, verbose: Any = 0) -> None:
        """Draw from a target's posterior."""
        options = {name: getattr(self, name) for name in ("chains", "draws", "warmup")}
        options |= {"sampler": "hmc", "time_limit": 1e9, "verbose": verbose}
        sets, seen = sample_chains(target, rng, **options)
        self._sets.assign(sets)
        self._acceptance.assign(seen["acceptance"])

    def draw(self, key: Tensor, number: int | Tensor) -> Tensor:
        """Return a draw, (size,): all of them in an order that mixes early and late ones."""
        strides = range(int(0.618 * self.count), 0, -1)
        stride = next(n for n in strides if math.gcd(n, self.count) == 1)
        rows = ops.reshape(ops.convert_to_tensor(self._sets), (self.count, self.size))
        return ops.take(rows, number % self.count * stride % self.count, axis=0)

    def center(self) -> Tensor:
        """Return the mean of all draws."""
        return mean(ops.convert_to_tensor(self._sets), axis=(0, 1))

    def samples(self) -> np.ndarray:
        """Return all draws, (draws * chains, size)."""
        return ops.convert_to_numpy(self._sets.value).reshape(self.count, self.size)

    def diagnostics(self) -> dict[str, float]:
        """Return acceptance, R-hat and effective sample sizes by name."""
        acceptance = float(ops.convert_to_numpy(self._acceptance.value))
        return {"acceptance": acceptance, **agreement(ops.convert_to_tensor(self._sets))}

    def report(self) -> str:
        """Return the diagnostics as a table."""
        return table(self._sets.shape, self.diagnostics(), "weights")
