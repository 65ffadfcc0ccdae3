"""What all outputs that predict numbers share."""

from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.layers.heads import matched
from tfp_ibnn.likelihoods.arrays import check_each
from tfp_ibnn.likelihoods.base import Likelihood
from tfp_ibnn.metrics._mean import RootMeanSquaredError, RunningMean


class Numbers(Likelihood):
    """Numbers, of which a network predicts the mean and perhaps the variance.

    A subclass defines `draws`, the means and variances, and `loss`, minus the log-density of
    the targets. Targets are finite numbers (examples, size), of (N,) too if the size is 1. The
    divergence of a draw from the mean is the squared distance, so a prediction is split by the law
    of total variance: `aleatoric` is the mean of the draws' variances, `epistemic` the variance of
    their means. Metrics see targets and means.

    Args:
        width: size of the last axis of the outputs; None if it is unknown.
    """

    has_density: bool = True
    """Whether `loss` is a log-density, so that it is scored as NLL."""

    @property
    def size(self) -> int | None:
        """How many numbers an example has."""
        return self.width

    def targets(self, y: Any, *, what: str = "`y`") -> np.ndarray:
        return finite_numbers(y, self.size, what)

    def divergence(self, draw: Tensor, mean: Tensor) -> Tensor:
        return ops.square(draw - mean)

    def statistics(self, summary: Any) -> dict[str, Tensor]:
        """Return the mean and the variances."""
        aleatoric = summary.within / summary.count
        epistemic = summary.between / summary.count
        return {
            "mean": summary.mean,
            "aleatoric": aleatoric,
            "epistemic": epistemic,
            "total_variance": aleatoric + epistemic,
        }

    def scores(self) -> list[keras.metrics.Metric]:
        """Return the root of the mean squared error, and the NLL where there is a density."""
        scores = [RootMeanSquaredError("rmse")]
        if self.has_density:
            scores.append(RunningMean("nll"))
        return scores

    def pair(self, y_true: Any, prediction: dict[str, Tensor]) -> tuple[Any, Tensor]:
        return matched(y_true, prediction["mean"]), prediction["mean"]


def finite_numbers(y: Any, width: int, what: str) -> np.ndarray:
    """Return numbers (examples, width), or raise.

    Args:
        y: numbers (N, width), or (N,) if the width is 1.
        width: how many there are for each example.
        what: what the user calls them, for errors.
    """
    y = np.asarray(y)
    if y.ndim == 1 and width == 1:
        y = y[:, None]
    if y.shape[1:] != (width,):
        raise ValueError(f"{what} must have the shape (N, {width}); got {y.shape}.")
    check_each(y, np.isfinite, what, "finite numbers")
    return y


def diagonal(values: Tensor) -> Tensor:
    """Return diagonal matrices (examples, width, width) of values (examples, width)."""
    identity = ops.eye(values.shape[-1], dtype=values.dtype)
    return values[:, :, None] * identity
