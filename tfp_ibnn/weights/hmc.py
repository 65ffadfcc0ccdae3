"""Hamiltonian Monte Carlo over the last layer's weights."""

import math
import time
import warnings
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import KEY_DTYPE, Tensor, compiled, matmul, mean, tfp
from tfp_ibnn.weights.gaussian_vi import GaussianVI
from tfp_ibnn.weights.target import LastLayerPosterior, Target

_MOST_WEIGHTS = 5_000
_MOST_NUMBERS = 2**28


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class LastLayerHMC(LastLayerPosterior):
    """Draws from the exact posterior of the last layer's weights, by Hamiltonian Monte Carlo.

    Log-density: log p(y | x, w) + log p(w), with the prior w ~ N(0, prior_scale^2), on cached
    features. A `GaussianVI` of full covariance comes first; the chains start from its draws and run
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
        **kwargs: `prior_scale` (1.0), `noise_scale`, `head` and `from_logits` as for `GaussianVI`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, "sigmoid")])
        >>> posterior = ibnn.LastLayerHMC(model, draws=50, warmup=50)
        >>> posterior = posterior.fit(x, y, verbose=0)  # doctest: +SKIP
        >>> posterior.count
        200
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        chains: int = 4,
        draws: int = 250,
        warmup: int = 300,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, **kwargs)
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
        gaussian = GaussianVI(self.network, prior_scale=self.prior_scale)
        gaussian.fit_to(target, rng, verbose, 50)
        loc, factor = (ops.convert_to_numpy(v.value) for v in (gaussian.loc, gaussian.scale))
        leapfrog = math.ceil(1.5 * self.size**0.25)

        def run(start: Tensor, step_size: Tensor, key: Tensor, loc: Tensor, *data: Tensor) -> Any:
            # Of all chains together; where one of them leaves the numbers, its step is refused.
            def log_prob(white: Tensor) -> Tensor:
                value = target.log_prob(loc + matmul(white, ops.transpose(data[0])), *data[1:])
                return ops.where(ops.isfinite(value), value, -float("inf") * ops.ones_like(value))

            kernel = tfp.mcmc.DualAveragingStepSizeAdaptation(
                tfp.mcmc.HamiltonianMonteCarlo(log_prob, step_size, leapfrog),
                num_adaptation_steps=self.warmup * 4 // 5,
                target_accept_prob=ops.cast(0.8, start.dtype),
            )
            options = {"num_burnin_steps": self.warmup, "kernel": kernel, "seed": key}
            options["trace_fn"] = lambda _, results: results.inner_results.is_accepted
            return tfp.mcmc.sample_chain(self.draws, start, **options)

        begun, dtype = time.perf_counter(), target.dtype
        start = rng.standard_normal((self.chains, self.size)).astype(dtype)
        step_size = np.full((self.chains, 1), 1.5 / leapfrog, dtype)
        key = rng.integers(0, 2**31 - 1, 2).astype(KEY_DTYPE)
        arrays = (start, step_size, key, loc, factor, *target.data)
        white, accepted = map(ops.convert_to_numpy, compiled(run, [])(*arrays))
        if not np.isfinite(white).all():
            raise ValueError("A chain became NaN or infinite: give a smaller `prior_scale`.")
        self._sets.assign(loc + white @ factor.T)
        self._acceptance.assign(accepted.mean())
        r_hat = self.diagnostics()["R-hat, largest"]
        if verbose:
            print(f"{self.report()}\n{time.perf_counter() - begun:.1f} s")
        if not r_hat < 1.1:
            problem = f"The chains do not agree: R-hat is {r_hat:.3f}, and should be below 1.1"
            more = f"more than {self.warmup} steps of `warmup` and {self.draws} `draws`"
            warnings.warn(f"{problem}. Give {more}.", stacklevel=3)

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
        sets = ops.convert_to_tensor(self._sets)
        r_hat = tfp.mcmc.potential_scale_reduction(sets, split_chains=self.draws % 2 == 0)
        options = {"filter_beyond_positive_pairs": True, "cross_chain_dims": 1}
        ess = tfp.mcmc.effective_sample_size(sets, **options)
        r_hat, ess = ops.convert_to_numpy(r_hat), ops.convert_to_numpy(ess)
        return {
            "acceptance": float(ops.convert_to_numpy(self._acceptance.value)),
            "R-hat, largest": float(r_hat.max()),
            "effective draws, fewest": float(ess.min()),
            "effective draws, median": float(np.median(ess)),
        }

    def report(self) -> str:
        """Return the diagnostics as a table."""
        head = f"{self.chains} chains of {self.draws} draws, {self.size} weights"
        rows = [f"{name:<24} {value:10.3f}" for name, value in self.diagnostics().items()]
        return "\n".join([head, *rows])
