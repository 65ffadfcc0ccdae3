"""The layers that random models are made of, as Python expressions, by the rank of their input.

Each function takes a random generator and the shape of a tensor, and returns an expression in which
`{0}` stands for that tensor. Not every one is legal for every shape: Keras tells.
"""

from random import Random
from typing import NamedTuple

__all__ = ["FLAT", "FLATTEN", "IMAGE", "MERGES", "POINTWISE", "SEQUENCE", "VOLUME", "kernel_layer"]

Shape = tuple[int | None, ...]
_ACTIVATIONS = (None, "tanh", "relu", "sigmoid", "gelu", "softplus")


class Window(NamedTuple):
    """How a convolution looks at its input: arguments, less those of their kind."""

    size: int
    padding: str
    strides: int
    dilation: int


def _window(rng: Random) -> Window:
    size, dilation = rng.choice((1, 2, 2, 3)), rng.choice((1, 1, 1, 2))
    strides = 1 if dilation > 1 else rng.choice((1, 1, 2))
    return Window(size, rng.choice(("valid", "same")), strides, dilation)


def _options(rng: Random, activations=_ACTIVATIONS) -> str:
    bias = rng.choice((True, True, False))
    return f"activation={rng.choice(activations)!r}, use_bias={bias}"


def _units(rng: Random) -> int:
    return rng.choice((1, 2, 3, 4, 4, 6))


def dense(rng: Random, shape: Shape) -> str:
    return f"layers.Dense({_units(rng)}, {_options(rng)})"


def einsum(rng: Random, shape: Shape) -> str:
    """Return an EinsumDense over channels, over other axes, or with several axes of output."""
    units, activation = _units(rng), rng.choice((None, "tanh"))
    if len(shape) == 2:
        equation, output, bias = rng.choice(
            (
                ("ab,bc->ac", (units,), "c"),
                ("ab,bcd->acd", (2, units), "cd"),
                ("...x,xy->...y", (units,), "y"),
            )
        )
    else:
        steps = shape[1]
        equation, output, bias = rng.choice(
            (
                ("abc,cd->abd", (steps, units), "d"),
                ("abc,cde->abde", (steps, 2, units), "de"),
                ("abc,bd->adc", (units, shape[2]), "d"),
                ("abc,bcd->abd", (steps, units), "bd"),
                ("abc,bcd->ad", (units,), "d"),
                ("...x,xy->...y", (steps, units), "y"),
                ("abc,cd->adb", (units, steps), "d"),
            )
        )
    bias = rng.choice((repr(bias), None))
    return (
        f"layers.EinsumDense({equation!r}, {output}, activation={activation!r}, bias_axes={bias})"
    )


def conv(rng: Random, shape: Shape) -> str:
    window, channels = _window(rng), shape[-1]
    groups = rng.choice([n for n in (1, 1, 2, 3, 4) if channels % n == 0])
    causal = len(shape) == 3 and rng.random() < 0.2
    padding = "causal" if causal else window.padding
    return (
        f"layers.Conv{len(shape) - 2}D({groups * rng.choice((1, 2, 3))}, {window.size}, "
        f"strides={window.strides}, padding={padding!r}, dilation_rate={window.dilation}, "
        f"groups={groups}, {_options(rng)})"
    )


def transposed(rng: Random, shape: Shape) -> str:
    window = _window(rng)
    return (
        f"layers.Conv{len(shape) - 2}DTranspose({_units(rng)}, {window.size}, "
        f"strides={window.strides}, padding={window.padding!r}, {_options(rng)})"
    )


def depthwise(rng: Random, shape: Shape) -> str:
    window = _window(rng)
    return (
        f"layers.DepthwiseConv{len(shape) - 2}D({window.size}, strides={window.strides}, "
        f"padding={window.padding!r}, depth_multiplier={rng.choice((1, 2))}, {_options(rng)})"
    )


