"""VGG16 with batch normalization, for small images."""

import keras
from keras import layers

from tfp_ibnn.models import _blocks

__all__ = ["vgg16"]

# Channels of the convolutions; max-pooling after each group.
_GROUPS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16(
    input_shape: tuple[int, int, int] = (32, 32, 3),
    num_classes: int = 10,
    *,
    preprocessing: _blocks.Preprocessing = (),
    dropout: float = 0.0,
) -> keras.Model:
    """Return a VGG16 with layers `conv1` to `conv13`, `fc1`, `fc2` and `fc3`.

    3x3 convolutions, each followed by batch normalization and ReLU; then a classifier of 1024 and
    512 hidden units on the 512 features that are left of a 32x32 image.

    Args:
        input_shape: height, width and channels; at least 32 pixels each way.
        num_classes: number of logits.
        preprocessing: layers to put in front, such as `ibnn.data.preprocessing(...)`.
        dropout: rate of dropout on the input of `fc2` and `fc3`.

    References:
        Simonyan and Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition,
        arXiv 1409.1556.
    """
    inputs, x = _blocks.entrance(_blocks.image_shape(input_shape, "vgg16"), preprocessing)
    position = 0
    for group, channels in enumerate(_GROUPS, start=1):
        for filters in channels:
            position += 1
            x = _blocks.convolution(filters, 3, 1, f"conv{position}")(x)
            x = _blocks.activated(x, f"norm{position}", f"relu{position}")
        x = layers.MaxPooling2D(2, name=f"pool{group}")(x)
    x = layers.Flatten(name="flatten")(x)
    for position, units in enumerate((1024, 512), start=1):
        x = layers.Dense(units, "relu", kernel_initializer="he_normal", name=f"fc{position}")(x)
        x = _blocks.dropped(x, dropout, f"fc{position + 1}")
    return _blocks.classifier(inputs, x, num_classes, "fc3", "vgg16")
