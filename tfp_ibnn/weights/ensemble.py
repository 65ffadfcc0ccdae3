"""A finite number of weight sets: an ensemble of trained models."""

import re
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.prediction.samplers import WeightSampler

# What may differ between two layers that compute the same for the same weights.
_OF_NO_EFFECT = re.compile(
    "name|seed|trainable|dtype|module|build_config|batch_shape|.*_initializer|.*_regularizer"
)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class WeightSets(WeightPosterior, keras.layers.Layer):
    """Weight sets of one network, all equally likely: copies, batch-norm statistics included.

    Args:
        models: built Keras models of one architecture.
        **kwargs: those of `keras.layers.Layer`.
    """

    def __init__(self, models: Sequence[keras.Model], **kwargs: Any) -> None:
        models = _checked(models)
        super().__init__(**kwargs)
        self.network, self.count = models[0], len(models)
        self._sets = []
        fixed = {"initializer": "zeros", "trainable": False, "autocast": False}
        for number, variable in enumerate(self.sampled):
            shape = (self.count, *variable.shape)
            stacked = self.add_weight(shape, dtype=variable.dtype, name=f"set_{number}", **fixed)
            stacked.assign(np.stack([ops.convert_to_numpy(x.weights[number]) for x in models]))
            self._sets.append(stacked)
        self.built = True

    def sample(self, key: Tensor, number: int | Tensor) -> list[Tensor]:
        """Return the set of a number; they repeat in order, whatever the key."""
        return [ops.take(stacked, number % self.count, axis=0) for stacked in self._sets]

    def mean(self) -> list[Tensor]:
        """Return the first set: what several trainings have in common is not their mean weight."""
        return [stacked[0] for stacked in self._sets]

    def materialize(self, number: int | None = None, data: Any = None) -> "WeightSets":
        """Return itself: there is a finite number of sets already."""
        return self

    def sampler(self, samples: int, **options: Any) -> WeightSampler:
        """Return what runs the networks; they have no noise."""
        for name, value in {"sampling": "iid", "independent": False, "dropout": False}.items():
            if options.get(name, value) != value:
                got = f"{type(self).__name__}; got {options[name]!r}"
                raise ValueError(f"`{name}` must be {value!r} for a {got}. Leave it out.")
        return WeightSampler(self, samples, options.get("chunk_size"))

    def get_config(self) -> dict[str, Any]:
        """Return the network and the number of sets; the weights are saved as weights."""
        network = keras.saving.serialize_keras_object(self.network)
        return {**super().get_config(), "network": network, "count": self.count}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "WeightSets":
        """Return sets from what `get_config` gave; their weights are yet to be loaded."""
        load, options = keras.saving.deserialize_keras_object, dict(config)
        network = load(options.pop("network"), custom_objects=custom_objects)
        return cls([network] * options.pop("count"), **options)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class DeepEnsemble(WeightSets):
    """Several trainings of one network, from different starts; `MonteCarlo` averages them.

    Args:
        models: built Keras models of one architecture, without stochastic layers. The first says
            what the output means: compile it with its loss, or give `MonteCarlo` a `head`.
        **kwargs: those of `keras.layers.Layer`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> def network():
        ...     return [keras.Input((3,)), keras.layers.Dense(2, activation="softmax")]
        >>> ensemble = ibnn.DeepEnsemble([keras.Sequential(network()) for _ in range(4)])
        >>> ibnn.MonteCarlo(ensemble).samples
        4

    References:
        Lakshminarayanan et al., Simple and Scalable Predictive Uncertainty Estimation using Deep
        Ensembles, arXiv 1612.01474.
    """


def _checked(models: Any) -> Sequence[keras.Model]:
    """Return the models, or raise if they are not built, or not of one architecture."""
    if not isinstance(models, Sequence) or not models:
        raise ValueError(f"`models` must be a list of built Keras models; got {models!r}.")
    for number, model in enumerate(models):
        if not isinstance(model, keras.Model):
            problem = f"must be a Keras model; got {model!r}."
        elif not model.built:
            problem = "is not built: call it on data, or build it, first."
        elif stochastic_layers(model):
            problem = "has stochastic layers: give plain models, or ibnn.to_deterministic(model)."
        elif _architecture(model) != _architecture(models[0]):
            problem = "is of another architecture than `models[0]`. Make both by one function."
        else:
            continue
        raise ValueError(f"`models[{number}]` {problem}")
    return models


def _architecture(model: keras.Model) -> list[Any]:
    """Return what decides on the outputs, but for the weights."""
    layers = keras_internals.nested_layers(model)
    leaves = [x for x in layers if not keras_internals.nested_layers(x, include_self=False)]
    kinds = [(type(layer).__name__, _settings(layer.get_config())) for layer in leaves]
    return [kinds, [(tuple(w.shape), w.dtype) for w in model.weights]]


def _settings(config: Any) -> Any:
    if isinstance(config, (list, tuple)):
        return [_settings(value) for value in config]
    if not isinstance(config, dict):
        return config
    return {key: _settings(x) for key, x in config.items() if not _OF_NO_EFFECT.fullmatch(key)}
