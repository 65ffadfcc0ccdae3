"""The layers whose weights are uncertain: gradients of each example, without hooks.

A layer is run on its input a and gives s; a zero is added to s, and the derivative of the logits by
that zero, g, gives with a the gradient of the weights for each example.
"""

import math
import re
from typing import Any

import keras
from keras import layers, ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.backend import Tensor, pullback
from tfp_ibnn.conversion.graph import Graph, infer
from tfp_ibnn.layers.base import CONVOLUTIONS
from tfp_ibnn.weights.features import LastLayer, without_activation

LEAVE_OUT = "leave it out by a pattern in `subset_of_weights`"


class Block:
    """The chosen weights of one layer of any kind that takes one tensor."""

    is_linear = False
    """Whether the weights are a matrix that multiplies the inputs: those have Kronecker factors."""

    def __init__(self, layer: keras.layers.Layer, variables: list[keras.Variable]) -> None:
        self.layer, self.variables = layer, variables
        self.size = sum(math.prod(v.shape) for v in variables)

    def run(self, is_stripped: bool, x: Tensor) -> tuple[Tensor, Any]:
        """Return the layer's output s before the zero is added, and what follows it."""
        return (without_activation if is_stripped else infer)(self.layer, x), lambda s: s

    def tap(self, x: Tensor) -> Tensor:
        """Return what the gradients need of the layer's input."""
        return x

    def rows(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradient of each example, (N, size), for what `tap` gave and g."""
        values = [ops.cast(v, v.dtype) for v in self.variables]

        def of_one(pair: tuple[Tensor, Tensor]) -> Tensor:
            def output(values: list[Tensor]) -> tuple[Tensor, None]:
                pairs = zip(self.variables, values, strict=True)
                with keras_internals.values_in_place(pairs):
                    return infer(self.layer, pair[0][None]), None

            _, _, pull = pullback(output, values)
            parts = [ops.reshape(part, (-1,)) for part in pull(pair[1][None])]
            return ops.concatenate(parts)

        return ops.vectorized_map(of_one, (x, g))

    def total(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the sum of `rows` over the examples."""
        return ops.sum(self.rows(x, g), axis=0)

    def squares(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the sum of the squares of `rows`."""
        return ops.sum(ops.square(self.rows(x, g)), axis=0)


class _LinearBlock(Block):
    """A Dense layer, or a convolution: one on patches. The bias is the matrix's last row."""

    is_linear = True

    def __init__(self, layer: keras.layers.Layer, variables: list[keras.Variable]) -> None:
        super().__init__(layer, variables)
        chosen = {id(v) for v in variables}
        self._has_kernel, self._has_bias = id(layer.kernel) in chosen, id(layer.bias) in chosen
        self.outputs = layer.kernel.shape[-1]
        self.inputs = self.size // self.outputs

    def run(self, is_stripped: bool, x: Tensor) -> tuple[Tensor, Any]:
        before = without_activation(self.layer, x)
        if is_stripped:
            return before, lambda s: s
        return before, lambda s: ops.cast(self.layer.activation(s), self.layer.compute_dtype)

    def tap(self, x: Tensor) -> Tensor:
        """Return what the matrix multiplies, (N, positions, inputs)."""
        x = ops.cast(x, self.layer.variable_dtype)
        if isinstance(self.layer, CONVOLUTIONS):
            x = _patches(self.layer, x)
        else:
            x = ops.reshape(x, (ops.shape(x)[0], math.prod(x.shape[1:-1]), x.shape[-1]))
        parts = [x] * self._has_kernel + [ops.ones_like(x[..., :1])] * self._has_bias
        return ops.concatenate(parts, axis=-1)

    def matrix_output(self, g: Tensor) -> Tensor:
        """Return g as (N, positions, outputs)."""
        if getattr(self.layer, "data_format", None) == "channels_first":
            g = ops.moveaxis(g, 1, -1)
        return ops.reshape(g, (ops.shape(g)[0], math.prod(g.shape[1:-1]), self.outputs))

    def rows(self, x: Tensor, g: Tensor) -> Tensor:
        rows = ops.matmul(ops.swapaxes(x, 1, 2), self.matrix_output(g))
        return ops.reshape(rows, (-1, self.size))

    def total(self, x: Tensor, g: Tensor) -> Tensor:
        return ops.reshape(product(x, self.matrix_output(g)), (-1,))

    def squares(self, x: Tensor, g: Tensor) -> Tensor:
        if x.shape[1] != 1:
            return super().squares(x, g)
        return ops.reshape(product(ops.square(x), ops.square(self.matrix_output(g))), (-1,))


def product(x: Tensor, y: Tensor) -> Tensor:
    """Return X^T Y of (..., A) and (..., B), summed over all axes but the last."""
    x, y = (ops.reshape(part, (-1, part.shape[-1])) for part in (x, y))
    return ops.matmul(ops.transpose(x), y)


def block_of(layer: keras.layers.Layer, variables: list[keras.Variable]) -> Block:
    """Return the block of a layer."""
    is_linear = type(layer) in (layers.Dense, *CONVOLUTIONS) and getattr(layer, "groups", 1) == 1
    is_linear &= not getattr(layer, "lora_enabled", False)
    return (_LinearBlock if is_linear else Block)(layer, variables)


def blocks_of(
    model: keras.Model, subset: Any, head: str | None, from_logits: bool | None
) -> tuple[list[Block], list[str]]:
    """Return the chosen weights layer by layer, and the batch normalization that is left out."""
    if not isinstance(subset, str):
        kinds = "'last_layer', 'all' or a regular expression"
        raise ValueError(f"`subset_of_weights` must be {kinds}; got {subset!r}.")
    if subset == "last_layer":
        layer = LastLayer(model, head, from_logits).layer
        return [block_of(layer, layer.weights)], []
    calls, blocks, left_out = Graph(model, lambda _: True).layers, [], []
    for layer in dict.fromkeys(calls):
        weights = getattr(layer, "trainable_weights", [])
        if subset == "all" and isinstance(layer, layers.BatchNormalization):
            left_out += [layer.name] * bool(weights)
            continue
        chosen = [v for v in weights if subset == "all" or re.search(subset, v.path)]
        if chosen and calls.count(layer) > 1:
            times = f"{calls.count(layer)} times, and not once"
            raise ValueError(f"Layer {layer.name!r} is called {times}: {LEAVE_OUT}.")
        if (chosen or blocks) and isinstance(layer, (layers.RNN, layers.Bidirectional)):
            # TensorFlow cannot differentiate its loop inside of another one.
            want = "only weights behind it, such as the 'last_layer', can be uncertain"
            raise ValueError(f"Layer {layer.name!r} is recurrent: {want}.")
        if chosen:
            blocks.append(block_of(layer, chosen))
    if not blocks:
        paths = ", ".join(v.path for v in model.trainable_weights) or "none"
        raise ValueError(f"`subset_of_weights` {subset!r} chooses no weight of these: {paths}.")
    return blocks, left_out


def _patches(layer: Any, x: Tensor) -> Tensor:
    """Return the inputs of a convolution's matrix at each position, (N, positions, inputs)."""
    if layer.data_format == "channels_first":
        x = ops.moveaxis(x, 1, -1)
    steps = zip(x.shape[1:-1], layer.kernel_size, layer.strides, layer.dilation_rate, strict=True)
    for axis, (size, kernel, stride, dilation) in enumerate(steps, start=1):
        reach = (kernel - 1) * dilation
        count, before, after = (size - reach - 1) // stride + 1, 0, 0
        if layer.padding == "same":
            count = -(-size // stride)
            lacking = max(0, (count - 1) * stride + reach + 1 - size)
            before, after = lacking // 2, lacking - lacking // 2
        elif layer.padding == "causal":
            count, before = (size - 1) // stride + 1, reach
        pads = [(before, after) if i == axis else (0, 0) for i in range(len(x.shape))]
        x, lead, width = ops.pad(x, pads), (slice(None),) * axis, (count - 1) * stride + 1
        # An axis at a time: fewer slices than a kernel has positions.
        parts = [x[(*lead, slice(i, i + width, stride))] for i in range(0, reach + 1, dilation)]
        x = ops.stack(parts, axis=-2)
    return ops.reshape(x, (-1, math.prod(x.shape[1 : axis + 1]), math.prod(x.shape[axis + 1 :])))
