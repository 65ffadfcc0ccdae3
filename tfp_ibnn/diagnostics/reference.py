"""Draws from the posterior itself, as a reference for all others."""

import dataclasses
from typing import Any

import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn.diagnostics.targets import target_of
from tfp_ibnn.weights import WeightSets
from tfp_ibnn.weights.agreement import table
from tfp_ibnn.weights.chains import sample_chains
from tfp_ibnn.weights.density import Density
from tfp_ibnn.weights.vectors import places_of, split


@dataclasses.dataclass(repr=False)
class Reference:
    """Draws of a posterior, which `hmc` returns.

    Attributes:
        samples: (chains, draws, size), the draws.
        target: the log-density that they are drawn from. It has `size`, `start`, and `values` and
            `gradients` of rows (S, size).
        seen: the diagnostics, see `diagnostics`.
    """

    samples: np.ndarray
    target: Density
    seen: dict[str, float]

    def diagnostics(self) -> dict[str, float]:
        """Return the diagnostics by name.

        Returns:
            A dict with these keys:

            - "acceptance": the mean probability that a step is accepted;
            - "divergences": the number of steps that diverged, which those of Metropolis cannot;
            - "R-hat, largest": over all numbers; near 1 if the chains agree;
            - "effective draws, fewest" and "effective draws, median": how many independent draws
                are worth as much as these, over all numbers;
            - "seconds": the time that the chains took, the fit of their Gaussian included.
        """
        return self.seen

    def report(self) -> str:
        """Return the diagnostics as a table."""
        draws_first = np.swapaxes(self.samples, 0, 1)
        return table(draws_first.shape, self.seen)

    __str__ = report

    def predict(self, x: Any, draws: int = 100, batch_size: int = 256) -> np.ndarray:
        """Return the network's outputs for some of the draws, evenly spread.

        Args:
            x: (N, ...), inputs.
            draws: how many draws to use; at most as many as there are.
            batch_size: how many examples to run at a time.

        Returns:
            Outputs (draws, N, ...), in the form that the network gives.
        """
        return self.target.predict(self._spread(draws), x, batch_size)

    def posterior(self, draws: int = 100) -> WeightPosterior:
        """Return some of the draws of weights, evenly spread, for `MonteCarlo`.

        Args:
            draws: how many; at most as many as there are.

        Returns:
            A posterior of that many weight sets.

        Raises:
            ValueError: if the draws are not of weights but of z, which have `predict` alone.
        """
        variables = getattr(self.target, "variables", None)
        if variables is None:
            raise ValueError("These are not draws of weights: use reference.predict(x).")
        model = self.target.network.model
        rows = self._spread(draws)
        places = places_of(model, variables)
        parts = split(rows, variables)
        columns = [[value] * len(rows) for value in model.get_weights()]
        for place, part in zip(places, parts, strict=True):
            columns[place] = ops.convert_to_numpy(part)
        weight_sets = list(zip(*columns, strict=True))
        return WeightSets.of(model, weight_sets)

    def _spread(self, draws: int) -> np.ndarray:
        """Return some of the draws as rows (draws, size), evenly spread over the chains' length."""
        rows = np.swapaxes(self.samples, 0, 1)
        rows = rows.reshape(-1, self.target.size)
        draws = checks.positive_integer("draws", draws)
        count = min(draws, len(rows))
        places = np.linspace(0, len(rows) - 1, count)
        places = places.round().astype(int)
        return rows[places]


def hmc(
    model: Any,
    data: Any = None,
    *,
    over: str | None = None,
    prior_scale: float | None = None,
    noise_scale: float | None = None,
    head: str | None = None,
    from_logits: bool | None = None,
    sampler: str = "nuts",
    chains: int = 4,
    draws: int = 500,
    warmup: int = 500,
    start: str = "gaussian",
    time_limit: float = 3600.0,
    seed: int = 0,
    verbose: Any = "auto",
) -> Reference:
    """Draw from the exact posterior of a model's z or weights, by NUTS, HMC or Metropolis.

    Several chains run side by side, in coordinates where a Gaussian fitted to the posterior is
    standard, with step sizes that adapt in the warm-up. Cost: a gradient over all data for each
    leapfrog step, some 5 to 100 per draw; with "metropolis" a value for each step, and as many
    steps per draw as there are numbers. It warns of chains that do not agree, and of divergences.

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
        sampler: "nuts"; "hmc"; or "metropolis", a random walk whose steps adapt until 0.234 of them
            are accepted.
        chains: number of independent chains, at least 2.
        draws: from each chain, after the warm-up.
        warmup: steps of each chain that are not kept.
        start: where chains start: "gaussian", at draws of the fitted Gaussian, or "prior", far
            apart, so that R-hat shows several modes.
        time_limit: seconds; a run that takes longer, by a gradient that is timed, is refused.
        seed: equal seeds give equal draws.
        verbose: 0 shows no progress.

    Returns:
        A `Reference`: draws (chains, draws, size) in `samples`, and their `diagnostics()`.

    Raises:
        ValueError: if the run would take longer than `time_limit`, or the log-density is not finite
            where a chain starts.

    Example:
        >>> import numpy as np, tfp_ibnn as ibnn
        >>> from keras import ops
        >>> bell = ibnn.diagnostics.Density(lambda w: -ops.sum(w**2, axis=-1) / 2, np.zeros(2))
        >>> ibnn.diagnostics.hmc(bell, sampler="hmc", draws=100, verbose=0).samples.shape
        (4, 100, 2)
    """
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
    sets, diagnostics = sample_chains(
        target,
        checks.whole("seed", seed),
        sampler=sampler,
        chains=chains,
        draws=draws,
        warmup=warmup,
        start=start,
        time_limit=time_limit,
        verbose=verbose,
    )
    return Reference(np.swapaxes(sets, 0, 1), target, diagnostics)
