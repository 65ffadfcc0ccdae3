"""The layers whose weights are uncertain: gradients of each example, without hooks.

A layer is run on its input a and gives s; a zero is added to s, and the derivative of the logits by
that zero, g, gives with a the gradient of the weights for each example.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras import layers, ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.backend import Tensor, pullback
from tfp_ibnn.conversion.graph import Graph, infer
from tfp_ibnn.layers.base import CONVOLUTIONS
from tfp_ibnn.weights.features import LastLayer, without_activation
from tfp_ibnn.weights.laplace.patches import is_pointwise, patches

Variables = list[keras.Variable]


class Block:
    """The chosen weights of one layer of any kind that takes one tensor.

    Args:
        layer: a built layer.
        variables: those of its weights that are uncertain.
    """

    is_linear = False
    """Whether the weights are a matrix that multiplies the inputs: those have Kronecker factors."""

    def __init__(self, layer: keras.layers.Layer, variables: Variables) -> None:
        self.layer = layer
        self.variables = variables
        self.size = sum(math.prod(v.shape) for v in variables)

    def run(self, is_stripped: bool, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Run the layer up to where the zero is added.

        Args:
            is_stripped: leave out the activation, as the network does that gives logits.
            x: the layer's input.

        Returns:
            The output s before the zero is added, and a function of s: what follows it.
        """
        output_of = without_activation if is_stripped else infer
        return output_of(self.layer, x), _identity

    def tap(self, x: Tensor) -> Tensor:
        """Return what the gradients need of the layer's input."""
        return x

    def rows(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradient of each example.

        Args:
            x: what `tap` gave for the inputs.
            g: the derivative by s, of its shape.

        Returns:
            A tensor (N, size).
        """
        return ops.vectorized_map(lambda example: self._row(*example), (x, g))

    def _row(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradient of one example, (size,)."""
        example = x[None]

        def output(values: list[Tensor]) -> tuple[Tensor, None]:
            replaced = zip(self.variables, values, strict=True)
            with keras_internals.values_in_place(replaced):
                return infer(self.layer, example), None

        values = [ops.cast(v, v.dtype) for v in self.variables]
        _, _, pull = pullback(output, values)
        rows = []
        for slope in pull(g[None]):
            rows.append(ops.reshape(slope, (-1,)))
        return ops.concatenate(rows)

    def total(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the sum of `rows` over the examples.

        Args:
            x: what `tap` gave for the inputs.
            g: the derivative by s, of its shape.

        Returns:
            A vector (size,).
        """
        return ops.sum(self.rows(x, g), axis=0)

    def squares(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the sum of the squares of `rows` over the examples.

        Args:
            x: what `tap` gave for the inputs.
            g: the derivative by s, of its shape.

        Returns:
            A vector (size,).
        """
        rows = self.rows(x, g)
        return ops.sum(ops.square(rows), axis=0)


class Tap(NamedTuple):
    """What the gradients of a block need of its layer's input."""

    block: Block
    x: Tensor  # what the block's `tap` gave


class Slope(NamedTuple):
    """The derivative of a number of each example by the weights of a block, in two factors."""

    block: Block
    x: Tensor  # what the block's `tap` gave
    g: Tensor  # the derivative by the block's output

    def rows(self) -> Tensor:
        """Return the derivative for each example, (N, size)."""
        return self.block.rows(self.x, self.g)

    def total(self) -> Tensor:
        """Return the sum of the rows, (size,)."""
        return self.block.total(self.x, self.g)

    def squares(self) -> Tensor:
        """Return the sum of the squares of the rows, (size,)."""
        return self.block.squares(self.x, self.g)


class LinearBlock(Block):
    """A Dense layer, or a convolution: one on patches. The bias is the matrix's last row."""

    is_linear = True

    def __init__(self, layer: keras.layers.Layer, variables: Variables) -> None:
        super().__init__(layer, variables)
        chosen = {id(v) for v in variables}
        self._has_kernel = id(layer.kernel) in chosen
        self._has_bias = id(layer.bias) in chosen
        self.outputs = layer.kernel.shape[-1]
        self.inputs = self.size // self.outputs

    def run(self, is_stripped: bool, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        before = without_activation(self.layer, x)
        return before, _identity if is_stripped else self._activated

    def _activated(self, s: Tensor) -> Tensor:
        return ops.cast(self.layer.activation(s), self.layer.compute_dtype)

    def tap(self, x: Tensor) -> Tensor:
        """Return what the matrix multiplies, (N, positions, inputs)."""
        x = self.kernel_inputs(x)
        parts = []
        if self._has_kernel:
            parts.append(x)
        if self._has_bias:
            parts.append(ops.ones_like(x[..., :1]))
        return ops.concatenate(parts, axis=-1)

    def kernel_inputs(self, x: Tensor) -> Tensor:
        """Return what the kernel multiplies, (N, positions, inputs)."""
        x = ops.cast(x, self.layer.variable_dtype)
        if isinstance(self.layer, CONVOLUTIONS) and not is_pointwise(self.layer):
            return patches(self.layer, x)
        return _as_positions(x, x.shape[-1])

    def matrix_output(self, g: Tensor) -> Tensor:
        """Return g as (N, positions, outputs)."""
        if getattr(self.layer, "data_format", None) == "channels_first":
            g = ops.moveaxis(g, 1, -1)
        return _as_positions(g, self.outputs)

    def rows(self, x: Tensor, g: Tensor) -> Tensor:
        inputs = ops.swapaxes(x, 1, 2)
        outputs = self.matrix_output(g)
        slopes = ops.matmul(inputs, outputs)
        return ops.reshape(slopes, (-1, self.size))

    def total(self, x: Tensor, g: Tensor) -> Tensor:
        slope = product(x, self.matrix_output(g))
        return ops.reshape(slope, (-1,))

    def squares(self, x: Tensor, g: Tensor) -> Tensor:
        if x.shape[1] != 1:
            return super().squares(x, g)
        # With one position the gradient is an outer product, and so are its squares.
        squared_g = ops.square(self.matrix_output(g))
        return ops.reshape(product(ops.square(x), squared_g), (-1,))


def product(x: Tensor, y: Tensor) -> Tensor:
    """Return X^T Y, summed over all axes but the last.

    Args:
        x: a tensor (..., A).
        y: a tensor (..., B) with the same leading axes.

    Returns:
        A matrix (A, B).
    """
    a = x.shape[-1]
    b = y.shape[-1]
    left = ops.reshape(x, (-1, a))
    right = ops.reshape(y, (-1, b))
    return ops.matmul(ops.transpose(left), right)


def block_of(layer: keras.layers.Layer, variables: Variables) -> Block:
    """Return the block of a layer.

    Args:
        layer: a built layer.
        variables: those of its weights that are uncertain.

    Returns:
        A linear one for a Dense layer and a convolution of one group, without LoRA.
    """
    is_linear = type(layer) in (layers.Dense, *CONVOLUTIONS)
    has_groups = getattr(layer, "groups", 1) != 1
    has_lora = getattr(layer, "lora_enabled", False)
    if is_linear and not has_groups and not has_lora:
        return LinearBlock(layer, variables)
    return Block(layer, variables)


class Choice(NamedTuple):
    """Which weights of a network are uncertain."""

    blocks: list[Block]
    left_out: list[str]  # batch normalization whose scale and shift stay as they are


def blocks_of(
    model: keras.Model, subset: Any, head: str | None, from_logits: bool | None
) -> Choice:
    """Return the chosen weights, layer by layer.

    Args:
        model: a built Functional or Sequential model.
        subset: "last_layer", "all", or a regular expression for the paths of weights.
        head: what the output means, as for `MonteCarlo`.
        from_logits: whether it is logits, as for `MonteCarlo`.

    Returns:
        Their blocks, and the batch normalization that "all" leaves out.

    Raises:
        ValueError: if no weight is chosen, or one of a layer that cannot be uncertain.
    """
    if not isinstance(subset, str):
        raise ValueError(
            "`subset_of_weights` must be 'last_layer', 'all' or a regular expression; got "
            f"{subset!r}."
        )
    if subset == "last_layer":
        layer = LastLayer(model, head, from_logits, positions=True).kernel_layer
        return Choice([block_of(layer, layer.weights)], [])
    calls = Graph(model, lambda _: True).layers
    choice = Choice([], [])
    for layer in dict.fromkeys(calls):
        weights = getattr(layer, "trainable_weights", [])
        if subset == "all" and isinstance(layer, layers.BatchNormalization):
            if weights:
                choice.left_out.append(layer.name)
            continue
        chosen = [v for v in weights if subset == "all" or re.search(subset, v.path)]
        _check_calls(layer, bool(chosen), bool(choice.blocks), calls.count(layer))
        if chosen:
            choice.blocks.append(block_of(layer, chosen))
    if not choice.blocks:
        paths = ", ".join(v.path for v in model.trainable_weights) or "none"
        raise ValueError(f"`subset_of_weights` {subset!r} chooses no weight of these: {paths}.")
    return choice


def _check_calls(layer: Any, is_chosen: bool, is_behind: bool, calls: int) -> None:
    """Raise if a layer cannot have uncertain weights, or stand behind others that have."""
    if is_chosen and calls > 1:
        raise ValueError(
            f"Layer {layer.name!r} is called {calls} times, and not once: leave it out by a "
            "pattern in `subset_of_weights`."
        )
    is_recurrent = isinstance(layer, (layers.RNN, layers.Bidirectional))
    if is_recurrent and (is_chosen or is_behind):
        # TensorFlow cannot differentiate its loop inside of another one.
        raise ValueError(
            f"Layer {layer.name!r} is recurrent: only weights behind it, such as the "
            "'last_layer', can be uncertain."
        )


def _as_positions(x: Tensor, width: int) -> Tensor:
    """Return a tensor (N, ..., width) as (N, positions, width)."""
    examples, *sizes, _ = ops.shape(x)
    positions = math.prod(sizes)
    return ops.reshape(x, (examples, positions, width))


def _identity(s: Tensor) -> Tensor:
    return s
