"""Dropout as noise: masks that a forward pass draws."""

import keras
from keras import layers, ops

from tfp_ibnn import noise
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.noise.source import Source

_SPATIAL = (layers.SpatialDropout1D, layers.SpatialDropout2D, layers.SpatialDropout3D)

DROPOUTS = (layers.Dropout, layers.GaussianDropout, *_SPATIAL)
"""The layers that `drop` stands in for."""


def drop(layer: keras.layers.Layer, inputs: Tensor, forward_pass: noise.Pass) -> Tensor:
    """Do as a dropout layer does in training, but draw the masks from a forward pass.

    Args:
        layer: one of `DROPOUTS`.
        inputs: what it is called on, (batch, ...).
        forward_pass: gives the random numbers. The examples of each of its groups are consecutive
            and share one mask; without groups each example has its own.

    Returns:
        The inputs, some of them 0 and the others scaled, or all times Gaussian noise.
    """
    if not layer.rate:
        return inputs
    examples, *sizes = ops.shape(inputs)
    count = forward_pass.groups
    if count is None:
        count = examples
    mask_shape = _shape_of_mask(layer, tuple(sizes))
    factor = _factor(layer, count, mask_shape, forward_pass.source)
    factor = ops.cast(factor, inputs.dtype)
    factor = ops.expand_dims(factor, 1)
    blocks = ops.reshape(inputs, (count, examples // count, *sizes))
    dropped = blocks * factor
    return ops.reshape(dropped, (examples, *sizes))


def _shape_of_mask(layer: keras.layers.Layer, sizes: tuple) -> tuple:
    """Return the shape of one example's mask, of size 1 along axes that share a decision."""
    if isinstance(layer, _SPATIAL):
        ones = (1,) * (len(sizes) - 1)
        if getattr(layer, "data_format", None) == "channels_first":
            return (sizes[0], *ones)
        return (*ones, sizes[-1])
    noise_shape = getattr(layer, "noise_shape", None)
    if not noise_shape:
        return sizes
    pairs = zip(noise_shape[1:], sizes, strict=True)
    return tuple(size if fixed is None else fixed for fixed, size in pairs)


def _factor(
    layer: keras.layers.Layer, count: int | Tensor, mask_shape: tuple, source: Source
) -> Tensor:
    """Return what multiplies the inputs, (count, *mask_shape), with mean 1.

    It is in float32 whatever the inputs are: a rate has few digits in half precision.
    """
    rate = layer.rate
    if isinstance(layer, layers.GaussianDropout):
        noise_scale = (rate / (1 - rate)) ** 0.5
        return 1 + noise_scale * source.normal(count, mask_shape, "float32", None)
    is_kept = source.uniform(count, mask_shape, "float32") >= rate
    return ops.cast(is_kept, "float32") / (1 - rate)
