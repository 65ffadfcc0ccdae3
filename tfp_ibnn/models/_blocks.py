"""What the builders share: input, blocks of layers, and output."""

from collections.abc import Sequence

import keras
from keras import layers

from tfp_ibnn._core import checks

Preprocessing = Sequence[keras.layers.Layer]
Shape = tuple[int, ...]

LEAST = {"lenet": 16, "vgg16": 32, "wide_resnet": 8}
"""Least height and width of the images of each network."""


def entrance(shape: Shape, preprocessing: Preprocessing) -> tuple[keras.KerasTensor, ...]:
    """Return a model's input and what comes out of its preprocessing."""
    inputs = x = keras.Input(shape, name="image" if len(shape) == 3 else "input")
    for layer in preprocessing:
        x = layer(x)
    return inputs, x


def dropped(x: keras.KerasTensor, rate: float, name: str) -> keras.KerasTensor:
    """Return `x`, the input of layer `name`, under dropout, or as it is if the rate is 0."""
    if checks.fraction("dropout", rate) == 0:
        return x
    return layers.Dropout(rate, name=f"{name}_dropout")(x)


def convolution(filters: int, size: int, strides: int, name: str) -> layers.Conv2D:
    """Return a convolution that a batch normalization follows, so without a bias."""
    options = {"padding": "same", "use_bias": False, "kernel_initializer": "he_normal"}
    return layers.Conv2D(filters, size, strides, name=name, **options)


def activated(x: keras.KerasTensor, norm: str, relu: str) -> keras.KerasTensor:
    """Return `x` after batch normalization and ReLU, layers of these names."""
    x = layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=norm)(x)
    return layers.ReLU(name=relu)(x)


def classifier(
    inputs: keras.KerasTensor, x: keras.KerasTensor, num_classes: int, last: str, name: str
) -> keras.Model:
    """Return the model `name`, whose layer `last` makes logits of `x`."""
    classes = checks.positive_integer("num_classes", num_classes)
    return keras.Model(inputs, layers.Dense(classes, name=last)(x), name=name)


def image_shape(shape: Shape, network: str) -> Shape:
    """Return a valid (height, width, channels) for a network."""
    shape, least = tuple(shape), LEAST[network]
    known = all(isinstance(size, int) and size >= 1 for size in shape)
    if len(shape) != 3 or not known or min(shape[:2]) < least:
        raise ValueError(
            f"{network} takes an `input_shape` of (height, width, channels), height and width at "
            f"least {least}; got {shape!r}."
        )
    return shape
