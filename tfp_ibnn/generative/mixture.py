"""The Gaussians of equal weight that the noise of a density is from, where it has several."""

import math

import keras
from keras import ops

from tfp_ibnn._core import constraints
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.posteriors.base import equal_mixture, of_component

_VARIANCE_OF_MEANS = 0.25  # at the start, of a variance of 1 in all


def add_mixture(layer: keras.layers.Layer, count: int, size: int) -> None:
    """Give a layer the weights `base_loc` and `base_raw_scale`, both (count, size).

    Args:
        layer: that gets the weights.
        count: how many Gaussians.
        size: of the noise.
    """
    deviation = math.sqrt(1 - _VARIANCE_OF_MEANS)
    raw_scale = constraints.inverse_scale(deviation)
    layer.base_loc = layer.add_weight(
        (count, size),
        keras.initializers.RandomNormal(stddev=math.sqrt(_VARIANCE_OF_MEANS)),
        name="base_loc",
    )
    layer.base_raw_scale = layer.add_weight(
        (count, size),
        keras.initializers.Constant(raw_scale),
        name="base_raw_scale",
    )


def mixture_log_prob(eps: Tensor, loc: Tensor, raw_scale: Tensor) -> Tensor:
    """Return the log-density of noise under the mixture.

    Args:
        eps: (N, size), noise.
        loc: (count, size), means.
        raw_scale: (count, size), scales before their constraint.

    Returns:
        Log-densities (N,).
    """
    scale = constraints.scale(raw_scale)
    mixture = equal_mixture(loc, scale)
    return mixture.log_prob(eps)


def of_mixture(eps: Tensor, normal: Tensor, loc: Tensor, raw_scale: Tensor) -> Tensor:
    """Return draws of the mixture by draws of N(0, 1).

    Args:
        eps: (N, size), standard normal numbers.
        normal: (N,), another one for each row, which chooses the Gaussian.
        loc: (count, size), means.
        raw_scale: (count, size), scales before their constraint.

    Returns:
        Draws (N, size).
    """
    count = loc.shape[0]
    # The distribution function of N(0, 1) makes it uniform.
    scaled = normal / math.sqrt(2)
    uniform = 0.5 * (1 + ops.erf(scaled))
    component = ops.floor(count * uniform)
    component = ops.minimum(component, count - 1)
    scale = constraints.scale(raw_scale)
    loc, scale = of_component(component, loc, scale)
    return loc + scale * eps
