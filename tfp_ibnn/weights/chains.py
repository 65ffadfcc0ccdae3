"""Chains of Markov chain Monte Carlo over any log-density, all of them side by side."""

import math
import time
import warnings
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import KEY_DTYPE, Tensor, compiled, tfp
from tfp_ibnn.weights.agreement import MOST_R_HAT, R_HAT, agreement, table
from tfp_ibnn.weights.density import Density
from tfp_ibnn.weights.natural_gradients import natural_gradients
from tfp_ibnn.weights.random_walk import RandomWalk
from tfp_ibnn.weights.whitening import colored, refitted, whitened

SAMPLERS = ("nuts", "hmc", "metropolis")
MOST_FULL = 5_000
"""Numbers up to which the coordinates of the chains have a full covariance."""

_CHUNKS = 20
_FIT_STEPS = 50
_ACCEPTANCE = {"nuts": 0.9, "hmc": 0.8, "metropolis": 0.234}  # what step sizes adapt to
_LEAPFROGS_OF_NUTS = 4  # times those of HMC: a guess
_TREE_DEPTH = 6  # TFP's default, 2^10 steps, is rarely of use here, and slow in a resonance
_LEAST_LOG_RATIO = -1000  # of an acceptance that is not a divergence, as TFP has it for NUTS


class _Plan(NamedTuple):
    """How long the chains are, and how they move."""

    sampler: str
    chains: int
    draws: int
    warmup: int
    size: int  # of a place, in numbers

    @property
    def is_nuts(self) -> bool:
        return self.sampler == "nuts"

    @property
    def is_walk(self) -> bool:
        return self.sampler == "metropolis"

    @property
    def leapfrog(self) -> int:
        """The steps of a trajectory of HMC."""
        return math.ceil(1.5 * self.size**0.25)

    @property
    def longest_step(self) -> float:
        """A quarter of a Gaussian's period for each trajectory."""
        return 1.5 / self.leapfrog

    @property
    def first_step(self) -> float:
        """The step size with which chains begin."""
        if self.is_walk:
            return 2.4 / self.size**0.5  # the best for a Gaussian of many numbers
        return self.longest_step

    @property
    def steps_of_draw(self) -> int:
        """How many steps of the sampler make a draw; a random walk needs one for each number."""
        return self.size if self.is_walk else 1

    @property
    def passes(self) -> int:
        """About how many gradients, or values, a draw takes."""
        if self.is_walk:
            return self.steps_of_draw
        return self.leapfrog * (_LEAPFROGS_OF_NUTS if self.is_nuts else 1)

    @property
    def steps_in_chunk(self) -> int:
        return math.ceil((self.warmup + self.draws) / _CHUNKS)

    @property
    def chunk_of_refit(self) -> int:
        """The chunk in the middle of the warm-up, before which coordinates are refitted."""
        steps = self.warmup + self.draws
        return round(_CHUNKS * self.warmup / steps / 2)


class _State(NamedTuple):
    """Where the chains are, in coordinates where N(loc, factor factor') is standard normal."""

    white: np.ndarray  # (chains, size)
    loc: np.ndarray
    factor: np.ndarray


class _Chunk(NamedTuple):
    """Some steps of all chains."""

    white: np.ndarray  # (steps, chains, size)
    acceptance: np.ndarray  # (steps, chains)
    diverged: np.ndarray  # (steps, chains)


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
    """Draw from a density by several chains, and diagnose them.

    The chains run in coordinates where a Gaussian fitted to the density is standard normal. It has
    a full covariance up to 5,000 numbers; if the first half of the warm-up shows that it does not
    fit, it takes the moments of the draws.

    Args:
        target: the density.
        seed: of the draws, or a generator that gives them.
        sampler: "nuts", "hmc" or "metropolis".
        chains: number of chains, at least 2.
        draws: from each chain, at least 4, after the warm-up.
        warmup: steps of each chain that are not kept.
        start: "gaussian", at draws of the fitted Gaussian, or "prior", of the wider one.
        time_limit: seconds; what a timed gradient says takes longer is refused.
        verbose: 0 shows no progress and no table.

    Returns:
        Draws (draws, chains, size) and their diagnostics by name: the mean acceptance, the number
        of divergences, R-hat and effective sample sizes, and seconds.

    Raises:
        ValueError: for options out of range, for a density that is not finite where it starts, and
            for chains that would take longer than the limit.
    """
    checks.one_of("sampler", sampler, SAMPLERS)
    checks.one_of("start", start, ("gaussian", "prior"))
    plan = _Plan(
        sampler,
        checks.positive_integer("chains", chains, least=2),
        checks.positive_integer("draws", draws, least=4),
        checks.positive_integer("warmup", warmup),
        target.size,
    )
    rng = np.random.default_rng(seed)
    _check_time(target, plan, checks.positive("time_limit", time_limit))
    begin = time.perf_counter()
    is_full = target.size <= MOST_FULL
    loc, factor = natural_gradients(target, is_full, _FIT_STEPS, rng, verbose)
    state = _first_state(target, plan, loc, factor, start, rng)
    state, chunks = _run(target, plan, state, rng, verbose)
    kept = _last_steps(chunks, plan.draws)
    sets = colored(kept.white.astype("float64"), state.loc, state.factor)
    diagnostics = {
        "acceptance": float(kept.acceptance.mean()),
        "divergences": int(kept.diverged.sum()),
        **agreement(ops.convert_to_tensor(sets)),
        "seconds": time.perf_counter() - begin,
    }
    if verbose:
        print(table(sets.shape, diagnostics))
    _warn(plan, diagnostics)
    return sets, diagnostics


