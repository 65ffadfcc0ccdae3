"""The likelihoods of each number in x, a pixel say, by what a decoder gives."""

import math
from collections.abc import Callable
from typing import NamedTuple

from keras import ops

from tfp_ibnn._core.backend import Tensor

_LEVELS = 255  # above 0, to which numbers in [0, 1] are rounded


class PixelLikelihood(NamedTuple):
    """A distribution of each number in x.

    Attributes:
        log_prob: function of x and decoded numbers (draws, examples, ...), and of a scale or None,
            that returns log p(x | z) of each number.
        mean: function of decoded numbers that returns the means.
        initial_scale: of all numbers, which is learned; None if there is no scale.
    """

    log_prob: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    mean: Callable[[Tensor], Tensor]
    initial_scale: float | None


def _bernoulli(x: Tensor, logits: Tensor, scale: None) -> Tensor:
    return x * logits - ops.softplus(logits)


def _gaussian(x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    distance = (x - mean) / scale
    squares = distance * distance
    constant = math.log(2 * math.pi)
    log_density = -0.5 * (squares + constant)
    log_scale = ops.log(scale)
    return log_density - log_scale


def _discretized_logistic(x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Return the log-probability of the level that x is rounded to; the outer ones are open.

    Of an inner level from a to b it is, by standard numbers,
    sigmoid(b) - sigmoid(a) = sigmoid(b) sigmoid(-a) (1 - exp(a - b)).
    """
    level = ops.round(_LEVELS * x)
    x = level / _LEVELS  # as a number in [0, 1] again
    half_width = 0.5 / (_LEVELS * scale)
    distance = x - mean
    distance = distance / scale
    below_end = ops.log_sigmoid(half_width + distance)
    above_start = ops.log_sigmoid(half_width - distance)
    width = 2 * half_width
    of_width = -ops.expm1(-width)
    log_width = ops.log(of_width)
    inside = below_end + above_start + log_width
    upper = ops.where(x >= 1, above_start, inside)
    return ops.where(x <= 0, below_end, upper)


def _clipped(mean: Tensor) -> Tensor:
    return ops.clip(mean, 0, 1)


LIKELIHOODS = {
    "bernoulli": PixelLikelihood(_bernoulli, ops.sigmoid, None),
    "gaussian": PixelLikelihood(_gaussian, ops.copy, 1.0),
    "discretised_logistic": PixelLikelihood(_discretized_logistic, _clipped, 0.1),
}
