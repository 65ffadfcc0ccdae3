"""Draws from the posterior itself, as a reference for all others."""

import dataclasses
from typing import Any

import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn.diagnostics.targets import target_of
from tfp_ibnn.weights import WeightSets
from tfp_ibnn.weights.flat import places_of, split
from tfp_ibnn.weights.hmc import sample_chains, table
from tfp_ibnn.weights.target import Density


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
