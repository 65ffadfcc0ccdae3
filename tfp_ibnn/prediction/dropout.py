"""Dropout as a source of draws: masks that belong to a draw, not to an example."""

import keras
from keras import layers, ops

from tfp_ibnn import noise
from tfp_ibnn._core.backend import Tensor

# How many axes of positions share a mask.
_SPATIAL = {layers.SpatialDropout1D: 1, layers.SpatialDropout2D: 2, layers.SpatialDropout3D: 3}

DROPOUTS = (layers.AlphaDropout, layers.Dropout, layers.GaussianDropout, *_SPATIAL)


def drop(layer: keras.layers.Layer, inputs: Tensor, forward_pass: noise.Pass) -> Tensor:
    """Return what a dropout layer makes of its input in training, with the masks of a pass.

    Args:
        layer: a dropout layer.
        inputs: (batch, ...).
        forward_pass: a seeded pass. Examples that share a draw share the mask.
    """
    rate = layer.rate
    if not rate:
        return inputs
    sizes = ops.shape(inputs)
    count = sizes[0] if forward_pass.groups is None else forward_pass.groups
    shape = _mask_shape(layer, sizes[1:])
    blocks = ops.reshape(inputs, (count, sizes[0] // count, *sizes[1:]))
    # In float32 whatever the input: a rate has few digits in half precision.
    if isinstance(layer, layers.GaussianDropout):
        noise_scale = (rate / (1 - rate)) ** 0.5
        factor = 1 + noise_scale * forward_pass.source.normal(count, shape, "float32", None)
    else:
        kept = forward_pass.source.uniform(count, shape, "float32") >= rate
        factor = ops.cast(kept, "float32") / (1 - rate)
    if isinstance(layer, layers.AlphaDropout):
        # What is dropped goes to the value SELU saturates at; an affine map then restores mean
        # and variance (Klambauer et al., Self-Normalizing Neural Networks, arXiv 1706.02515).
        floor = -1.0507009873554805 * 1.6732632423543772
        scale = ((1 - rate) * (1 + rate * floor**2)) ** -0.5
        dropped = scale * ops.where(kept[:, None], blocks, floor) - scale * floor * rate
    else:
        dropped = blocks * ops.cast(factor, inputs.dtype)[:, None]
    return ops.reshape(dropped, sizes)


def _mask_shape(layer: keras.layers.Layer, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one mask; axes that share it are 1."""
    for kind, axes in _SPATIAL.items():
        if isinstance(layer, kind):
            first = getattr(layer, "data_format", None) == "channels_first"
            return (sizes[0], *(1,) * axes) if first else (*(1,) * axes, sizes[-1])
    wanted = (getattr(layer, "noise_shape", None) or (None,) * (len(sizes) + 1))[1:]
    return tuple(y if x is None else x for x, y in zip(wanted, sizes, strict=True))
