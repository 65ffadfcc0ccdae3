"""A perceptron."""

from collections.abc import Sequence

import keras
from keras import layers

from tfp_ibnn._core import checks


def mlp(
    input_shape: tuple[int, ...],
    num_classes: int = 10,
    *,
    hidden: Sequence[int] = (256, 128),
    activation: str = "relu",
    preprocessing: Sequence[layers.Layer] = (),
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
    """
    sizes = [checks.positive_integer("hidden", units) for units in hidden]
    classes = checks.positive_integer("num_classes", num_classes)
    rate = checks.fraction("dropout", dropout)
    inputs = x = keras.Input(input_shape, name="image" if len(input_shape) == 3 else "input")
    for layer in preprocessing:
        x = layer(x)
    if len(x.shape) > 2:
        x = layers.Flatten(name="flatten")(x)
    for position, units in enumerate(sizes, start=1):
        x = layers.Dense(units, activation, name=f"fc{position}")(x)
        x = layers.Dropout(rate, name=f"fc{position + 1}_dropout")(x) if rate else x
    outputs = layers.Dense(classes, name=f"fc{len(sizes) + 1}")(x)
    return keras.Model(inputs, outputs, name="mlp")
