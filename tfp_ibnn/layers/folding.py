"""Fold a factor of each input channel into a layer's kernel."""

from typing import Any

import numpy as np
from keras import layers

from tfp_ibnn.layers.base import CONVERTIBLE


def is_foldable(layer: layers.Layer, channels: int) -> bool:
    """Whether a layer has a kernel that can take a factor of each channel of its input."""
    return _factors(layer, np.ones(channels)) is not None


def fold_into(layer: layers.Layer, weights: list[Any], scale: np.ndarray) -> list[Any]:
    """Return weights with which a layer computes for x what it does for scale * x.

    Args:
        layer: one that `is_foldable`.
        weights: the layer's, of which the first is the kernel.
        scale: (channels,)
    """
    kernel, *rest = weights
    return [(kernel * _factors(layer, scale)).astype(kernel.dtype), *rest]


def _factors(layer: layers.Layer, scale: np.ndarray) -> np.ndarray | None:
    """Return by what to multiply a layer's first weight instead of its input; None if one cannot.

    The shapes of the kernels: Dense (in, out); convolutions (..., in / groups, out), transposed
    (..., out, in), depthwise and separable (..., in, multiplier).
    """
    if isinstance(layer, layers.EinsumDense):
        operands, _ = layer.equation.replace(" ", "").split("->")
        source, kernel = operands.split(",")
        kernel = kernel.replace("...", "")
        if source.endswith("...") or kernel.count(source[-1]) != 1:
            return None
        shape = [1] * len(kernel)
        shape[kernel.index(source[-1])] = -1
        return scale.reshape(shape)
    if isinstance(layer, (layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose)):
        return scale
    if isinstance(layer, (layers.Conv1D, layers.Conv2D, layers.Conv3D)):
        by_group = scale.reshape(layer.groups, -1).T  # (in / groups, groups)
        return np.repeat(by_group, layer.filters // layer.groups, axis=1)
    return scale[:, None] if isinstance(layer, CONVERTIBLE) else None
