"""The networks of the experiments, which give logits, and the original report's posteriors."""

import keras
from keras import layers, ops

import tfp_ibnn as ibnn
from lib import checks

__all__ = [
    *("POSTERIORS", "lenet", "mlp", "posterior_map", "resnet20", "unet", "vgg16"),
    "wide_resnet",
]
POSTERIORS = ("gaussian", "flow", "mixture")
"""Kinds of posterior that `posterior_map` knows."""

# What the flow map has beside a Gaussian in all other layers. The report has no residual networks;
# there the first convolution of each group stands for its convolutions 4, 8 and 11.
_CONV, _DENSE = ibnn.NormalInvConv, ibnn.NormalPlanar1d
_FLOWS = {
    "mlp": {".*": _DENSE},
    "lenet": {"conv2": _CONV, "fc1": _DENSE},
    "vgg16": {"conv(4|8|11)": _CONV, "fc2": _DENSE},
    **dict.fromkeys(["wide_resnet", "resnet20"], {r"group\d_block1_conv1": _CONV, "fc": _DENSE}),
}


def mlp(
    input_shape,
    num_classes=10,
    *,
    hidden=(256, 128),
    activation="relu",
    preprocessing=(),
    dropout=0.0,
):
    """Return a perceptron with layers `fc1`, `fc2`, ...; images are flattened.

    Args:
        input_shape: of one example.
        num_classes: number of logits.
        hidden: units of the hidden layers.
        activation: of the hidden layers.
        preprocessing: layers to put in front, such as `ibnn.data.preprocessing(...)`.
        dropout: rate of dropout on the input of each layer but the first.
    """
    inputs = keras.Input(input_shape, name="image" if len(input_shape) == 3 else "input")
    x = _preprocessed(inputs, preprocessing)
    if len(x.shape) > 2:
        x = layers.Flatten(name="flatten")(x)
    for position, units in enumerate(hidden, start=1):
        x = layers.Dense(units, activation, name=f"fc{position}")(x)
        x = _dropped(x, dropout, f"fc{position + 1}")
    outputs = layers.Dense(num_classes, name=f"fc{len(hidden) + 1}")(x)
    return keras.Model(inputs, outputs, name="mlp")


def lenet(input_shape=(32, 32, 3), num_classes=10, *, preprocessing=(), dropout=0.0):
    """Return a LeNet with layers `conv1`, `conv2`, `fc1`, `fc2` and `fc3`.

    Two 5x5 convolutions without padding, of 6 and 16 channels; max-pooling after the first,
    average-pooling to 4x4 after the second; 120 and 84 hidden units, ReLU throughout. Images have
    at least 16 pixels each way. The arguments are those of `mlp`.
    """
    inputs = _image(input_shape, "lenet", 16)
    x = _preprocessed(inputs, preprocessing)
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
    return keras.Model(inputs, layers.Dense(num_classes, name="fc3")(x), name="lenet")


