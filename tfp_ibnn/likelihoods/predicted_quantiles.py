"""Numbers of which a network predicts quantiles."""

import itertools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from scipy.special import ndtri

from tfp_ibnn._core.backend import Tensor, mean
from tfp_ibnn._core.unrolling import erf
from tfp_ibnn.layers.quantiles import (
    LEVELS,
    checked_levels,
    middle_of,
    pinball_loss,
    quantiles_of,
)
from tfp_ibnn.likelihoods.arrays import or_nan
from tfp_ibnn.likelihoods.numbers import Numbers
from tfp_ibnn.likelihoods.quantiles import quantile
from tfp_ibnn.metrics._mean import RunningMean

_SAME_LEVEL = 1e-6
_WIDEST_GAP = 0.1 + _SAME_LEVEL
"""Between levels, 0 and 1 among them, up to which the CRPS is computed."""
_LEAST = 1e-30
"""The least distance of quantiles that divides."""


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Quantiles(Numbers):
    """Numbers of which a network predicts the quantiles: the output of a `QuantileHead`.

    A prediction has `quantiles` (N, ..., D, L), its `mean` is that of the draws' medians (of the
    level nearest to 0.5), and `epistemic` their variance. Quantiles have no density, mean or
    variance, so there is no `nll`, `aleatoric` or `total_variance`. Crossing quantiles are sorted.

    The quantiles of one network are its own; those of several draws are the quantiles of their
    equal mixture, which widen where draws disagree. For this, each draw's distribution is taken to
    be normal between neighboring quantiles, and beyond the outermost ones: exact for normal
    distributions, and an approximation for others. Averages of the draws' quantiles, which do not
    widen, can be had of `MonteCarlo.draw`.

    The scores are the root of the mean squared error of `mean`, the mean pinball loss, and, if
    no two neighbors among 0, the levels and 1 are more than 0.1 apart, the CRPS by the trapezoidal
    rule.

    Args:
        levels: of the quantiles, increasing, between 0 and 1.
        width: number of levels times number of numbers; None if it is unknown.
    """

    has_density = False
    needs_all_draws = True

    def __init__(self, levels: Any = LEVELS, width: int | None = None) -> None:
        super().__init__(width)
        self.levels = checked_levels(levels)

    @property
    def size(self) -> int | None:
        return None if self.width is None else self.width // len(self.levels)

    # Many networks

    def draws(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the quantiles (draws, ..., D, L), and no variance, which they do not have."""
        quantiles = quantiles_of(outputs, self.levels)
        total = ops.sum(ops.abs(quantiles), axis=-1, keepdims=True)
        quantiles = or_nan(ops.sort(quantiles, axis=-1), total < float("inf"))
        return quantiles, ops.zeros_like(quantiles[..., 0])

    def divergence(self, draw: Tensor, mean: Tensor) -> Tensor:
        return ops.square(self.public(draw) - self.public(mean))

    def public(self, draws: Tensor) -> Tensor:
        """Return the medians."""
        return draws[..., middle_of(self.levels)]

    def statistics(self, summary: Any) -> dict[str, Tensor]:
        """Return the mean and the variance of the medians."""
        return {
            "mean": self.public(summary.mean),
            "epistemic": summary.between / summary.count,
        }

    def check_interval(self, level: float) -> None:
        self._places_of(level)

    def interval(self, draws: Tensor, within: Tensor, level: float) -> tuple[Tensor, Tensor]:
        places = self._places_of(level)
        bounds = mixture_quantiles(draws, self.levels, places)
        return bounds[..., 0], bounds[..., 1]

    def _places_of(self, level: float) -> tuple[int, int]:
        """Return the places of the levels at which an interval ends, or raise."""
        tail = (1 - level) / 2
        places = []
        for wanted in (tail, 1 - tail):
            distances = np.abs(np.subtract(self.levels, wanted))
            if distances.min() > _SAME_LEVEL:
                raise ValueError(
                    f"An interval of {level:.4g} ends at quantiles {tail:.4g} and {1 - tail:.4g}, "
                    f"but the network predicts {self.levels}: give QuantileHead and PinballLoss "
                    f"these levels, or {self._remedy()}."
                )
            places.append(int(np.argmin(distances)))
        return places[0], places[1]

    def _remedy(self) -> str:
        """Return how to have another interval, for an error."""
        for place, low in enumerate(self.levels):
            high = self.levels[-1 - place]
            if low < high and abs(low + high - 1) <= _SAME_LEVEL:
                return f"take ibnn.MonteCarlo(model, interval={high - low:.4g})"
        return "use the entry `quantiles` of the prediction"

    def of_one(self, draws: Tensor, within: Tensor) -> dict[str, Tensor]:
        return {"mean": self.public(draws)[0], "quantiles": draws[0]}

    def of_all_draws(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return the `quantiles` (examples, ..., D, L) of the mixture of all draws."""
        draws, _ = self.draws(outputs)
        places = range(len(self.levels))
        return {"quantiles": mixture_quantiles(draws, self.levels, places)}

    # Scores

    def scores(self) -> list[keras.metrics.Metric]:
        """Return the error of the medians, the pinball loss, and perhaps the CRPS."""
        scores = [*super().scores(), RunningMean("pinball")]
        if np.diff(self.levels, prepend=0, append=1).max() <= _WIDEST_GAP:
            scores.append(RunningMean("crps"))
        return scores

    def update(
        self,
        scores: Sequence[keras.metrics.Metric],
        y_true: Any,
        prediction: dict[str, Tensor],
        sample_weight: Any,
    ) -> None:
        rmse, pinball, *of_crps = scores
        super().update([rmse, pinball], y_true, prediction, sample_weight)
        for score in of_crps:
            score.update_state(self._crps(y_true, prediction), sample_weight=sample_weight)

    def loss(self, y_true: Any, prediction: dict[str, Tensor]) -> Tensor:
        losses = self._pinball_losses(y_true, prediction)
        return ops.mean(losses, axis=(-2, -1))

    def _pinball_losses(self, y_true: Any, prediction: dict[str, Tensor]) -> Tensor:
        """Return the pinball losses (..., D, L)."""
        target, _ = self.pair(y_true, prediction)
        return pinball_loss(target, prediction["quantiles"], self.levels)

    def _crps(self, y_true: Any, prediction: dict[str, Tensor]) -> Tensor:
        """Return twice the integral of the pinball loss over all levels; at 0 and 1 it is 0."""
        losses = self._pinball_losses(y_true, prediction)
        ends = np.array([0.0, *self.levels, 1.0])
        widths = (ends[2:] - ends[:-2]) / 2
        weights = ops.convert_to_tensor(widths, losses.dtype)
        integral = ops.sum(weights * losses, axis=-1)
        return 2 * ops.mean(integral, axis=-1)


def mixture_quantiles(draws: Tensor, levels: tuple[float, ...], places: Sequence[int]) -> Tensor:
    """Return quantiles of the equal mixture of distributions that are known by their quantiles.

    Each lies between the same quantiles of the draws, where bisection finds it.

    Args:
        draws: quantiles (draws, ..., L) that do not cross.
        levels: of the quantiles.
        places: of the levels that are wanted.

    Returns:
        The quantiles (..., places).
    """
    of_places = [draws[..., place] for place in places]
    wanted = ops.stack(of_places, axis=-1)
    if draws.shape[0] == 1:
        return wanted[0]
    probabilities = [levels[place] for place in places]

    def cdf(x: Tensor) -> Tensor:
        return _mixture_cdf(draws, levels, x)

    lower = ops.min(wanted, axis=0)
    upper = ops.max(wanted, axis=0)
    return quantile(cdf, lower, upper, ops.convert_to_tensor(probabilities, draws.dtype))


def _mixture_cdf(draws: Tensor, levels: tuple[float, ...], x: Tensor) -> Tensor:
    """Return the distribution function of the mixture at points (..., P).

    In each draw the normal score of x is linear between neighboring quantiles, and beyond them all.
    """
    scores = ndtri(levels).tolist()
    z = scores[0]
    last = len(scores) - 2
    for place, (first, second) in enumerate(itertools.pairwise(scores)):
        start = draws[..., place, None]
        stop = draws[..., place + 1, None]
        share = (x - start) / ops.maximum(stop - start, _LEAST)
        if place > 0:
            share = ops.maximum(share, 0)
        if place < last:
            share = ops.minimum(share, 1)
        z = z + (second - first) * share
    cdf = 0.5 * (1 + erf(z * 2.0**-0.5))
    return mean(cdf, axis=0)
