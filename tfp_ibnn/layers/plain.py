"""Keras's own layers on noisy input, by their own arguments."""

from typing import Any, ClassVar

import keras

from tfp_ibnn._core import checks
from tfp_ibnn.layers.multiplicative import Stochastic

_OWN = ("posterior", "train_size", "noise", "kl_reduction", "seed", "name", "trainable")


class _StochasticPlain(Stochastic):
    """A stochastic layer that takes the arguments of a plain Keras layer and its own."""

    layer_class: ClassVar[type[keras.layers.Layer]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        own = {key: kwargs.pop(key) for key in _OWN if key in kwargs}
        takers = (self.layer_class.__init__, Stochastic.__init__)
        with checks.known_keywords(type(self).__name__, kwargs, takers, but=("self", "layer")):
            layer = self.layer_class(*args, **kwargs)
        super().__init__(layer, **own)

    def get_config(self) -> dict[str, Any]:
        config, inner = super().get_config(), self.layer.get_config()
        del config["layer"]
        own = {"dtype": inner["dtype"], "layer_trainable": inner["trainable"]}
        return {**inner, **config, **own}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "_StochasticPlain":
        config = dict(config)
        trainable = config.pop("layer_trainable", True)
        layer = super().from_config(config, custom_objects)
        layer.layer.trainable = trainable
        return layer


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class StochasticDense(_StochasticPlain):
    """A Dense layer on noisy input: takes the arguments of `keras.layers.Dense` and `Stochastic`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> layer = ibnn.StochasticDense(8, activation="relu", train_size=100)
        >>> layer(keras.ops.ones((5, 3))).shape[-1]
        8
    """

    layer_class = keras.layers.Dense


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class StochasticConv2D(_StochasticPlain):
    """A Conv2D layer on noisy input: takes the arguments of `keras.layers.Conv2D` and `Stochastic`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> layer = ibnn.StochasticConv2D(8, 3, posterior=ibnn.NormalInvConv(), train_size=100)
        >>> layer(keras.ops.ones((5, 6, 6, 3))).shape[-1]
        8
    """

    layer_class = keras.layers.Conv2D