def unet(input_shape, num_classes, *, filters=(8, 16, 32), dropout=0.0):
    """Return a small U-Net (arXiv 1505.04597), which gives the logits of each pixel.

    Args:
        input_shape: of one image; each pooling halves its sides.
        num_classes: number of logits.
        filters: of the two convolutions at each size, from the full one on.
        dropout: rate of dropout at the smallest size.
    """
    inputs = keras.Input(input_shape, name="image")
    x, passed = inputs, []
    for number in filters[:-1]:
        x = _twice_convolved(x, number)
        passed.append(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Dropout(dropout)(_twice_convolved(x, filters[-1]))
    for number in reversed(filters[:-1]):
        x = layers.Concatenate()([layers.UpSampling2D()(x), passed.pop()])
        x = _twice_convolved(x, number)
    return keras.Model(inputs, layers.Conv2D(num_classes, 1)(x), name="unet")


def _twice_convolved(x, filters):
    for _ in range(2):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    return x


def vgg16(input_shape=(32, 32, 3), num_classes=10, *, preprocessing=(), dropout=0.0):
    """Return a VGG16 (arXiv 1409.1556) with layers `conv1` to `conv13`, `fc1`, `fc2` and `fc3`.

    3x3 convolutions, each followed by batch normalization and ReLU; then a classifier of 1024 and
    512 hidden units on the 512 features that are left of a 32x32 image. Images have at least 32
    pixels each way. Dropout is on the input of `fc2` and `fc3`.
    """
    inputs = _image(input_shape, "vgg16", 32)
    x, i = _preprocessed(inputs, preprocessing), 0
    for group, (filters, count) in enumerate([(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)], 1):
        for _ in range(count):
            i += 1
            x = _activated(_convolution(x, filters, 3, 1, f"conv{i}"), f"norm{i}", f"relu{i}")
        x = layers.MaxPooling2D(2, name=f"pool{group}")(x)
    x = layers.Flatten(name="flatten")(x)
    for position, units in enumerate((1024, 512), start=1):
        x = layers.Dense(units, "relu", kernel_initializer="he_normal", name=f"fc{position}")(x)
        x = _dropped(x, dropout, f"fc{position + 1}")
    return keras.Model(inputs, layers.Dense(num_classes, name="fc3")(x), name="vgg16")


def wide_resnet(
    input_shape=(32, 32, 3), num_classes=10, *, depth=28, width=10, preprocessing=(), dropout=0.0
):
    """Return a wide residual network, by default WRN-28-10 (arXiv 1605.07146), that gives logits.

    Three groups of pre-activated blocks of 16, 32 and 64 times `width` channels. Layers: `conv0`,
    `group1_block1_conv1`, `..._conv2`, `..._shortcut` where the shape changes, and so on, and `fc`.
    `depth` is 6n + 4 for n blocks a group: 10, 16, 22, 28, 34, 40. Dropout is between the
    convolutions of a block. Other arguments are those of `mlp`.
    """
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(f"`depth` must be 6n + 4: 10, 16, 22, 28, ...; got {depth!r}.")
    if width < 1:
        raise ValueError(f"`width` must be at least 1; got {width!r}.")
    inputs = _image(input_shape, "wide_resnet")
    x = _preprocessed(inputs, preprocessing)
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
    return keras.Model(inputs, layers.Dense(num_classes, name="fc")(x), name="wide_resnet")


@keras.saving.register_keras_serializable(package="experiments")
class FilterResponseNorm(layers.Layer):
    """Divide each channel of each example by its root mean square over positions, in float32.

        y = max(gamma * x / sqrt(mean(x^2) + 1e-6) + beta, tau)

    gamma, beta, tau: a number per channel, from 1, 0, 0. It has no statistics of batches. Singh and
    Krishnan, arXiv 1911.09737.
    """

    def build(self, input_shape):
        if len(input_shape) < 3:
            wanted = "positions between examples and channels"
            raise ValueError(f"FilterResponseNorm needs {wanted}; got the shape {input_shape}.")
        for name, start in {"gamma": "ones", "beta": "zeros", "tau": "zeros"}.items():
            weight = self.add_weight(input_shape[-1:], start, name=name, autocast=False)
            setattr(self, name, weight)

    def call(self, inputs):
        x = ops.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        square = ops.mean(ops.square(x), axis=tuple(range(1, len(x.shape) - 1)), keepdims=True)
        gamma, beta, tau = (ops.cast(v, x.dtype) for v in (self.gamma, self.beta, self.tau))
        y = ops.maximum(gamma * x * ops.rsqrt(square + 1e-6) + beta, tau)
        return ops.cast(y, self.compute_dtype)


def resnet20(input_shape=(32, 32, 3), num_classes=10):
    """Return a ResNet-20 with filter response normalization and swish: no statistics of batches.

    On CIFAR-10 its posterior was drawn by HMC (Izmailov et al., arXiv 2104.14421). Three groups of
    three blocks of 16, 32 and 64 channels, named as in `wide_resnet`; convolutions have biases. It
    has 274,042 weights.
    """
    inputs = x = _image(input_shape, "resnet20")

    def normalized(x, *sizes, name):
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
    return keras.Model(inputs, layers.Dense(num_classes, name="fc")(x), name="resnet20")


def posterior_map(model, kind, *, deterministic=None, layers=None, depth=None, **options):
    """Return the posteriors of a network's layers, as `to_stochastic` takes them.

    Args:
        model: the name of the network.
        kind: "gaussian", in every layer; "flow", where the original report had flows, Gaussians
            elsewhere; "mixture", of Gaussians, with one component index for all layers.
        deterministic: a pattern of layers that have no posterior, unless they have a flow.
        layers: of "flow", a pattern of layers to have `NormalInvConv`, not the report's choice.
        depth: of "flow", the `depth` of each; None takes their own.
        **options: for every posterior, such as `prior_scale` or, for mixtures, `components`.
    """
    checks.choice(*_FLOWS)("model", model)
    checks.choice(*POSTERIORS)("kind", kind)
    if kind != "flow" and (layers is not None or depth is not None):
        raise ValueError(f"`layers` and `depth` are of flows, and {kind!r} has none.")
    rest = ".*" if deterministic is None else f"(?!(?:{deterministic})$).*"
    if kind == "mixture":
        return {rest: ibnn.MixturePosterior(**options)}
    flows = {} if kind == "gaussian" else _FLOWS[model] if layers is None else {layers: _CONV}
    of_flows = options if depth is None else {"depth": depth, **options}
    found = {pattern: recipe(**of_flows) for pattern, recipe in flows.items()}
    elsewhere = found.pop(".*", None) or ibnn.NormalAffine(**options)
    return {**found, rest: elsewhere}


def _image(shape, network, least=8):
    is_image = len(shape) == 3 and all(isinstance(size, int) and size >= 1 for size in shape)
    if not is_image or min(shape[:2]) < least:
        wanted = f"(height, width, channels), height and width at least {least}"
        raise ValueError(f"{network} takes an `input_shape` of {wanted}; got {shape!r}.")
    return keras.Input(shape, name="image")


def _preprocessed(x, preprocessing):
    for layer in preprocessing:
        x = layer(x)
    return x


def _dropped(x, rate, name):
    """Return `x`, the input of layer `name`, under dropout, or as it is if the rate is 0."""
    return layers.Dropout(rate, name=f"{name}_dropout")(x) if rate else x


def _convolution(x, filters, size, strides, name, use_bias=False):
    options = {"padding": "same", "use_bias": use_bias, "kernel_initializer": "he_normal"}
    return layers.Conv2D(filters, size, strides, name=name, **options)(x)


def _activated(x, norm, relu):
    x = layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=norm)(x)
    return layers.ReLU(name=relu)(x)