def _check_time(target: Density, plan: _Plan, limit: float) -> None:
    """Raise if a timed gradient says that the chains take longer than the limit."""
    rows = np.repeat(target.start[None], plan.chains, axis=0)
    if not np.isfinite(target.gradients(rows)).all():  # which compiles it
        raise ValueError("The gradient of the log-density is NaN or infinite at its start.")
    begin = time.perf_counter()
    target.gradients(rows)
    seconds_of_one = time.perf_counter() - begin
    passes = (plan.warmup + plan.draws) * plan.passes
    of_fit = _FIT_STEPS * min(2.5 * target.size, 1024) / plan.chains
    seconds = (passes + of_fit) * seconds_of_one
    if seconds > limit:
        raise ValueError(
            f"{plan.chains} chains over {target.size} numbers would take about {seconds:,.0f} s, "
            f"and `time_limit` is {limit:,.0f} s: give fewer examples, `draws` or steps of "
            "`warmup`, or a longer `time_limit`."
        )


def _first_state(
    target: Density,
    plan: _Plan,
    loc: np.ndarray,
    factor: np.ndarray,
    start: str,
    rng: np.random.Generator,
) -> _State:
    """Return where the chains start, or raise if the density is not finite there."""
    white = rng.standard_normal((plan.chains, target.size))
    if start == "prior":
        w = target.prior_loc + target.prior_scale * white
        white = whitened(w, loc, factor)
    values = target.values(colored(white, loc, factor))
    if not np.isfinite(values).all():
        raise ValueError("The log-density is NaN or infinite where a chain starts.")
    return _State(white, loc, factor)


def _run(
    target: Density, plan: _Plan, state: _State, rng: np.random.Generator, verbose: Any
) -> tuple[_State, list[_Chunk]]:
    """Run the chains chunk by chunk; return where they end, and the chunks."""
    moves = _Moves(target, plan)
    chunks = []
    bar = keras.utils.Progbar(_CHUNKS, verbose=1 if verbose == "auto" else verbose)
    for number in range(_CHUNKS):
        if number in (0, plan.chunk_of_refit):
            state = _refitted(state, chunks)
            moves.begin(state)  # the step sizes adapt anew
        key = rng.integers(0, 2**31 - 1, 2).astype(KEY_DTYPE)
        chunk = moves.advance(key)
        chunks.append(chunk)
        state = state._replace(white=chunk.white[-1])
        acceptance = float(chunk.acceptance.mean())
        bar.update(number + 1, [("acceptance", acceptance)])
    return state, chunks


