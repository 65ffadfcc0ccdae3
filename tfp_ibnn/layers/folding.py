"""Plain layers that compute what stochastic ones do without noise."""

from collections.abc import Sequence

import keras
import numpy as np
from keras import layers, ops

from tfp_ibnn.layers import base


def merged_weights(layer: keras.layers.Layer) -> list[np.ndarray]:
    """Return the weights of one of Keras's own layers, what LoRA adds being part of the kernel."""
    values = {weight.name: ops.convert_to_numpy(weight).copy() for weight in layer.weights}
    if base.has_lora(layer):
        first, second = values.pop("lora_kernel_a"), values.pop("lora_kernel_b")
        kernel = values["kernel"] + layer.lora_alpha / layer.lora_rank * (first @ second)
        values["kernel"] = kernel.astype(values["kernel"].dtype)
    return list(values.values())


def with_weights(
    layer: keras.layers.Layer, weights: Sequence[np.ndarray], name: str, input_shape: Sequence
) -> keras.layers.Layer:
    """Return one of Keras's own layers, built, with other `merged_weights`."""
    copy = type(layer).from_config({**layer.get_config(), "name": name})
    copy.build(input_shape)
    _assign(copy, layer, weights)
    return copy


def behind_rescaling(
    layer: keras.layers.Layer,
    factors: np.ndarray,
    name: str,
    input_shape: Sequence,
    weights: Sequence[np.ndarray] | None = None,
) -> keras.Sequential:
    """Return any layer, with its own weights or other `merged_weights`, on inputs times factors."""
    copy = type(layer).from_config({**layer.get_config(), "name": name})
    # An array, since Keras takes a list for float32.
    rescaling = layers.Rescaling(factors, dtype=base.float_policy(layer))
    folded = keras.Sequential([rescaling, copy], name=name)
    folded.build(input_shape)
    if weights is not None:
        _assign(copy, layer, weights)
    else:
        adapt(copy, layer)
        copy_weights(copy, layer)
    return folded


def adapt(layer: keras.layers.Layer, like: keras.layers.Layer) -> None:
    """Give a layer LoRA if another one has it; not all configs tell."""
    if base.has_lora(like) and type(layer) is type(like):
        if not layer.lora_enabled:
            layer.enable_lora(like.lora_rank)
        layer.lora_alpha = like.lora_alpha


def copy_weights(layer: keras.layers.Layer, like: keras.layers.Layer) -> None:
    """Give a layer the weights of one of the same class and options, and say which are trained."""
    if base.is_quantized(like):
        _copy_quantized(layer, like)
        return
    layer.set_weights(like.get_weights())
    for weight, own in zip(like.weights, layer.weights, strict=True):
        own.trainable = weight.trainable  # beside LoRA the kernel is not


def _copy_quantized(layer: keras.layers.Layer, like: keras.layers.Layer) -> None:
    """Do it by names: a layer that was quantized after it was built has another order."""
    flag, mode = f"is_{like.quantization_mode}_calibrated", like.quantization_mode
    if not getattr(like, flag, True):
        raise ValueError(
            f"Layer {like.name!r} is quantized by {mode!r} and not calibrated yet, so it cannot be "
            f"copied: call `model.quantize({mode!r}, config)` on the whole model first."
        )
    named = {weight.name: weight for weight in like.weights}
    for weight in layer.weights:
        weight.assign(ops.convert_to_numpy(named[weight.name]))
        weight.trainable = named[weight.name].trainable
    if hasattr(like, flag):
        setattr(layer, flag, True)


def kernel_factors(layer: keras.layers.Layer, scale: np.ndarray) -> np.ndarray | None:
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
        return along(scale, kernel, source[-1])
    if isinstance(layer, base.TRANSPOSED):
        return scale
    if isinstance(layer, base.CONVOLUTIONS):
        by_group = scale.reshape(layer.groups, -1).T  # (in / groups, groups)
        return np.repeat(by_group, layer.filters // layer.groups, axis=1)
    return scale[:, None]


def along(scale: np.ndarray, labels: str, label: str) -> np.ndarray:
    """Return numbers along one of the axes of an einsum's operand."""
    return scale.reshape([-1 if one == label else 1 for one in labels])


def _assign(
    layer: keras.layers.Layer, like: keras.layers.Layer, weights: Sequence[np.ndarray]
) -> None:
    own = [weight for weight in layer.weights if not weight.name.startswith("lora_")]
    for weight, value in zip(own, weights, strict=True):
        weight.assign(value)
    if base.has_lora(like):
        layer.lora_alpha = like.lora_alpha
        layer.lora_kernel_a.assign(ops.convert_to_numpy(like.lora_kernel_a))
        layer.lora_kernel_b.assign(np.zeros(layer.lora_kernel_b.shape))
