"""Functions of concentrations, of a Dirichlet or Beta distribution, by their logarithms.

float32 is enough: large terms that cancel are left out, and the differences are series. They need
no special functions of the backend, so that files for other runtimes have them too.
"""

import math

from keras import ops

from tfp_ibnn._core.backend import Tensor

_SHIFT = 6
"""By how much arguments of the gamma function are raised, where its series has eight digits."""
_LOG_BOUNDS = (-80.0, 80.0)
"""Of logarithms of concentrations, whose exponentials stay finite in float32."""


def information(log_a: Tensor) -> Tensor:
    """Return the share of each class in the mutual information of class and probabilities.

        m_c (g(a_c) - g(a_0)),   g(a) = digamma(a + 1) - log(a)

    Args:
        log_a: logarithms of concentrations, (..., classes).

    Returns:
        Nats (..., classes), whose sum is the mutual information.
    """
    log_mean = ops.log_softmax(log_a, axis=-1)  # of any number of axes, unlike `softmax`
    mean = ops.exp(log_mean)
    log_total = ops.logsumexp(log_a, axis=-1, keepdims=True)
    of_class = digamma_excess(log_a)
    of_total = digamma_excess(log_total)
    return mean * (of_class - of_total)


def dirichlet_nll(log_a: Tensor, mean_log_p: Tensor) -> Tensor:
    """Return minus the mean log-density of class probabilities under a Dirichlet distribution.

    By Stirling's formula, whose remainder is r, lgamma(a) = (a - 1/2) log a - a + r(a) + const:

        a_0 KL[m || p] + (log a_0 - sum_c log a_c) / 2 + sum_c r(a_c) - r(a_0) + sum_c log p_c
            + (K - 1) / 2 log(2 pi)

    Args:
        log_a: logarithms of concentrations, (..., classes).
        mean_log_p: logarithms of probabilities, averaged over what is observed, (..., classes).

    Returns:
        Nats, (...,).
    """
    log_mean = ops.log_softmax(log_a, axis=-1)
    log_total = ops.logsumexp(log_a, axis=-1)
    log_ratio = log_mean - mean_log_p
    mean = ops.exp(log_mean)
    total = ops.exp(log_total)
    divergence = ops.sum(mean * log_ratio, axis=-1)
    sum_of_logs = ops.sum(log_a, axis=-1)
    half_logs = (log_total - sum_of_logs) / 2
    of_classes = ops.sum(stirling_remainder(log_a), axis=-1)
    of_total = stirling_remainder(log_total)
    remainders = of_classes - of_total
    freedom = log_a.shape[-1] - 1
    constant = freedom / 2 * math.log(2 * math.pi)
    of_density = ops.sum(mean_log_p, axis=-1)
    return total * divergence + half_logs + remainders + of_density + constant


def digamma_excess(log_a: Tensor) -> Tensor:
    """Return g(a) = digamma(a + 1) - log(a), about 1 / (2 a) for large a.

    digamma(a + 1) = digamma(y) - sum_{k=1..5} 1 / (a + k) for y = a + 6, where
    digamma(y) = log y - 1 / (2 y) - 1 / (12 y^2) + 1 / (120 y^4) - 1 / (252 y^6).

    Args:
        log_a: logarithms of a.
    """
    a, log_ratio = _raised(log_a)
    y = a + _SHIFT
    inverse = 1 / y
    square = inverse * inverse
    series = 1 / 120 - square / 252
    series = 1 / 12 - square * series
    half = inverse / 2 + square * series
    steps = 0
    for k in range(1, _SHIFT):
        steps = steps + 1 / (a + k)
    return log_ratio - steps - half


def stirling_remainder(log_a: Tensor) -> Tensor:
    """Return r(a) = lgamma(a) - (a - 1/2) log(a) + a - log(2 pi) / 2, about 1 / (12 a).

    lgamma(a) = lgamma(y) - sum_{k=0..5} log(a + k) for y = a + 6, where
    r(y) = 1 / (12 y) - 1 / (360 y^3) + 1 / (1260 y^5).

    Args:
        log_a: logarithms of a.
    """
    a, log_ratio = _raised(log_a)
    y = a + _SHIFT
    inverse = 1 / y
    square = inverse * inverse
    series = 1 / 360 - square / 1260
    series = 1 / 12 - square * series
    steps = 0
    for k in range(1, _SHIFT):
        ratio = (_SHIFT - k) / (a + k)
        steps = steps + ops.log1p(ratio)
    large = (a + 0.5) * log_ratio - _SHIFT
    return large + steps + inverse * series


def _raised(log_a: Tensor) -> tuple[Tensor, Tensor]:
    """Return a, and log((a + 6) / a)."""
    log_a = ops.clip(log_a, *_LOG_BOUNDS)
    a = ops.exp(log_a)
    inverse = ops.exp(-log_a)
    log_ratio = ops.log1p(_SHIFT * inverse)
    return a, log_ratio
