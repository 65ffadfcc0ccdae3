"""Keras's own layers made stochastic, by their own arguments, and those of TensorFlow Probability.

`DenseFlipout` and the like take the arguments of the Keras layer, those of `ibnn.MeanField`, and
`train_size`. Their names end in the estimator: Reparameterization is "shared", Flipout "flipout",
LocalReparameterization "local". What TFP's other arguments become: docs/from_tfp.md.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import keras
from keras import layers

from tfp_ibnn._core import checks
from tfp_ibnn.layers.mean_field import MeanFieldLayer
from tfp_ibnn.layers.multiplicative import Stochastic

_OF_STOCHASTIC = ("posterior", "train_size", "noise", "kl_reduction", "seed", "name", "trainable")
_OF_MEAN_FIELD = ("prior", "prior_scale", "initial_scale", "moped", "bias", "beta", "gamma", "seed")


class _StochasticPlain(Stochastic):
    """A stochastic layer that takes the arguments of a plain Keras layer and its own."""

    layer_class: ClassVar[type[keras.layers.Layer]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        own = {key: kwargs.pop(key) for key in _OF_STOCHASTIC if key in kwargs}
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
    """A Dense layer on noisy input: takes the arguments of Keras's layer and of `Stochastic`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> layer = ibnn.StochasticDense(8, activation="relu", train_size=100)
        >>> layer(keras.ops.ones((5, 3))).shape[-1]
        8
    """

    layer_class = layers.Dense


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class StochasticConv2D(_StochasticPlain):
    """A Conv2D layer on noisy input: takes the arguments of Keras's layer and of `Stochastic`."""

    layer_class = layers.Conv2D


def _named(name: str, kind: type[layers.Layer], estimator: str) -> Callable[..., MeanFieldLayer]:
    """Return a function that makes mean-field layers of one kind."""
    sizes = 1 if kind is layers.Dense else 2  # beyond these TFP and Keras differ in order

    def make(*args: Any, train_size: int | None = None, **kwargs: Any) -> MeanFieldLayer:
        if len(args) > sizes:
            raise TypeError(f"{name} takes {sizes} positional arguments; give others by name.")
        own = {key: kwargs.pop(key) for key in _OF_MEAN_FIELD if key in kwargs}
        outer = {key: kwargs.pop(key) for key in ("name", "trainable") if key in kwargs}
        # By its name: posteriors know their layers, and not the other way round.
        posterior = keras.saving.get_registered_object("tfp_ibnn>MeanField")
        template = posterior(estimator=estimator, **own)
        takers = (kind.__init__, make, posterior.__init__)
        with checks.known_keywords(name, kwargs, takers, but=("self", "estimator")):
            layer = kind(*args, **kwargs)
        return template.wrap(layer, train_size, **outer)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"Return `MeanField(estimator={estimator!r})` around `{kind.__name__}`."
    return make


DenseReparameterization = _named("DenseReparameterization", layers.Dense, "shared")
DenseFlipout = _named("DenseFlipout", layers.Dense, "flipout")
DenseLocalReparameterization = _named("DenseLocalReparameterization", layers.Dense, "local")
Conv1DReparameterization = _named("Conv1DReparameterization", layers.Conv1D, "shared")
Conv1DFlipout = _named("Conv1DFlipout", layers.Conv1D, "flipout")
Conv2DReparameterization = _named("Conv2DReparameterization", layers.Conv2D, "shared")
Conv2DFlipout = _named("Conv2DFlipout", layers.Conv2D, "flipout")
Conv3DReparameterization = _named("Conv3DReparameterization", layers.Conv3D, "shared")
Conv3DFlipout = _named("Conv3DFlipout", layers.Conv3D, "flipout")
