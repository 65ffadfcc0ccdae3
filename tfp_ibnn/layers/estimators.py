"""What the estimators of random weights draw: noise of weights, signs, or noise of outputs."""

from typing import NamedTuple

import keras
from keras import layers

from tfp_ibnn._core.backend import Tensor

ESTIMATORS = ("flipout", "shared", "local")

Shape = tuple[int, ...]


class Explicit(NamedTuple):
    """Standard normal noise (draws, ...) for each random weight: the latent of explicit weights."""

    noise: list[Tensor]


class Flipped(NamedTuple):
    """Noise (1, ...) for each random weight, and signs (batch, ...) of inputs and outputs."""

    noise: list[Tensor]
    sign_in: Tensor
    sign_out: Tensor


class Local(NamedTuple):
    """Standard normal noise (batch, units) of the outputs."""

    noise: Tensor


def sign_shapes(
    layer: keras.layers.Layer, input_shape: tuple[int | None, ...]
) -> tuple[Shape, Shape]:
    """Return the shapes of an example's signs, one for each row and column of the kernel.

    Args:
        layer: one of the layers that `to_stochastic` converts, built.
        input_shape: of its input, (batch, ..., channels).

    Returns:
        The shapes of the signs that multiply one example's input, and its output: 1 along the axes
        that the kernel does not have.
    """
    if isinstance(layer, layers.EinsumDense):
        return _einsum_sign_shapes(layer, len(input_shape))
    output_shape = layer.compute_output_shape(input_shape)
    return _last_axis(input_shape), _last_axis(output_shape)


def _last_axis(shape: tuple[int | None, ...]) -> Shape:
    positions = (1,) * (len(shape) - 2)
    return (*positions, shape[-1])


def _einsum_sign_shapes(layer: layers.EinsumDense, rank: int) -> tuple[Shape, Shape]:
    """Return the shapes for an equation such as "abc,cd->abd", from its labels."""
    operands, target = layer.equation.replace(" ", "").split("->")
    source, kernel = operands.split(",")
    labels = kernel.replace("...", "")
    sizes = dict(zip(labels, layer.kernel.shape, strict=True))
    dots = rank - len(source.replace("...", ""))  # the number of axes behind the dots
    batch_in, *axes_in = _axes(source, dots)
    batch_out, *axes_out = _axes(target, dots)
    examples_are_first = batch_in == batch_out and batch_in not in sizes
    if not examples_are_first:
        raise ValueError(
            "`estimator='flipout'` needs the examples on the first axis of input and output; layer "
            f"{layer.name!r} has the equation {layer.equation!r}. Use estimator='shared'."
        )
    shape_in = tuple(sizes.get(label, 1) for label in axes_in)
    shape_out = tuple(sizes.get(label, 1) for label in axes_out)
    return shape_in, shape_out


def _axes(labels: str, dots: int) -> list[str]:
    """Return a label for each axis of an operand; "..." for those behind the dots."""
    before, ellipsis, after = labels.partition("...")
    if not ellipsis:
        return list(labels)
    return [*before, *[ellipsis] * dots, *after]