def _refitted(state: _State, chunks: list[_Chunk]) -> _State:
    """Return the state in coordinates that fit the later half of the draws."""
    later_half = chunks[len(chunks) // 2 :]
    recent = [state.white[None]]
    if later_half:
        recent = [chunk.white for chunk in later_half]
    loc, factor, white = refitted(
        state.loc,
        state.factor,
        state.white,
        np.concatenate(recent),
    )
    return _State(white, loc, factor)


def _last_steps(chunks: list[_Chunk], number: int) -> _Chunk:
    """Return the last steps of the chains, after the warm-up."""
    parts = []
    for of_chunks in zip(*chunks, strict=True):
        steps = np.concatenate(of_chunks)
        parts.append(steps[-number:])
    return _Chunk(*parts)


class _Moves:
    """The compiled moves of the chains, with what TFP keeps between two chunks."""

    def __init__(self, target: Density, plan: _Plan) -> None:
        self._target = target
        self._plan = plan
        self._bootstrap = compiled(self._first_results, target.reads)
        self._sample = compiled(self._chunk, target.reads)

    def begin(self, state: _State) -> None:
        """Start at a state, with step sizes that are yet to adapt."""
        target = self._target
        step_sizes = np.full((self._plan.chains, 1), self._plan.first_step)
        self._white = state.white.astype(target.dtype)
        self._arguments = [
            step_sizes.astype(target.dtype),
            state.loc.astype(target.dtype),
            state.factor.astype(target.dtype),
            *target.data,
        ]
        self._results = self._bootstrap(self._white, *self._arguments)

    def advance(self, key: np.ndarray) -> _Chunk:
        """Take the steps of a chunk."""
        parts, self._results = self._sample(self._white, self._results, key, *self._arguments)
        self._white = parts.white[-1]
        return _Chunk(
            ops.convert_to_numpy(parts.white),
            ops.convert_to_numpy(parts.acceptance),
            ops.convert_to_numpy(parts.diverged),
        )

    def _first_results(self, white: Tensor, *arguments: Tensor) -> Any:
        kernel = self._kernel(*arguments)
        return kernel.bootstrap_results(white)

    def _chunk(
        self, white: Tensor, results: Any, key: Tensor, *arguments: Tensor
    ) -> tuple[_Chunk, Any]:
        states, (acceptance, diverged), results = tfp.mcmc.sample_chain(
            self._plan.steps_in_chunk,
            white,
            previous_kernel_results=results,
            kernel=self._kernel(*arguments),
            seed=key,
            num_steps_between_results=self._plan.steps_of_draw - 1,
            trace_fn=self._trace,
            return_final_kernel_results=True,
        )
        return _Chunk(states, acceptance, diverged), results

    def _kernel(self, step_size: Tensor, loc: Tensor, factor: Tensor, *data: Tensor) -> Any:
        """Return a step of all chains, whose step sizes adapt in the warm-up."""

        def log_prob(white: Tensor) -> Tensor:
            value = self._target.log_prob(colored(white, loc, factor), *data)
            value = ops.cast(value, white.dtype)
            # Where one of the chains leaves the numbers, its step is refused.
            impossible = -float("inf") * ops.ones_like(value)
            return ops.where(ops.isfinite(value), value, impossible)

        options = {}
        if self._plan.is_nuts:
            kernel = tfp.mcmc.NoUTurnSampler(log_prob, step_size, max_tree_depth=_TREE_DEPTH)
        elif self._plan.is_walk:
            kernel = tfp.mcmc.MetropolisHastings(RandomWalk(log_prob, step_size))
            options["shrinkage_target"] = step_size  # near the right one from the start
        else:
            kernel = tfp.mcmc.HamiltonianMonteCarlo(log_prob, step_size, self._plan.leapfrog)
            options["step_size_setter_fn"] = self._shortened
        return tfp.mcmc.DualAveragingStepSizeAdaptation(
            kernel,
            self._plan.warmup * self._plan.steps_of_draw * 2 // 5,
            target_accept_prob=ops.cast(_ACCEPTANCE[self._plan.sampler], step_size.dtype),
            **options,
        )

    def _shortened(self, results: Any, step_size: Tensor) -> Any:
        """Set the step size of HMC, not longer than the longest one.

        Beyond a quarter of a Gaussian's period, chains swing between two sides of it.
        """
        longest = ops.cast(self._plan.longest_step, step_size.dtype)
        shortened = ops.minimum(step_size, longest)
        inner = results.accepted_results._replace(step_size=shortened)
        return results._replace(accepted_results=inner)

    def _trace(self, _: Tensor, results: Any) -> tuple[Tensor, Tensor]:
        """Return the acceptance probabilities of a step, and which chains diverged."""
        inner = results.inner_results
        log_ratio = inner.log_accept_ratio
        acceptance = ops.exp(ops.minimum(log_ratio, ops.zeros_like(log_ratio)))
        if self._plan.is_nuts:
            return acceptance, inner.has_divergence
        if self._plan.is_walk:  # has no trajectories that could diverge
            return acceptance, ops.zeros_like(log_ratio, dtype="bool")
        return acceptance, ops.logical_not(log_ratio > _LEAST_LOG_RATIO)


def _warn(plan: _Plan, diagnostics: dict[str, float]) -> None:
    """Warn of chains that do not agree, and of divergences."""
    r_hat = diagnostics[R_HAT]
    if not r_hat < MOST_R_HAT:
        warnings.warn(
            f"The chains do not agree: R-hat is {r_hat:.3f}, and should be below {MOST_R_HAT}. "
            f"Give more than {plan.warmup} steps of `warmup` and {plan.draws} `draws`.",
            stacklevel=4,
        )
    divergences = diagnostics["divergences"]
    if divergences:
        warnings.warn(
            f"{divergences} of {plan.chains * plan.draws} steps diverged: draws may be missing "
            "where the density is steep.",
            stacklevel=4,
        )
