"""Keras models around another model, whose inputs they take."""

import warnings
from collections.abc import Callable
from typing import Any

import keras

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn._core.serialization import naming_unknown_classes
from tfp_ibnn.conversion.graph import functional_graph


class PredictionWrapper:
    """A Keras model that takes the inputs of another one, `inner`: its argument `model`."""

    inner: keras.Model

    def get_config(self) -> dict[str, Any]:
        """Return the model inside; a subclass adds its own arguments."""
        return {**super().get_config(), "model": keras.saving.serialize_keras_object(self.inner)}

    @classmethod
    @naming_unknown_classes()
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> keras.Model:
        """Return a model from what `get_config` gave.

        Args:
            config: the constructor's arguments; `model`, `head` and `background` are configs.
            custom_objects: classes by their names, which Keras does not know.
        """
        config = keras_internals.readable(config)
        for name in ("model", "head", "background"):
            if name in config:
                part = keras.saving.deserialize_keras_object(config[name], custom_objects)
                config[name] = part
        with warnings.catch_warnings():
            # Whoever made the model was told.
            warnings.filterwarnings("ignore", message="`interval` holds")
            return cls(**config)


class ScaledModel(PredictionWrapper):
    """A classifier whose outputs are those of `inner`, each passed through `scale`."""

    returns_logits: bool | None  # None if it is not known before the model has run
    scale: Callable[[Any], Any]


def unscaled(model: keras.Model) -> keras.Model:
    """Return the classifier that a scaled model scales, if it has a graph, or else the model."""
    if isinstance(model, ScaledModel) and functional_graph(model.inner) is not None:
        return model.inner
    return model


def innermost(model: keras.Model) -> keras.Model:
    """Return the network inside of all wrappers; it has their inputs."""
    while isinstance(model, PredictionWrapper):
        model = model.inner
    return model.network if isinstance(model, WeightPosterior) else model
