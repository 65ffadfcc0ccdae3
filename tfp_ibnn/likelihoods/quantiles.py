"""Quantiles of distributions of which only the distribution function is known."""

from collections.abc import Callable
from typing import Any

from keras import ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.unrolling import repeat

_HALVINGS = 40
"""Bisections that narrow 16 standard deviations down to the precision of float32."""

Cdf = Callable[[Tensor], Tensor]
"""A distribution function, of points of the shape of the ends of an interval."""


def central_interval(cdf: Cdf, lower: Tensor, upper: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """Return the bounds of the central interval of a probability, by bisection.

    Args:
        cdf: the distribution function.
        lower: points below the interval.
        upper: points above it.
        level: the probability, between 0 and 1.
    """
    tail = (1 - level) / 2
    first = quantile(cdf, lower, upper, tail)
    last = quantile(cdf, lower, upper, 1 - tail)
    return first, last


def quantile(cdf: Cdf, lower: Tensor, upper: Tensor, probability: float | Tensor) -> Tensor:
    """Return the points at which a distribution function has a value, by bisection.

    Args:
        cdf: the distribution function.
        lower: points below.
        upper: points above.
        probability: the value, or one for each point.
    """

    def halve(_: Any, ends: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        lower, upper = ends
        middle = (lower + upper) / 2
        reached = cdf(middle)
        is_below = reached < probability
        lower = ops.where(is_below, middle, lower)
        upper = ops.where(is_below, upper, middle)
        return lower, upper

    ends = (lower, upper)
    lower, upper = repeat(_HALVINGS, halve, ends)
    return (lower + upper) / 2
