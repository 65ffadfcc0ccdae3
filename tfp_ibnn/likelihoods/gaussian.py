"""Numbers under Gaussians, whose standard deviation the network predicts or leaves open."""

import functools
import math
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops
from scipy.special import ndtr
from scipy.stats import norm

from tfp_ibnn._core.backend import Tensor, mean
from tfp_ibnn._core.unrolling import erf
from tfp_ibnn.layers.heads import GaussianHead, gaussian_nll, matched
from tfp_ibnn.likelihoods.base import diagonal, or_nan
from tfp_ibnn.likelihoods.numbers import Numbers
from tfp_ibnn.likelihoods.quantiles import central_interval
from tfp_ibnn.likelihoods.temperature import best_scale


class Point(Numbers):
    """Numbers (examples, width) under Gaussians of one standard deviation that is not predicted.

        log p(y) = sum_d log N(y_d; output_d, scale^2),   S = 1 / scale on the diagonal

    The loss of a prediction is the squared error, since a density needs the scale.

    In `calibrate` the parameter is a standard deviation for each output, which adds to the spread
    of the draws; `scaled` puts it after the outputs. The prediction is a Gaussian with the mean of
    the draws and their total variance, (examples, 2, size); the evidence is RMSE, NLL (summed over
    the numbers), CRPS, and the coverage of 90 % intervals.

    Args:
        width: how many numbers; None if it is unknown.
        scale: the standard deviation, a number or a tensor.
    """

    free_scale = True
    has_density = False
    variants: ClassVar[dict[str, bool]] = {"": True}
    column = "scale"

    def __init__(self, width: int | None = None, scale: float | Tensor = 1.0) -> None:
        super().__init__(width)
        self.scale = scale

    # One network

    def log_prob(self, logits: Tensor, y: Tensor) -> Tensor:
        loc, scale = self._moments(logits)
        targets = matched(y, loc)
        variance = ops.square(scale)
        nll = gaussian_nll(targets, loc, variance)
        return -nll

    def hessian_factors(self, logits: Tensor) -> Tensor:
        _, scale = self._moments(logits)
        return diagonal(1 / scale)

    def _moments(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of each number."""
        scale = ops.cast(self.scale, logits.dtype)
        return logits, scale * ops.ones_like(logits)

    # Many networks

    def draws(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs, and no variance."""
        return outputs, ops.zeros_like(outputs)

    def loss(self, y_true: Any, prediction: dict[str, Tensor]) -> Tensor:
        target, predicted = self.pair(y_true, prediction)
        error = ops.square(target - predicted)
        return ops.mean(error, axis=-1)

    # Calibration

    @property
    def head(self) -> dict[str, Any]:
        return {"head": "point"}

    @property
    def scaled_head(self) -> dict[str, Any]:
        return {"head": "gaussian"}

    def scaled(self, outputs: Tensor, parameter: Any) -> Tensor:
        scales = np.asarray(parameter).tolist()
        # In full precision, and by Keras's own layers, so that a file needs no class for it.
        constant = keras.layers.Rescaling(0.0, scales, dtype="float32")
        concatenate = keras.layers.Concatenate(dtype="float32")
        return concatenate([outputs, constant(outputs)])

    def fit(self, outputs: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None) -> Any:
        center, spread, unit = self._variances(outputs)
        error = np.square(y - center)
        mean_error = np.average(error, axis=0, weights=weight)
        starts = np.sqrt(np.maximum(mean_error, 1e-12))
        scales = [
            best_scale(*of_number, weight)
            for of_number in zip(error.T, spread.T, unit.T, starts, strict=True)
        ]
        return np.array(scales)

    def predict(self, outputs: np.ndarray, parameter: Any) -> np.ndarray:
        center, spread, unit = self._variances(outputs)
        factor = np.square(parameter)
        variance = spread + factor * unit
        return np.stack([center, variance], axis=1)

    def _variances(self, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return mean and variance of the draws, and the variance that the parameter scales."""
        draws = outputs.astype("float64")
        center = draws.mean(axis=1)
        return center, draws.var(axis=1), np.ones_like(center)

    def nll(self, prediction: np.ndarray, y: np.ndarray) -> np.ndarray:
        variance = prediction[:, 1]
        error = np.square(y - prediction[:, 0])
        log_volume = np.log(2 * np.pi * variance)
        distance = error / variance
        twice = log_volume + distance
        return np.sum(twice, axis=1) / 2

    def evidence(
        self,
        prediction: np.ndarray,
        y: np.ndarray,
        seed: int,
        weight: np.ndarray | None = None,
    ) -> dict[str, float]:
        average = functools.partial(np.average, weights=weight)
        error = y - prediction[:, 0]
        squared_error = np.square(error).mean(axis=1)
        crps = _crps(prediction, y).mean(axis=1)
        (coverage,) = self.coverage(prediction, y, np.array([0.9]), weight)
        return {
            "RMSE": float(np.sqrt(average(squared_error))),
            "NLL": float(average(self.nll(prediction, y))),
            "CRPS": float(average(crps)),
            "90 % coverage": float(coverage),
        }

    def coverage(
        self,
        prediction: np.ndarray,
        y: np.ndarray,
        levels: np.ndarray,
        weight: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return the share of targets in central intervals of each probability.

        Args:
            prediction: from `predict`.
            y: as `targets` gives them.
            levels: probabilities (levels,).
            weight: how often each example counts; None is once.

        Returns:
            Shares (levels,).
        """
        center = prediction[:, 0]
        scale = np.sqrt(prediction[:, 1])
        error = np.abs(y - center)
        z = np.ravel(error / scale)
        level_at_target = 2 * ndtr(z) - 1
        levels = levels[:, None]
        is_inside = level_at_target <= levels
        if weight is not None:
            weight = np.repeat(weight, y.shape[1])
        return np.average(is_inside, axis=1, weights=weight)

    def strata(self, y: np.ndarray) -> np.ndarray:
        """Return strata of ten examples with similar first targets."""
        order = np.argsort(y[:, 0])
        rank = np.argsort(order)
        return rank // 10

    def noise_scale(self, parameter: Any) -> float | None:
        variance = np.mean(np.square(parameter))
        scale = np.sqrt(variance)
        return float(scale)


class Gaussian(Point):
    """Numbers (examples, width / 2) with their standard deviations: the output of a `GaussianHead`.

    S S^T is the expected Hessian: S is diagonal, with 1 / scale for the means, and
    sqrt(2) / scale * d scale / d logit for the logits of the scales. Intervals are those of new
    observations, quantiles of the mixture of all draws; the loss is that of a Gaussian with the
    total variance. In `calibrate` the parameter is a factor for all standard deviations.

    Args:
        width: twice the number of numbers; None if it is unknown.
        layer: the `GaussianHead` at the end; without one, outputs and logits are the same.
    """

    free_scale = False
    has_density = True
    predicts_scale = True
    variants: ClassVar[dict[str, bool]] = {"": False, " + scale": True}
    column = "factor"

    def __init__(self, width: int | None = None, layer: GaussianHead | None = None) -> None:
        super().__init__(width)
        self.layer = layer
        self.end = "linear" if layer is None else "gaussian"

    @property
    def size(self) -> int | None:
        return None if self.width is None else self.width // 2

    # One network

    def outputs(self, logits: Tensor) -> Tensor:
        return logits if self.layer is None else self.layer(logits)

    def hessian_factors(self, logits: Tensor) -> Tensor:
        _, scale = self._moments(logits)
        slope = ops.ones_like(scale)
        if self.layer is not None:  # whose scale is a softplus
            _, raw_scale = ops.split(logits, 2, axis=-1)
            slope = ops.sigmoid(raw_scale)
        of_mean = 1 / scale
        of_scale = math.sqrt(2) * slope / scale
        of_both = ops.concatenate([of_mean, of_scale], axis=-1)
        return diagonal(of_both)

    def _moments(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.outputs(logits)
        loc, scale = ops.split(outputs, 2, axis=-1)
        return loc, scale

    # Many networks

    def draws(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means and the variances."""
        if outputs.shape[-1] % 2:
            raise ValueError(f"A gaussian output has an even size; got {outputs.shape[-1]}.")
        loc, scale = ops.split(outputs, 2, axis=-1)
        scale = or_nan(scale, scale >= 0)
        variance = ops.square(scale)
        return loc, variance

    def interval(self, draws: Tensor, within: Tensor, level: float) -> tuple[Tensor, Tensor]:
        scale = ops.sqrt(within)
        return mixture_interval(draws, scale, level)

    def loss(self, y_true: Any, prediction: dict[str, Tensor]) -> Tensor:
        target, predicted = self.pair(y_true, prediction)
        variance = prediction["total_variance"]
        return gaussian_nll(target, predicted, variance)

    # Calibration

    @property
    def head(self) -> dict[str, Any]:
        return {"head": "gaussian"}

    def scaled(self, outputs: Tensor, parameter: Any) -> Tensor:
        factors = [1.0] * self.size
        factors += [float(parameter)] * self.size
        rescaling = keras.layers.Rescaling(factors, dtype="float32")
        return rescaling(outputs)

    def fit(self, outputs: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None) -> float:
        center, spread, unit = self._variances(outputs)
        error = np.square(y - center)
        return best_scale(error, spread, unit, 1.0, weight)

    def _variances(self, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        outputs = outputs.astype("float64")
        draws, scales = np.split(outputs, 2, axis=-1)
        spread = draws.var(axis=1)
        unit = np.square(scales).mean(axis=1)
        return draws.mean(axis=1), spread, unit

    def noise_scale(self, parameter: Any) -> float | None:
        return None


def mixture_interval(loc: Tensor, scale: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """Return the bounds of the central intervals of equal mixtures of Gaussians.

    Args:
        loc: means (draws, ...).
        scale: standard deviations, of the same shape.
        level: probability of the interval, between 0 and 1.
    """

    def cdf(x: Tensor) -> Tensor:
        return _mixture_cdf(loc, scale, x)

    # Each Gaussian holds all but 1e-15 of its mass within 8 standard deviations.
    reach = 8 * scale
    lower = ops.min(loc - reach, axis=0)
    upper = ops.max(loc + reach, axis=0)
    return central_interval(cdf, lower, upper, level)


def _mixture_cdf(loc: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    z = (x - loc) / scale
    cdf = 0.5 * (1 + erf(z * 2.0**-0.5))
    return mean(cdf, axis=0)


def _crps(prediction: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the continuous ranked probability score of Gaussians, (examples, size)."""
    error = y - prediction[:, 0]
    scale = np.sqrt(prediction[:, 1])
    z = error / scale
    cdf = ndtr(z)
    density = norm.pdf(z)
    of_distance = z * (2 * cdf - 1)
    of_density = 2 * density
    of_spread = 1 / np.sqrt(np.pi)
    return scale * (of_distance + of_density - of_spread)
