"""A perceptron, the original report's LeNet, and VGG16."""

from collections.abc import Sequence

import keras
from keras import layers

from tfp_ibnn._core import checks

Preprocessing = Sequence[layers.Layer]
Shape = tuple[int, ...]
Tensor = keras.KerasTensor


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
    # The normalization that follows a convolution has the bias.
    options = {"padding": "same", "use_bias": False, "kernel_initializer": "he_normal"}
    i = 0
    for group, (filters, count) in enumerate([(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)], 1):
        for _ in range(count):
            i += 1
            x = layers.Conv2D(filters, 3, name=f"conv{i}", **options)(x)
            x = layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=f"norm{i}")(x)
            x = layers.ReLU(name=f"relu{i}")(x)
        x = layers.MaxPooling2D(2, name=f"pool{group}")(x)
    x = layers.Flatten(name="flatten")(x)
    for position, units in enumerate((1024, 512), start=1):
        x = layers.Dense(units, "relu", kernel_initializer="he_normal", name=f"fc{position}")(x)
        x = _dropped(x, dropout, f"fc{position + 1}")
    return _classifier("vgg16", inputs, x, num_classes, "fc3")


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


def _classifier(name: str, inputs: Tensor, x: Tensor, num_classes: int, last: str) -> keras.Model:
    classes = checks.positive_integer("num_classes", num_classes)
    return keras.Model(inputs, layers.Dense(classes, name=last)(x), name=name)
