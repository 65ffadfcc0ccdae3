"""Quantiles of distributions of which only the distribution function is known."""

from collections.abc import Callable
from typing import Any

from keras import ops

from tfp_ibnn._core.backend import Tensor

_HALVINGS = 40
"""Bisections that narrow 16 standard deviations down to the precision of float32."""


def bisected(
    cdf: Callable[[Tensor], Tensor], lower: Tensor, upper: Tensor, probability: float
) -> Tensor:
    """Return the point at which a distribution function has a value, by bisection.

    Args:
        cdf: the distribution function, of points of the shape of the ends.
        lower: points below the quantile.
        upper: points above it.
        probability: the value, between 0 and 1.
    """

    def halve(_: Any, ends: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        lower, upper = ends
        middle = (lower + upper) / 2
        reached = cdf(middle)
        is_below = reached < probability
        lower = ops.where(is_below, middle, lower)
        upper = ops.where(is_below, upper, middle)
        return lower, upper

    lower, upper = ops.fori_loop(0, _HALVINGS, halve, (lower, upper))
    return (lower + upper) / 2
