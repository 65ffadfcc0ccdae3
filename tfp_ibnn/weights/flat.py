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
from tfp_ibnn._core.serialization import ConfiguredLayer
from tfp_ibnn.weights.base import WeightPosterior


class FlatPosterior(ConfiguredLayer, WeightPosterior, keras.layers.Layer):
    """Base of posteriors over some variables of a network, seen as one vector of `size` numbers.

    A subclass defines `draw` and `center`, both of flat vectors.

    Args:
        model: a built Keras model.
        places: which of `model.weights` are sampled, by position.
        **kwargs: those of `keras.layers.Layer`.
    """

    count = None
    keeps_statistics = True
    arguments = ("model", "places")

    def __init__(self, model: keras.Model, places: Sequence[int], **kwargs: Any) -> None:
        kwargs["dtype"] = checks.full_precision(kwargs.get("dtype"))
        super().__init__(**kwargs)
        self.network, self.places = model, list(places)
        self.size = sum(math.prod(v.shape) for v in self.sampled)
        self.built = True

    @property
    def model(self) -> keras.Model:
        """The network."""
        return self.network

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
        return values_of(self.draw(key, number), self.sampled)

    def mean(self) -> list[Tensor]:
        """Return the values of the one set that stands for all."""
        return values_of(self.center(), self.sampled)

    def _standard_normal(
        self, key: Tensor, number: int | Tensor, size: int | None = None
    ) -> Tensor:
        source = noise.Source(seed=key, sample=ops.reshape(ops.cast(number, "int32"), (1,)))
        return source.normal(1, (size or self.size,), self.variable_dtype, None)[0]

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


def values_of(vector: Tensor, variables: Sequence[keras.Variable]) -> list[Tensor]:
    """Return the parts of a vector (size,) as values of variables."""
    parts = zip(split(vector, variables), variables, strict=True)
    return [ops.cast(part, variable.dtype) for part, variable in parts]
