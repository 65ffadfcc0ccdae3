"""Dropout as a source of draws: masks that belong to a draw, not to an example."""

from collections.abc import Callable

import keras
from keras import ops

from tfp_ibnn import noise
from tfp_ibnn._core.backend import Tensor

__all__ = ["DROPOUTS", "drop"]

_SPATIAL = {
    keras.layers.SpatialDropout1D: (0,),
    keras.layers.SpatialDropout2D: (0, 1),
    keras.layers.SpatialDropout3D: (0, 1, 2),
}

DROPOUTS = (
    keras.layers.AlphaDropout,
    keras.layers.Dropout,
    keras.layers.GaussianDropout,
    *_SPATIAL,
)


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
    # In float32 whatever the input: a rate has few digits in half precision.
    if isinstance(layer, keras.layers.GaussianDropout):
        noise_scale = (rate / (1 - rate)) ** 0.5
        factor = 1 + noise_scale * forward_pass.source.normal(count, shape, "float32", None)
        return _blockwise(ops.multiply, inputs, factor)
    kept = forward_pass.source.uniform(count, shape, "float32") >= rate
    if isinstance(layer, keras.layers.AlphaDropout):
        # What is dropped goes to the value SELU saturates at; an affine map then restores mean
        # and variance (Klambauer et al., Self-Normalizing Neural Networks, arXiv 1706.02515).
        floor = -1.0507009873554805 * 1.6732632423543772
        scale = ((1 - rate) * (1 + rate * floor**2)) ** -0.5
        dropped = _blockwise(lambda x, keep: ops.where(keep > 0, x, floor), inputs, kept)
        return scale * dropped - scale * floor * rate
    return _blockwise(ops.multiply, inputs, ops.cast(kept, "float32") / (1 - rate))


def _mask_shape(layer: keras.layers.Layer, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one mask; axes that share it are 1."""
    for kind, axes in _SPATIAL.items():
        if isinstance(layer, kind):
            if getattr(layer, "data_format", None) == "channels_first":
                axes = tuple(axis + 1 for axis in axes)
            return tuple(1 if axis in axes else size for axis, size in enumerate(sizes))
    given = getattr(layer, "noise_shape", None)
    if given is None:
        return tuple(sizes)
    return tuple(
        size if wanted is None else wanted for wanted, size in zip(given[1:], sizes, strict=True)
    )


def _blockwise(function: Callable[..., Tensor], inputs: Tensor, mask: Tensor) -> Tensor:
    """Apply a function of the input and a mask for each of its blocks of examples."""
    mask = ops.cast(mask, inputs.dtype)
    size = ops.shape(inputs)
    draws = ops.shape(mask)[0]
    blocks = ops.reshape(inputs, (draws, size[0] // draws, *size[1:]))
    return ops.reshape(function(blocks, mask[:, None]), size)
