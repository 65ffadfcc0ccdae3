"""The one fit of what calibrates an output: a temperature, a scale or a factor of scales."""

import math

import numpy as np
from scipy.optimize import brentq, minimize_scalar
from scipy.special import logsumexp, softmax

BOUNDS = (0.01, 100.0)
"""The bounds between which a temperature is sought."""
DOUBT = 2.0
"""The nats that a temperature of e or 1 / e must gain, on all examples together, in a choice."""

_IMPOSSIBLE = math.log(np.finfo("float64").tiny)
"""In place of the logarithm of 0: 0 * -inf would be NaN."""


def best_temperature(
    log_p: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None, doubt: float = 0.0
) -> float:
    """Return the temperature T with the lowest negative log-likelihood of averaged draws.

        NLL(T) = -mean_i log mean_s softmax(log_p_is / T)[y_i] + doubt * log(T)^2 / N

    It is where the slope in log T is 0: about ten evaluations find that root to the precision of
    the numbers. A search over the NLL itself, which is flat near its minimum, takes more of them
    and is less precise. For one draw, the NLL without doubt has only one minimum.

    The last term is a normal prior over log T. Without it (`doubt` 0) the temperature is that of
    the data alone, and where every prediction is right it is the lower bound: `TemperatureScaling`
    states this exact optimum and warns at a bound. `DOUBT` is for choices between candidates, where
    a few right answers must not make a network certain; its weight vanishes as N grows.

    Args:
        log_p: log-probabilities up to a constant, (examples, draws, classes); float32 is enough.
        y: classes (examples,).
        weight: how often each example counts; None is once.
        doubt: weight of the prior, in nats.

    Returns:
        The temperature, within `BOUNDS`.
    """
    largest = np.max(log_p, axis=-1, keepdims=True)
    log_p = np.maximum(log_p - largest, _IMPOSSIBLE)
    labels = y[:, None, None]
    observed = np.take_along_axis(log_p, labels, axis=-1)
    observed = observed[..., 0]
    count = len(y) if weight is None else weight.sum()

    def slope(log_temperature: float) -> float:
        inverse = math.exp(-log_temperature)
        # d(-log p) / d log T = 1 / T * d log p / d(1 / T)
        of_examples = inverse * _slope_in_inverse(log_p, observed, inverse)
        of_data = np.average(of_examples, weights=weight)
        of_prior = 2 * doubt * log_temperature / count
        return float(of_data) + of_prior

    cold, hot = np.log(BOUNDS)
    if slope(cold) >= 0:
        return BOUNDS[0]
    if slope(hot) <= 0:
        return BOUNDS[1]
    log_temperature = brentq(slope, cold, hot, xtol=1e-9)
    return math.exp(log_temperature)


def _slope_in_inverse(log_p: np.ndarray, observed: np.ndarray, inverse: float) -> np.ndarray:
    """Return the derivatives (examples,) of log mean_s p_s(y) in 1 / T.

    That of log p_s(y) is observed - E[log p_s] under the scaled p_s; the mean over draws s is
    weighted by the share that each has in the averaged probability of y.
    """
    scaled = log_p * inverse
    normalizer = logsumexp(scaled, axis=-1)
    p = np.exp(scaled - normalizer[..., None])
    expected = np.sum(p * log_p, axis=-1)
    log_likelihood = observed * inverse - normalizer
    log_likelihood = log_likelihood.astype("float64")
    share = softmax(log_likelihood, axis=1)
    slope = observed - expected
    return np.sum(share * slope, axis=1)


def best_scale(
    error: np.ndarray,
    spread: np.ndarray,
    unit: np.ndarray,
    start: float,
    weight: np.ndarray | None = None,
) -> float:
    """Return the scale s with the lowest NLL of Gaussians with the variance spread + s^2 * unit.

    The search is over log s from 7 below to 5 above that of `start`.

    Args:
        error: squared errors of the mean, (examples, ...).
        spread: variances of the draws, of the same shape.
        unit: variances that the scale multiplies, of the same shape.
        start: a scale of the right order.
        weight: how often each example counts; None is once.
    """

    def loss(log_scale: float) -> float:
        factor = np.exp(2 * log_scale)
        variance = spread + factor * unit
        each = np.log(variance) + error / variance
        each = each.reshape(len(each), -1)
        of_example = each.mean(axis=1)
        return np.average(of_example, weights=weight)

    center = np.log(start)
    result = minimize_scalar(
        loss, bounds=(center - 7, center + 5), method="bounded", options={"xatol": 1e-6}
    )
    return float(np.exp(result.x))
