"""A perceptron, the original report's LeNet, VGG16, residual networks; their posteriors."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import layers

from tfp_ibnn import posteriors
from tfp_ibnn._core import checks
from tfp_ibnn.layers import FilterResponseNorm

Preprocessing = Sequence[layers.Layer]
Shape = tuple[int, ...]
Tensor = keras.KerasTensor
POSTERIORS = ("gaussian", "flow", "mixture")
"""Kinds of posterior that `posterior_map` knows."""

# What the flow map has beside a Gaussian in all other layers. The report has no wide residual
# network; there the first convolution of each group stands for its convolutions 4, 8 and 11.
_CONV, _DENSE = posteriors.NormalInvConv, posteriors.NormalPlanar1d
_FLOWS = {
    "mlp": {".*": _DENSE},
    "lenet": {"conv2": _CONV, "fc1": _DENSE},
    "vgg16": {"conv(4|8|11)": _CONV, "fc2": _DENSE},
    **dict.fromkeys(["wide_resnet", "resnet20"], {r"group\d_block1_conv1": _CONV, "fc": _DENSE}),
}


def mlp(
    input_shape: Shape,
    num_classes: int = 10,
    *,
    hidden: Sequence[int] = (256, 128),
    activation: str = "relu",
    preprocessing: Preprocessing = (),
    dropout: float = 0.0,
) -> keras.Model:
    """Return a perceptron with layers `fc1`, `fc2`, ...; the last one gives the logits.

    Args:
        input_shape: of one example; images are flattened.
        num_classes: number of logits.
        hidden: units of the hidden layers.
        activation: of the hidden layers.
        preprocessing: layers to put in front, such as `ibnn.data.preprocessing(...)`.
        dropout: rate of dropout on the input of each layer but the first.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> model = ibnn.models.mlp((2,), 2, hidden=(16,), activation="sigmoid")
        >>> [layer.name for layer in model.layers]
        ['input', 'fc1', 'fc2']
    """
    sizes = [checks.positive_integer("hidden", units) for units in hidden]
    inputs, x = _entrance(input_shape, preprocessing)
    if len(x.shape) > 2:
        x = layers.Flatten(name="flatten")(x)
    for position, units in enumerate(sizes, start=1):
        x = layers.Dense(units, activation, name=f"fc{position}")(x)
        x = _dropped(x, dropout, f"fc{position + 1}")
    return _classifier("mlp", inputs, x, num_classes, f"fc{len(sizes) + 1}")


def lenet(
    input_shape: Shape = (32, 32, 3),
    num_classes: int = 10,
    *,
    preprocessing: Preprocessing = (),
    dropout: float = 0.0,
) -> keras.Model:
    """Return a LeNet with layers `conv1`, `conv2`, `fc1`, `fc2` and `fc3`.

    Two 5x5 convolutions without padding, of 6 and 16 channels; max-pooling after the first,
    average-pooling to 4x4 after the second; 120 and 84 hidden units, ReLU throughout. Images have
    at least 16 pixels each way. The arguments are those of `mlp`.
    """
    inputs, x = _entrance(input_shape, preprocessing, "lenet", 16)
    x = layers.Conv2D(6, 5, activation="relu", name="conv1")(x)
    x = layers.MaxPooling2D(2, name="pool1")(x)
    x = _dropped(x, dropout, "conv2")
    x = layers.Conv2D(16, 5, activation="relu", name="conv2")(x)
    # The adaptive layer takes four times as long; where 4 divides the size, the two are the same.
    height, width = x.shape[1:3]
    even = height % 4 == width % 4 == 0
    pool = layers.AveragePooling2D((height // 4, width // 4), name="pool2") if even else None
    x = (pool or layers.AdaptiveAveragePooling2D(4, name="pool2"))(x)
    x = _dropped(layers.Flatten(name="flatten")(x), dropout, "fc1")
    x = _dropped(layers.Dense(120, "relu", name="fc1")(x), dropout, "fc2")
    x = _dropped(layers.Dense(84, "relu", name="fc2")(x), dropout, "fc3")
    return _classifier("lenet", inputs, x, num_classes, "fc3")


def vgg16(
    input_shape: Shape = (32, 32, 3),
    num_classes: int = 10,
    *,
    preprocessing: Preprocessing = (),
    dropout: float = 0.0,
) -> keras.Model:
    """Return a VGG16 with layers `conv1` to `conv13`, `fc1`, `fc2` and `fc3`.

    3x3 convolutions, each followed by batch normalization and ReLU; then a classifier of 1024 and
    512 hidden units on the 512 features that are left of a 32x32 image. Images have at least 32
    pixels each way. The arguments are those of `mlp`; dropout is on the input of `fc2` and `fc3`.

    References:
        Simonyan and Zisserman, Very Deep Convolutional Networks, arXiv 1409.1556.
    """
    inputs, x = _entrance(input_shape, preprocessing, "vgg16", 32)
    i = 0
    for group, (filters, count) in enumerate([(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)], 1):
        for _ in range(count):
            i += 1
            x = _activated(_convolution(x, filters, 3, 1, f"conv{i}"), f"norm{i}", f"relu{i}")
        x = layers.MaxPooling2D(2, name=f"pool{group}")(x)
    x = layers.Flatten(name="flatten")(x)
    for position, units in enumerate((1024, 512), start=1):
        x = layers.Dense(units, "relu", kernel_initializer="he_normal", name=f"fc{position}")(x)
        x = _dropped(x, dropout, f"fc{position + 1}")
    return _classifier("vgg16", inputs, x, num_classes, "fc3")


def wide_resnet(
    input_shape: Shape = (32, 32, 3),
    num_classes: int = 10,
    *,
    depth: int = 28,
    width: int = 10,
    preprocessing: Preprocessing = (),
    dropout: float = 0.0,
) -> keras.Model:
    """Return a wide residual network, by default WRN-28-10.

    Three groups of pre-activated blocks of 16, 32 and 64 times `width` channels. Layers: `conv0`,
    `group1_block1_conv1`, `..._conv2`, `..._shortcut` where the shape changes, and so on, and `fc`.
    `depth` is 6n + 4 for n blocks a group: 10, 16, 22, 28, 34, 40. Images have at least 8 pixels
    each way. Other arguments are those of `mlp`; dropout is between the convolutions of a block.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> ibnn.models.wide_resnet(depth=10, width=1).count_params()
        78330

    References:
        Zagoruyko and Komodakis, Wide Residual Networks, arXiv 1605.07146.
    """
    if checks.positive_integer("depth", depth) < 10 or (depth - 4) % 6:
        raise ValueError(f"`depth` must be 6n + 4: 10, 16, 22, 28, ...; got {checks.shown(depth)}.")
    width = checks.positive_integer("width", width)
    inputs, x = _entrance(input_shape, preprocessing, "wide_resnet", 8)
    x = _convolution(x, 16, 3, 1, "conv0")
    for group in (1, 2, 3):
        for block in range(1, (depth - 4) // 6 + 1):
            channels, strides = 8 * 2**group * width, 2 if group > 1 and block == 1 else 1
            name = f"group{group}_block{block}"
            active = _activated(x, f"{name}_1_norm", f"{name}_1_relu")
            if x.shape[-1] != channels or strides != 1:
                x = _convolution(active, channels, 1, strides, f"{name}_shortcut")
            change = _convolution(active, channels, 3, strides, f"{name}_conv1")
            change = _activated(change, f"{name}_2_norm", f"{name}_2_relu")
            change = _dropped(change, dropout, name)
            change = _convolution(change, channels, 3, 1, f"{name}_conv2")
            x = layers.Add(name=f"{name}_add")([x, change])
    x = _activated(x, "final_norm", "final_relu")
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return _classifier("wide_resnet", inputs, x, num_classes, "fc")


def resnet20(input_shape: Shape = (32, 32, 3), num_classes: int = 10) -> keras.Model:
    """Return a ResNet-20 with filter response normalization and swish: no statistics of batches.

    On CIFAR-10 its posterior was drawn by HMC (Izmailov et al., arXiv 2104.14421). Three groups of
    three blocks of 16, 32 and 64 channels, named as in `wide_resnet`; convolutions have biases.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> model = ibnn.models.resnet20()  # 274,042 weights
    """
    inputs, x = _entrance(input_shape, (), "resnet20", 8)

    def normalized(x: Tensor, *sizes: int, name: str) -> Tensor:
        x = _convolution(x, *sizes, name, use_bias=True)
        return FilterResponseNorm(name=f"{name}_norm")(x)

    x = layers.Activation("silu", name="silu0")(normalized(x, 16, 3, 1, name="conv0"))
    for group in (1, 2, 3):
        for block in (f"group{group}_block{number}" for number in (1, 2, 3)):
            channels, strides = 8 * 2**group, 2 if x.shape[-1] < 8 * 2**group else 1
            change = normalized(x, channels, 3, strides, name=f"{block}_conv1")
            change = layers.Activation("silu", name=f"{block}_1_silu")(change)
            change = normalized(change, channels, 3, 1, name=f"{block}_conv2")
            x = x if strides == 1 else normalized(x, channels, 1, 2, name=f"{block}_shortcut")
            x = layers.Activation("silu", name=f"{block}_2_silu")(layers.add([x, change]))
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return _classifier("resnet20", inputs, x, num_classes, "fc")


def posterior_map(
    model: str,
    kind: str,
    *,
    deterministic: str | None = None,
    layers: str | None = None,
    depth: int | None = None,
    **kwargs: Any,
) -> dict[str, posteriors.Posterior]:
    """Return the posteriors of a network's layers, as `to_stochastic` takes them.

    Args:
        model: "mlp", "lenet", "vgg16", "wide_resnet" or "resnet20", the network of that name.
        kind: "gaussian", in every layer; "flow", where the original report had flows, Gaussians
            elsewhere; "mixture", of Gaussians, with one component index for all layers.
        deterministic: a pattern of layers that have no posterior, unless they have a flow.
        layers: of "flow", a pattern of layers to have `NormalInvConv`, not the report's choice.
        depth: of "flow", the `depth` of each; None takes their own.
        **kwargs: for every posterior, such as `prior_scale` or, for mixtures, `components`.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> list(ibnn.models.posterior_map("vgg16", "flow", prior_scale=0.3))
        ['conv(4|8|11)', 'fc2', '.*']
    """
    checks.one_of("model", model, tuple(_FLOWS))
    checks.one_of("kind", kind, POSTERIORS)
    if kind != "flow" and (layers is not None or depth is not None):
        raise ValueError(f"`layers` and `depth` are of flows, and {kind!r} has none.")
    rest = ".*" if deterministic is None else f"(?!(?:{deterministic})$).*"
    if kind == "mixture":
        return {rest: posteriors.MixturePosterior(**kwargs)}
    flows = {} if kind == "gaussian" else _FLOWS[model] if layers is None else {layers: _CONV}
    options = kwargs if depth is None else {"depth": depth, **kwargs}
    found = {pattern: recipe(**options) for pattern, recipe in flows.items()}
    elsewhere = found.pop(".*", None) or posteriors.NormalAffine(**kwargs)
    return {**found, rest: elsewhere}


def _entrance(
    shape: Shape, preprocessing: Preprocessing, network: str = "", least: int = 0
) -> tuple[Tensor, Tensor]:
    """Return a model's input and what comes out of its preprocessing."""
    shape = tuple(shape)
    is_image = len(shape) == 3 and all(isinstance(size, int) and size >= 1 for size in shape)
    if least and not (is_image and min(shape[:2]) >= least):
        wanted = f"(height, width, channels), height and width at least {least}"
        raise ValueError(f"{network} takes an `input_shape` of {wanted}; got {shape!r}.")
    inputs = x = keras.Input(shape, name="image" if len(shape) == 3 else "input")
    for layer in preprocessing:
        x = layer(x)
    return inputs, x


def _dropped(x: Tensor, rate: float, name: str) -> Tensor:
    """Return `x`, the input of layer `name`, under dropout, or as it is if the rate is 0."""
    rate = checks.fraction("dropout", rate)
    return layers.Dropout(rate, name=f"{name}_dropout")(x) if rate else x


def _convolution(x: Tensor, filters: int, size: int, strides: int, name: str, **kw: Any) -> Tensor:
    """Return a convolution of `x`; without a bias, for a batch normalization to follow."""
    options = {"padding": "same", "use_bias": False, "kernel_initializer": "he_normal", **kw}
    return layers.Conv2D(filters, size, strides, name=name, **options)(x)


def _activated(x: Tensor, norm: str, relu: str) -> Tensor:
    x = layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=norm)(x)
    return layers.ReLU(name=relu)(x)


def _classifier(name: str, inputs: Tensor, x: Tensor, num_classes: int, last: str) -> keras.Model:
    classes = checks.positive_integer("num_classes", num_classes)
    return keras.Model(inputs, layers.Dense(classes, name=last)(x), name=name)
