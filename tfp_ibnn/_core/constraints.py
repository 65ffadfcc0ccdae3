"""The maps that keep parameters in range, so that no caller adds an epsilon inside a logarithm."""

import math

from keras import ops

from tfp_ibnn._core.backend import Tensor, tanh

MIN_SCALE = 1e-6
"""The smallest standard deviation a posterior may reach."""

_MARGIN = 1e-3


def bounded(x: Tensor, limit: float) -> Tensor:
    """Map the real line onto (-limit, limit) by `limit * tanh(x / limit)`; the identity near 0.

    Args:
        x: any tensor.
        limit: the bound, above 0.
    """
    return limit * tanh(x * (1 / limit))


def scale(raw: Tensor) -> Tensor:
    """Map the real line onto (MIN_SCALE, inf) by a shifted softplus."""
    return MIN_SCALE + ops.softplus(raw)


def inverse_scale(value: float) -> float:
    """Return the argument at which `scale` takes `value`, a number above MIN_SCALE."""
    excess = value - MIN_SCALE
    if excess <= 0:
        raise ValueError(f"A scale must be above {MIN_SCALE}; got {value!r}.")
    # log(exp(excess) - 1), the inverse of softplus, without its overflow.
    correction = math.log(-math.expm1(-excess))
    return excess + correction


def inverse_scales(values: Tensor) -> Tensor:
    """Return where `scale` takes values, an array of them, to within MIN_SCALE."""
    # As in `inverse_scale`.
    correction = ops.log(-ops.expm1(-values))
    return values + correction


def above_minus_one(x: Tensor) -> Tensor:
    """Map the real line onto (-1 + 1e-3, inf): the identity for x >= 0, an exponential below.

    Planar, radial and Sylvester flows are invertible where a product exceeds -1. The margin keeps
    `log1p` of it finite, and the inverse solvable in float32. The first derivative is continuous.
    """
    limit = 1 - _MARGIN
    below = ops.relu(-x)  # at 0 it has no gradient, and x has
    # For x < 0 the first two cancel.
    exponential = limit * ops.expm1(below * (-1 / limit))
    return x + below + exponential
