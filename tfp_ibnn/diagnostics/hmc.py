"""Draws from the posterior itself, as a reference for all others."""

import dataclasses
import time
import warnings
from typing import Any

import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn.diagnostics.targets import target_of
from tfp_ibnn.weights import WeightSets
from tfp_ibnn.weights.flat import places_of, split
from tfp_ibnn.weights.hmc import agreement, sample_chains, table, warn_of_chains
from tfp_ibnn.weights.target import Density


@dataclasses.dataclass(repr=False)
class Reference:
    """Draws of a posterior, `samples` (chains, draws, size), from the log-density `target`.

    `target` has `size`, `start`, and of rows (S, size) `values` and `gradients`.
    """

    samples: np.ndarray
    target: Density
    seen: dict[str, float]

    def diagnostics(self) -> dict[str, float]:
        """Return acceptance, divergences, R-hat and effective sample sizes by name."""
        sets = ops.convert_to_tensor(np.swapaxes(self.samples, 0, 1))
        return {**self.seen, **agreement(sets)}

    def report(self) -> str:
        """Return the diagnostics as a table."""
        chains, draws, size = self.samples.shape
        return table(f"{chains} chains of {draws} draws, {size} numbers", self.diagnostics())

    __str__ = report

    def predict(self, x: Any, draws: int = 100, batch_size: int = 256) -> np.ndarray:
        """Return the network's outputs (draws, N, ...) for some of the draws, evenly spread."""
        return self.target.predict(self._spread(draws), x, batch_size)

    def posterior(self, draws: int = 100) -> WeightPosterior:
        """Return some of the draws of weights, for `MonteCarlo`; those of z have `predict`."""
        variables = getattr(self.target, "variables", None)
        if variables is None:
            raise ValueError("There are no draws of weights: use reference.predict(x).")
        model = self.target.network.model
        sets, places = [], places_of(model, variables)
        for row in self._spread(draws):
            values = model.get_weights()
            for place, value in zip(places, split(row, variables), strict=True):
                values[place] = ops.convert_to_numpy(value)
            sets.append(values)
        return WeightSets.of(model, sets)

    def _spread(self, draws: int) -> np.ndarray:
        rows = np.swapaxes(self.samples, 0, 1).reshape(-1, self.target.size)
        count = min(checks.positive_integer("draws", draws), len(rows))
        return rows[np.linspace(0, len(rows) - 1, count).round().astype(int)]


def hmc(
    model: Any,
    data: Any = None,
    *,
    sampler: str = "nuts",
    chains: int = 4,
    draws: int = 500,
    warmup: int = 500,
    start: str = "gaussian",
    time_limit: float = 3600.0,
    seed: int = 0,
    verbose: Any = "auto",
    **options: Any,
) -> Reference:
    """Draw from the exact posterior of a model's z or weights, by NUTS or HMC.

    Several chains run side by side, in coordinates where a Gaussian fitted to the posterior is
    standard, with step sizes that adapt in the warm-up. Cost: a gradient over all data for each
    leapfrog step, some 5 to 100 per draw; what would take longer than `time_limit` is refused.
    A warning tells of chains that do not agree, and of divergences.

    Args:
        model: one with stochastic layers, whose weights stay fixed; a plain model; a posterior over
            weights, whose prior is taken; or a `Density`, without data.
        data: (x, y), or a dataset of such batches that ends.
        sampler: "nuts" or "hmc".
        chains: number of chains, at least 2.
        draws: from each chain, after the warm-up.
        warmup: steps of each chain that are not kept.
        start: "gaussian", at draws of the Gaussian, or "prior": far apart, so that chains which end
            in different modes show in R-hat.
        time_limit: in seconds.
        seed: equal seeds give equal draws.
        verbose: 0 shows no progress.
        **options: `over`: "z", "last_layer" or "weights", all trainable ones; `prior_scale` (1.0),
            of weights; `noise_scale`, `head` and `from_logits` as for `GaussianVI`.

    Example:
        >>> import numpy as np, tfp_ibnn as ibnn
        >>> from keras import ops
        >>> bell = ibnn.diagnostics.Density(lambda w: -ops.sum(w**2, axis=-1) / 2, np.zeros(2))
        >>> ibnn.diagnostics.hmc(bell, sampler="hmc", draws=100, verbose=0).samples.shape
        (4, 100, 2)
    """
    checks.one_of("sampler", sampler, ("nuts", "hmc"))
    checks.one_of("start", start, ("gaussian", "prior"))
    settings = {"chains": checks.positive_integer("chains", chains, least=2)}
    settings["draws"] = checks.positive_integer("draws", draws, least=4)
    settings["warmup"] = checks.positive_integer("warmup", warmup)
    settings["time_limit"] = checks.positive("time_limit", time_limit)
    target, begun = target_of(model, data, verbose=verbose, **options), time.perf_counter()
    rng = np.random.default_rng(checks.whole("seed", seed))
    settings |= {"sampler": sampler, "start": start, "verbose": verbose}
    sets, seen = sample_chains(target, rng, **settings)
    seen["seconds"] = time.perf_counter() - begun
    found = Reference(np.swapaxes(sets, 0, 1), target, seen)
    if verbose:
        print(found)
    warn_of_chains(found.diagnostics()["R-hat, largest"], draws, warmup)
    if seen["divergences"]:
        problem = f"{seen['divergences']:.0f} of {chains * draws} steps diverged"
        warnings.warn(f"{problem}: the draws may miss where the density is steep.", stacklevel=2)
    return found