def separable(rng: Random, shape: Shape) -> str:
    window = _window(rng)
    return (
        f"layers.SeparableConv{len(shape) - 2}D({_units(rng)}, {window.size}, "
        f"strides={window.strides}, padding={window.padding!r}, "
        f"depth_multiplier={rng.choice((1, 2))}, {_options(rng)})"
    )


def kernel_layer(rng: Random, shape: Shape) -> str:
    """Return a layer that multiplies its input by a kernel, not yet called."""
    makers = [dense]
    if len(shape) in (2, 3):
        makers.append(einsum)
    if len(shape) in (3, 4):
        makers += [conv, conv, transposed, depthwise, separable]
    if len(shape) == 5:
        makers += [conv, transposed]
    return rng.choice(makers)(rng, shape)


def kernel(rng: Random, shape: Shape) -> str:
    return kernel_layer(rng, shape) + "({0})"


def of_a_class(rng: Random, shape: Shape) -> str:
    """Return a layer that a user has written, or a nested model."""
    units = _units(rng)
    return rng.choice(
        (
            f"parts.Block({units})({{0}})",
            f"parts.Gated({units})([{{0}}, ops.cos({{0}})])",
            f"parts.Repeated({rng.choice((1, 2, 3))})({{0}})",
            f"parts.ScaledDense({units})({{0}})",
            f"parts.nested({{0}}, {units})",
            f"parts.two_paths({{0}}, {units})",
        )
    )


def with_lora(rng: Random, shape: Shape) -> str:
    makers = [dense]
    makers += [einsum] * (len(shape) in (2, 3)) + [conv] * (len(shape) in (3, 4, 5))
    layer = rng.choice(makers)(rng, shape)
    return f"parts.with_lora({layer}, {{0}}, {rng.choice((1, 2))})"


def pointwise(rng: Random, shape: Shape) -> str:
    """Return what leaves the shape as it is."""
    axis = rng.choice((-1, 1))
    return rng.choice(
        (
            f"layers.LayerNormalization(axis={axis})({{0}})",
            f"layers.BatchNormalization(axis={axis})({{0}})",
            "layers.RMSNormalization()({0})",
            "layers.UnitNormalization()({0})",
            "layers.GroupNormalization(1)({0})",
            "layers.PReLU()({0})",
            "layers.LeakyReLU()({0})",
            "layers.Dropout(0.4)({0})",
            "layers.GaussianNoise(0.4)({0})",
            "layers.Rescaling(0.5, offset=0.1)({0})",
            "layers.Identity()({0})",
            "ops.tanh({0})",
            "0.5 * {0} + 1",
            "ops.flip({0}, axis=-1)",
            "{0} - ops.mean({0}, axis=-1, keepdims=True)",
            "{0} * {0}",
        )
    )


def recurrent(rng: Random, shape: Shape) -> str:
    kind = rng.choice(("LSTM", "GRU", "SimpleRNN"))
    options = f"return_sequences={rng.choice((True, False))}"
    if rng.random() < 0.2:
        options += ", go_backwards=True"
    if kind == "GRU":
        options += f", reset_after={rng.choice((True, False))}"
    layer = f"layers.{kind}({rng.choice((2, 3))}, {options})"
    return rng.choice((layer, f"layers.Bidirectional({layer})")) + "({0})"


def attention(rng: Random, shape: Shape) -> str:
    return rng.choice(
        (
            "layers.MultiHeadAttention(2, 2)({0}, {0})",
            "layers.MultiHeadAttention(1, 3, use_bias=False)({0}, ops.cos({0}))",
            "layers.GroupQueryAttention(2, 2, 1)({0}, {0})",
            "layers.Attention()([{0}, {0}])",
            "layers.AdditiveAttention()([{0}, {0}])",
        )
    )


