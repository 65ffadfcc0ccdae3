"""Posteriors over some weights of a network, as one vector."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn import noise
from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn._core.serialization import ConfiguredLayer
from tfp_ibnn.prediction.samplers import WeightSampler


class FlatPosterior(ConfiguredLayer, WeightPosterior, keras.layers.Layer):
    """Base of posteriors over some variables of a network, seen as one vector of `size` numbers.

    A subclass defines `draw` and `center`, both of flat vectors.

    Args:
        model: a built Keras model.
        places: which of `model.weights` are sampled, by position.
        **kwargs: those of `keras.layers.Layer`.
    """

    count = None
    arguments = ("places",)

    def __init__(self, model: keras.Model, places: Sequence[int], **kwargs: Any) -> None:
        kwargs["dtype"] = checks.full_precision(kwargs.get("dtype"))
        super().__init__(**kwargs)
        self.network, self.places = model, list(places)
        self.size = sum(math.prod(v.shape) for v in self.sampled)
        self.built = True

    @property
    def sampled(self) -> list[keras.Variable]:
        """The variables of `network` that are sampled."""
        return [self.network.weights[place] for place in self.places]

    def draw(self, key: Tensor, number: int | Tensor) -> Tensor:
        """Return draw `number` of those a key gives, (size,)."""
        raise NotImplementedError

    def center(self) -> Tensor:
        """Return the vector (size,) that stands for all."""
        raise NotImplementedError

    def sample(self, key: Tensor, number: int | Tensor) -> list[Tensor]:
        """Return set `number`, from 0 on, of those a key gives, in the order of `sampled`."""
        return self._cast(self.draw(key, number))

    def mean(self) -> list[Tensor]:
        """Return the values of the one set that stands for all."""
        return self._cast(self.center())

    def sampler(self, samples: int, **options: Any) -> WeightSampler:
        """Return what runs the networks; they have no noise."""
        for name, value in {"sampling": "iid", "independent": False, "dropout": False}.items():
            if options.get(name, value) != value:
                got = f"{type(self).__name__}; got {options[name]!r}"
                raise ValueError(f"`{name}` must be {value!r} for a {got}. Leave it out.")
        return WeightSampler(self, samples, options.get("chunk_size"))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor; the weights are saved as weights."""
        return {**super().get_config(), "model": keras.saving.serialize_keras_object(self.network)}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "FlatPosterior":
        """Return a posterior from what `get_config` gave; its weights are yet to be loaded."""
        load = keras.saving.deserialize_keras_object
        return cls(**{**config, "model": load(config["model"], custom_objects=custom_objects)})

    def _standard_normal(self, key: Tensor, number: int | Tensor) -> Tensor:
        source = noise.Source(seed=key, sample=ops.reshape(ops.cast(number, "int32"), (1,)))
        return source.normal(1, (self.size,), self.variable_dtype, None)[0]

    def _cast(self, vector: Tensor) -> list[Tensor]:
        parts = split(vector, self.sampled)
        return [ops.cast(x, v.dtype) for x, v in zip(parts, self.sampled, strict=True)]

    def _add(self, name: str, shape: tuple[int, ...]) -> keras.Variable:
        """Add a weight that `fit` sets; NaN before, so that nobody takes it for fitted."""
        fixed = {"initializer": "zeros", "trainable": False, "autocast": False, "name": name}
        weight = self.add_weight(shape, **fixed)
        weight.assign(np.full(shape, np.nan))
        return weight


def places_of(model: keras.Model, variables: Sequence[keras.Variable]) -> list[int]:
    """Return the positions of variables among `model.weights`."""
    position = {id(weight): place for place, weight in enumerate(model.weights)}
    return [position[id(variable)] for variable in variables]


def flat(variables: Sequence[keras.Variable]) -> np.ndarray:
    """Return the values of variables as one vector."""
    return np.concatenate([ops.convert_to_numpy(v.value).ravel() for v in variables])


def split(vectors: Tensor, variables: Sequence[keras.Variable]) -> list[Tensor]:
    """Cut vectors (..., size) into parts (..., *shape) for each variable."""
    parts, start = [], 0
    for variable in variables:
        end = start + math.prod(variable.shape)
        parts.append(ops.reshape(vectors[..., start:end], (*vectors.shape[:-1], *variable.shape)))
        start = end
    return parts
