"""Convolutions that take the noise of their input into the kernel, or into its gradient."""

import functools
from collections.abc import Callable

import keras
from keras import ops

from tfp_ibnn._core.backend import Tensor, pullback

__all__ = ["SeparateChannels", "convolves", "noisy_convolution"]


def convolves(layer: keras.layers.Layer) -> bool:
    """Whether the functions of this module can stand for the layer's own call."""
    return (
        type(layer) in (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
        and layer.groups == 1
        and layer.padding != "causal"
        and layer.activity_regularizer is None
    )


class SeparateChannels:
    """A convolution of each channel of the input by itself, to be put together for many z.

    layer(z * inputs) = activation(bias + sum_c z_c layer_c(inputs)): the convolutions are the same
    for all z, and what is left for each of them is a sum of few terms.

    Args:
        layer: a convolution.
        inputs: (batch, ..., channels), channels last.
    """

    def __init__(self, layer: keras.layers.Layer, inputs: Tensor) -> None:
        self._layer = layer
        *window, channels, filters = layer.kernel.shape
        kernel = ops.cast(layer.kernel, inputs.dtype)
        apart = ops.eye(channels, dtype=inputs.dtype)[:, :, None] * kernel[..., None, :]
        apart = ops.reshape(apart, (*window, channels, channels * filters))
        outputs = layer.convolution_op(inputs, apart)
        *positions, _ = ops.shape(outputs)
        self._shape = (*positions, filters)
        outputs = ops.reshape(outputs, (*positions, channels, filters))
        terms = ops.moveaxis(outputs, -2, 0)
        if layer.use_bias:
            bias = ops.broadcast_to(ops.cast(layer.bias, inputs.dtype), self._shape)
            terms = ops.concatenate([terms, bias[None]], axis=0)
        self._terms = ops.reshape(terms, (channels + layer.use_bias, -1))

    def __call__(self, z: Tensor) -> Tensor:
        """Return the layer's outputs (draws * batch, ...) for each z (draws, channels)."""
        layer = self._layer
        z = ops.cast(z, self._terms.dtype)
        if layer.use_bias:
            z = ops.concatenate([z, ops.ones_like(z[:, :1])], axis=1)
        outputs = ops.reshape(ops.matmul(z, self._terms), (-1, *self._shape[1:]))
        return outputs if layer.activation is None else layer.activation(outputs)


def noisy_convolution(
    layer: keras.layers.Layer,
    inputs: Tensor,
    z: Tensor,
    normal: Tensor,
    loc: Tensor,
    scale: Tensor,
) -> Tensor:
    """Return layer(z * inputs), where z = loc + scale * normal.

    Left to itself, the gradient of loc and scale goes through that of z * inputs, which is as large
    as the inputs, and the most costly operation in training a small network. But with the kernel's
    gradients A and B for the inputs `inputs` and `normal * inputs`, those of loc, scale and kernel
    are, channel by channel of the input, sum(kernel * A), sum(kernel * B) and loc * A + scale * B.
    The gradient of the inputs is computed only if somebody needs it; images do not.

    Args:
        layer: a convolution.
        inputs: a batch of images.
        z: noise as it broadcasts against `inputs`; its own gradient is not used.
        normal: the noise behind it, in the same form.
        loc: (channels,)
        scale: (channels,)
    """
    linear = functools.partial(_linear, layer)

    @ops.custom_gradient
    def run(
        inputs: Tensor,
        z: Tensor,
        normal: Tensor,
        loc: Tensor,
        scale: Tensor,
        kernel: Tensor,
        bias: Tensor,
    ) -> tuple[Tensor, Callable]:
        product = inputs * z

        def gradient(upstream: Tensor) -> tuple[Tensor, ...]:
            clean, of_bias = pullback(lambda k, b: linear(inputs, k, b), (kernel, bias), upstream)
            (noisy,) = pullback(
                lambda k: layer.convolution_op(inputs * normal, k), (kernel,), upstream
            )
            (of_product,) = pullback(lambda p: linear(p, kernel, bias), (product,), upstream)
            full, clean, noisy = (ops.cast(part, loc.dtype) for part in (kernel, clean, noisy))
            others = (*range(layer.rank), -1)
            return (
                of_product * z,
                ops.zeros_like(z),
                ops.zeros_like(normal),
                ops.sum(full * clean, axis=others),
                ops.sum(full * noisy, axis=others),
                ops.cast(loc[:, None] * clean + scale[:, None] * noisy, kernel.dtype),
                of_bias,
            )

        return linear(product, kernel, bias), gradient

    kernel = ops.cast(layer.kernel, inputs.dtype)
    outputs = run(inputs, z, normal, loc, scale, kernel, _bias(layer, inputs.dtype))
    return outputs if layer.activation is None else layer.activation(outputs)


def _bias(layer: keras.layers.Layer, dtype: str) -> Tensor:
    if not layer.use_bias:
        return ops.zeros((), dtype=dtype)
    bias = ops.cast(layer.bias, dtype)
    beyond = layer.rank if layer.data_format == "channels_first" else 0
    return ops.reshape(bias, (-1, *(1,) * beyond)) if beyond else bias


def _linear(layer: keras.layers.Layer, inputs: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """Return the layer's output before its activation, for another kernel and bias."""
    outputs = layer.convolution_op(inputs, kernel)
    return ops.add(outputs, bias) if layer.use_bias else outputs
