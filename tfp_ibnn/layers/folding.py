"""Plain layers that compute what stochastic ones do without noise."""

from collections.abc import Sequence

import keras
import numpy as np
from keras import layers, ops

from tfp_ibnn.layers import base


def merged_weights(layer: keras.layers.Layer) -> list[np.ndarray]:
    """Return the weights of one of Keras's own layers, with LoRA merged into the kernel."""
    values = {weight.name: ops.convert_to_numpy(weight).copy() for weight in layer.weights}
    if base.has_lora(layer):
        first = values.pop("lora_kernel_a")
        second = values.pop("lora_kernel_b")
        kernel = values["kernel"]
        factor = layer.lora_alpha / layer.lora_rank
        merged = kernel + factor * (first @ second)
        values["kernel"] = merged.astype(kernel.dtype)
    return list(values.values())


def with_weights(
    layer: keras.layers.Layer, weights: Sequence[np.ndarray], name: str, input_shape: Sequence
) -> keras.layers.Layer:
    """Return one of Keras's own layers, built, with other weights.

    Args:
        layer: the one to copy.
        weights: in the order of `merged_weights`.
        name: of the copy.
        input_shape: that the copy is built for.

    Returns:
        A new layer.
    """
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
    """Return any layer on inputs times factors.

    Args:
        layer: the one to copy.
        factors: that broadcast against the inputs.
        name: of the copy.
        input_shape: that it is built for.
        weights: of the copy, in the order of `merged_weights`; None are the layer's own.

    Returns:
        A `Rescaling` and the copy.
    """
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
    """Give a layer LoRA if another one has it, which not all configs record.

    Args:
        layer: the one to change.
        like: the other one.
    """
    if base.has_lora(like) and type(layer) is type(like):
        if not layer.lora_enabled:
            layer.enable_lora(like.lora_rank)
        layer.lora_alpha = like.lora_alpha


def copy_weights(layer: keras.layers.Layer, like: keras.layers.Layer) -> None:
    """Give a layer the weights of one of the same class and options, and their trainability.

    Args:
        layer: the one to change.
        like: the other one.
    """
    if base.is_quantized(like):
        _copy_quantized(layer, like)
        return
    layer.set_weights(like.get_weights())
    for weight, copied in zip(like.weights, layer.weights, strict=True):
        copied.trainable = weight.trainable  # with LoRA the kernel is not trained


def _copy_quantized(layer: keras.layers.Layer, like: keras.layers.Layer) -> None:
    """Copy weights by their names: a layer that was quantized when built has another order."""
    mode = like.quantization_mode
    flag = f"is_{mode}_calibrated"
    if not getattr(like, flag, True):
        raise ValueError(
            f"Layer {like.name!r} is quantized by {mode!r} and not calibrated yet, so it cannot be "
            f"copied: call `model.quantize({mode!r}, config)` on the whole model first."
        )
    named = {weight.name: weight for weight in like.weights}
    for weight in layer.weights:
        source = named[weight.name]
        weight.assign(ops.convert_to_numpy(source))
        weight.trainable = source.trainable
    if hasattr(like, flag):
        setattr(layer, flag, True)


def kernel_factors(layer: keras.layers.Layer, scale: np.ndarray) -> np.ndarray | None:
    """Return factors of a layer's first weight that replace factors of its input.

    The shapes of the kernels: Dense (in, out); convolutions (..., in / groups, out), transposed
    (..., out, in), depthwise and separable (..., in, multiplier).

    Args:
        layer: one of Keras's own layers.
        scale: factors of the input, (channels,).

    Returns:
        An array that broadcasts against the weight; None if no factors of it do the same.
    """
    if isinstance(layer, layers.EinsumDense):
        return _einsum_factors(layer.equation, scale)
    if isinstance(layer, base.TRANSPOSED):
        return scale
    if isinstance(layer, base.CONVOLUTIONS):
        by_group = scale.reshape(layer.groups, -1).T  # (in / groups, groups)
        filters = layer.filters // layer.groups
        return np.repeat(by_group, filters, axis=1)
    return scale[:, None]


def _einsum_factors(equation: str, scale: np.ndarray) -> np.ndarray | None:
    operands, _ = equation.replace(" ", "").split("->")
    source, kernel = operands.split(",")
    kernel = kernel.replace("...", "")
    channels = source[-1]
    if source.endswith("...") or kernel.count(channels) != 1:
        return None
    return along(scale, kernel, channels)


def along(scale: np.ndarray, labels: str, label: str) -> np.ndarray:
    """Return numbers along one of the axes of an einsum's operand.

    Args:
        scale: the numbers, (size,).
        labels: of the operand, such as "abc".
        label: of the axis.

    Returns:
        An array that broadcasts against the operand.
    """
    return scale.reshape([-1 if one == label else 1 for one in labels])


def _assign(
    layer: keras.layers.Layer, like: keras.layers.Layer, weights: Sequence[np.ndarray]
) -> None:
    """Give a layer `merged_weights`, and a LoRA that adds nothing if the other one has LoRA."""
    plain = [weight for weight in layer.weights if not weight.name.startswith("lora_")]
    for weight, value in zip(plain, weights, strict=True):
        weight.assign(value)
    if base.has_lora(like):
        layer.lora_alpha = like.lora_alpha
        first = ops.convert_to_numpy(like.lora_kernel_a)
        layer.lora_kernel_a.assign(first)
        # Merged into the kernel already.
        zeros = np.zeros(layer.lora_kernel_b.shape)
        layer.lora_kernel_b.assign(zeros)