def of_steps(rng: Random, shape: Shape) -> str:
    """Return what else there is for sequences."""
    return rng.choice(
        (
            f"layers.TimeDistributed({dense(rng, shape[1:])})({{0}})",
            "layers.Masking()({0})",
            "layers.MaxPooling1D(2, padding='same')({0})",
            "layers.AveragePooling1D(2)({0})",
            "layers.UpSampling1D(2)({0})",
            "layers.ZeroPadding1D(1)({0})",
            "layers.SpatialDropout1D(0.3)({0})",
            "layers.Permute((2, 1))({0})",
            "{0}[:, ::-1]",
            "{0}[:, -2:]",
            f"layers.Reshape(({shape[2]}, -1))({{0}})",
            "layers.Reshape((-1, 2))({0})",
            "ops.expand_dims({0}, 2)",
        )
    )


def across_the_batch(rng: Random, shape: Shape) -> str:
    """Return a Dense layer behind what moves or merges the axis of the examples."""
    units, rest = _units(rng), ", ".join(map(str, shape[1:-1]))
    layer = f"layers.Dense({units}, 'tanh')"
    if rng.random() < 0.5:
        rows = f"ops.reshape({{0}}, (-1, {shape[-1]}))"
        return f"ops.reshape({layer}({rows}), (-1, {rest}, {units}))"
    order = (1, 0, *range(2, len(shape)))
    return f"ops.transpose({layer}(ops.transpose({{0}}, {order})), {order})"


def of_images(rng: Random, shape: Shape) -> str:
    """Return what else there is for images."""
    return rng.choice(
        (
            "layers.MaxPooling2D(2, padding='same')({0})",
            "layers.AveragePooling2D(2)({0})",
            "layers.UpSampling2D(2)({0})",
            "layers.ZeroPadding2D(1)({0})",
            "layers.SpatialDropout2D(0.3)({0})",
            "layers.Permute((2, 1, 3))({0})",
            "layers.Cropping2D(1)({0})",
            f"layers.Reshape((-1, {shape[-1]}))({{0}})",
            f"layers.TimeDistributed({dense(rng, shape[1:])})({{0}})",
            f"parts.StandardizedConv2D({_units(rng)}, 2)({{0}})",
        )
    )


def of_volumes(rng: Random, shape: Shape) -> str:
    return rng.choice(("layers.AveragePooling3D(2)({0})", "layers.MaxPooling3D(2)({0})"))


def to_steps(rng: Random, shape: Shape) -> str:
    """Return what makes a sequence of a vector."""
    return rng.choice(("layers.RepeatVector(3)({0})", "layers.Reshape((-1, 2))({0})"))


POINTWISE = (pointwise,)
FLAT = (kernel, kernel, kernel, of_a_class, with_lora, pointwise, to_steps)
SEQUENCE = (
    *(kernel, kernel, kernel, kernel, recurrent, recurrent, attention, of_a_class, with_lora),
    *(pointwise, of_steps, of_steps, across_the_batch),
)
IMAGE = (
    *(kernel, kernel, kernel, kernel, kernel, of_images, of_images, pointwise, with_lora),
    *(of_a_class, across_the_batch),
)
VOLUME = (kernel, kernel, of_volumes, pointwise)
"""What a model may go on with, by the rank of a tensor; some come more often."""

MERGES = (
    "layers.Add()([{0}, {1}])",
    "layers.Multiply()([{0}, {1}])",
    "layers.Maximum()([{0}, {1}])",
    "layers.Average()([{0}, {1}])",
    "layers.Subtract()([{0}, {1}])",
    "{0} + {1}",
)
"""What makes one tensor of two of one shape."""

FLATTEN = {
    3: ("layers.Flatten()({0})", "layers.GlobalAveragePooling1D()({0})", "{0}[:, -1]"),
    4: ("layers.Flatten()({0})", "layers.GlobalAveragePooling2D()({0})"),
    5: ("layers.Flatten()({0})", "layers.GlobalMaxPooling3D()({0})"),
}
"""What makes vectors of tensors, by rank."""
