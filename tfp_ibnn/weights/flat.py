"""Posteriors over some weights of a network, as one vector."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn import noise
from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor, matmul, tfd
from tfp_ibnn._core.serialization import ConfiguredLayer
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.weights.base import WeightPosterior

_SMALLEST_SCALE = 1e-10  # of weights that never move, such as those of dead units


class FlatPosterior(ConfiguredLayer, WeightPosterior, keras.layers.Layer):
    """Base of posteriors over some variables of a network, seen as one vector of `size` numbers.

    `places` says which of `model.weights` these are, by position. A subclass defines
    `draw(key, number)`, a vector (size,), and `center()`, the one that stands for all.
    """

    count = None
    keeps_statistics = True

    def __init__(self, model: keras.Model, places: Sequence[int], **kwargs: Any) -> None:
        kwargs["dtype"] = checks.full_precision(kwargs.get("dtype", precision_of(model)))
        super().__init__(**kwargs)
        self.network = self.model = model
        self.places = list(places)
        self.size = sum(math.prod(v.shape) for v in self.sampled)
        self.built = True

    @property
    def sampled(self) -> list[keras.Variable]:
        return [self.network.weights[place] for place in self.places]

    def sample(self, key: Tensor, number: int | Tensor) -> list[Tensor]:
        return split(self.draw(key, number), self.sampled)

    def mean(self) -> list[Tensor]:
        return split(self.center(), self.sampled)

    def _standard_normal(self, key: Tensor, number: Any, size: int | None = None) -> Tensor:
        number, size = ops.cast(number, "int32"), size or self.size
        source = noise.Source(seed=key, sample=ops.reshape(number, (-1,)))
        found = source.normal(math.prod(number.shape), (size,), self.variable_dtype, None)
        return ops.reshape(found, (*number.shape, size))

    def _add(self, name: str, shape: tuple[int, ...], start: float = math.nan) -> keras.Variable:
        """Add a weight that `fit` sets; NaN before, so that nobody takes it for fitted."""
        fixed = {"trainable": False, "autocast": False, "name": name}
        return self.add_weight(shape, keras.initializers.Constant(start), **fixed)


class Gaussian(FlatPosterior):
    """Base of N(loc, S S^T + factor^T factor), S lower triangular or diagonal: `scale`."""

    def _add_moments(self, rank: int, full: bool = False) -> None:
        self.loc = self._add("loc", (self.size,))
        self.scale = self._add("scale", (self.size, self.size) if full else (self.size,))
        self.factor = self._add("factor", (rank, self.size))

    def assign(self, loc: np.ndarray, scale: np.ndarray, factor: np.ndarray) -> None:
        """Set the moments, in the order of `sampled`."""
        scale = scale if scale.ndim == 2 else np.maximum(scale, _SMALLEST_SCALE)
        for weight, value in ((self.loc, loc), (self.scale, scale), (self.factor, factor)):
            weight.assign(value)

    def transform(self, eps: Tensor) -> Tensor:
        """Turn standard normal rows (S, size + rank) into draws (S, size)."""
        scale, own = ops.convert_to_tensor(self.scale), eps[:, : self.size]
        own = scale * own if len(scale.shape) == 1 else matmul(own, ops.transpose(scale))
        return self.loc + own + matmul(eps[:, self.size :], ops.convert_to_tensor(self.factor))

    def draw(self, key: Tensor, number: int | Tensor) -> Tensor:
        """Return draw `number` of those a key gives, (size,)."""
        size = self.size + self.factor.shape[0]
        return self.transform(self._standard_normal(key, number, size)[None])[0]

    def center(self) -> Tensor:
        """Return the mean."""
        return ops.convert_to_tensor(self.loc)

    def distribution(self) -> tfd.Distribution:
        weights = (self.loc, self.scale, self.factor)
        loc, scale, factor = map(ops.convert_to_tensor, weights)
        if len(scale.shape) == 2:
            return tfd.MultivariateNormalTriL(loc, scale)
        if not factor.shape[0]:
            return tfd.MultivariateNormalDiag(loc, scale)
        low_rank = tfd.MultivariateNormalDiagPlusLowRankCovariance
        return low_rank(loc, ops.square(scale), ops.transpose(factor))


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class GaussianWeights(Gaussian):
    """A Gaussian over some weights of a network: N(loc, diag(scale^2) + factor^T factor).

    Takes rank + 2 times the memory of the weights. Weights that are not sampled, batch-norm
    statistics among them, stay those of the network.

    Args:
        model: a built Keras model without stochastic layers.
        rank: number of rows of the factor.
        places: which of `model.weights` are sampled, by position; None takes the trainable ones.
        **kwargs: those of `keras.layers.Layer`.
    """

    keeps_statistics = False

    def __init__(
        self, model: keras.Model, rank: int, places: Sequence[int] | None = None, **kwargs: Any
    ) -> None:
        if stochastic_layers(model):
            raise ValueError(f"`model` {model.name!r} has stochastic layers: give a plain one.")
        places = places_of(model, model.trainable_weights) if places is None else places
        super().__init__(model, places, **kwargs)
        self.rank = checks.positive_integer("rank", rank)
        self._add_moments(self.rank)


def precision_of(model: keras.Model) -> str:
    """Return the type of sums over data and of moments: half precision is too little for them."""
    return "float64" if any(w.dtype == "float64" for w in model.weights) else "float32"


def places_of(model: keras.Model, variables: Sequence[keras.Variable]) -> list[int]:
    """Return the positions of variables among `model.weights`."""
    position = {id(weight): place for place, weight in enumerate(model.weights)}
    return [position[id(variable)] for variable in variables]


def flat(variables: Sequence[keras.Variable]) -> np.ndarray:
    """Return the values of variables as one vector."""
    return np.concatenate([ops.convert_to_numpy(v.value).ravel() for v in variables])


def double(x: Tensor) -> np.ndarray:
    """Return an array in float64."""
    return ops.convert_to_numpy(x).astype("float64")


def triangular(factor: np.ndarray) -> np.ndarray:
    """Return the lower triangular L, of positive diagonal, with L L' = F F'; never by F F'."""
    root = np.linalg.qr(factor.T, mode="r").T
    return root * np.where(np.diagonal(root) < 0, -1.0, 1.0)


def split(vectors: Tensor, variables: Sequence[keras.Variable]) -> list[Tensor]:
    """Cut vectors (..., size) into values (..., *shape) of each variable."""
    parts, start = [], 0
    for variable in variables:
        end = start + math.prod(variable.shape)
        part = ops.reshape(vectors[..., start:end], (*vectors.shape[:-1], *variable.shape))
        parts.append(ops.cast(part, variable.dtype))
        start = end
    return parts
