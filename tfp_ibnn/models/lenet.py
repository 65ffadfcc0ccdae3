"""The small convolutional network of the original report."""

import keras
from keras import layers

from tfp_ibnn.models import _blocks

__all__ = ["lenet"]


def lenet(
    input_shape: tuple[int, int, int] = (32, 32, 3),
    num_classes: int = 10,
    *,
    preprocessing: _blocks.Preprocessing = (),
    dropout: float = 0.0,
) -> keras.Model:
    """Return a LeNet with layers `conv1`, `conv2`, `fc1`, `fc2` and `fc3`.

    Two 5x5 convolutions without padding, of 6 and 16 channels; max-pooling after the first,
    average-pooling to 4x4 after the second; 120 and 84 hidden units, ReLU throughout. 44,726
    weights for CIFAR-10.

    Args:
        input_shape: height, width and channels; at least 16 pixels each way.
        num_classes: number of logits.
        preprocessing: layers to put in front, such as `ibnn.data.preprocessing(...)`.
        dropout: rate of dropout on the input of each layer but the first.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> ibnn.models.lenet((28, 28, 1)).count_params()
        44426
    """
    inputs, x = _blocks.entrance(_blocks.image_shape(input_shape, "lenet"), preprocessing)
    x = layers.Conv2D(6, 5, activation="relu", name="conv1")(x)
    x = layers.MaxPooling2D(2, name="pool1")(x)
    x = _blocks.dropped(x, dropout, "conv2")
    x = layers.Conv2D(16, 5, activation="relu", name="conv2")(x)
    x = layers.AdaptiveAveragePooling2D(4, name="pool2")(x)
    x = layers.Flatten(name="flatten")(x)
    for position, units in enumerate((120, 84), start=1):
        x = _blocks.dropped(x, dropout, f"fc{position}")
        x = layers.Dense(units, "relu", name=f"fc{position}")(x)
    x = _blocks.dropped(x, dropout, "fc3")
    return _blocks.classifier(inputs, x, num_classes, "fc3", "lenet")
