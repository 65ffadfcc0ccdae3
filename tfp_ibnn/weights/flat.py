"""Posteriors over some weights of a network, as one vector; Gaussian ones."""

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
from tfp_ibnn.weights.vectors import places_of, precision_of, split

_SMALLEST_SCALE = 1e-10  # of weights that never move, such as those of dead units


class FlatPosterior(ConfiguredLayer, WeightPosterior, keras.layers.Layer):
    """Base of posteriors over some variables of a network, seen as one vector of `size` numbers.

    A subclass defines `draw(key, number)`, a vector (size,), and `center()`, the one that stands
    for all.

    Args:
        model: a built Keras model; it is not copied.
        places: which of `model.weights` are sampled, by position.
        **kwargs: those of `keras.layers.Layer`. `dtype` defaults to the precision of the model.
    """

    count = None
    keeps_statistics = True

    def __init__(self, model: keras.Model, places: Sequence[int], **kwargs: Any) -> None:
        dtype = kwargs.pop("dtype", precision_of(model))
        super().__init__(dtype=checks.full_precision(dtype), **kwargs)
        self.network = model
        self.model = model
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
        """Return standard normal noise (*number.shape, size) for draws by their numbers."""
        size = size or self.size
        number = ops.cast(number, "int32")
        shape = number.shape
        numbers = ops.reshape(number, (-1,))
        source = noise.Source(seed=key, sample=numbers)
        rows = source.normal(math.prod(shape), (size,), self.variable_dtype, None)
        return ops.reshape(rows, (*shape, size))

    def _add(self, name: str, shape: tuple[int, ...], start: float = math.nan) -> keras.Variable:
        """Add a weight that `fit` sets; NaN before, so that nobody takes it for fitted."""
        return self.add_weight(
            shape,
            keras.initializers.Constant(start),
            trainable=False,
            autocast=False,
            name=name,
        )


class Gaussian(FlatPosterior):
    """Base of N(loc, S S^T + factor^T factor), S lower triangular or diagonal: `scale`."""

    def _add_moments(self, rank: int, full: bool = False) -> None:
        """Add the weights for the moments; `full` gives a triangular S."""
        size = self.size
        self.loc = self._add("loc", (size,))
        self.scale = self._add("scale", (size, size) if full else (size,))
        self.factor = self._add("factor", (rank, size))

    def assign(self, loc: np.ndarray, scale: np.ndarray, factor: np.ndarray) -> None:
        """Set the moments, in the order of `sampled`.

        Args:
            loc: mean (size,).
            scale: S: standard deviations (size,), of which none becomes 0, or a lower triangular
                matrix (size, size).
            factor: rows (rank, size) of the low-rank part; the rank may be 0.
        """
        if scale.ndim == 1:
            scale = np.maximum(scale, _SMALLEST_SCALE)
        self.loc.assign(loc)
        self.scale.assign(scale)
        self.factor.assign(factor)

    def transform(self, eps: Tensor) -> Tensor:
        """Turn standard normal rows (S, size + rank) into draws (S, size)."""
        scale = ops.convert_to_tensor(self.scale)
        factor = ops.convert_to_tensor(self.factor)
        eps_of_scale = eps[:, : self.size]
        eps_of_factor = eps[:, self.size :]
        if len(scale.shape) == 1:
            scaled = scale * eps_of_scale
        else:
            scaled = matmul(eps_of_scale, ops.transpose(scale))
        return self.loc + scaled + matmul(eps_of_factor, factor)

    def draw(self, key: Tensor, number: int | Tensor) -> Tensor:
        """Return draw `number` of those a key gives.

        Args:
            key: two integers.
            number: number of the draw, from 0 on.

        Returns:
            A vector (size,).
        """
        columns = self.size + self.factor.shape[0]
        eps = self._standard_normal(key, number, columns)
        return self.transform(eps[None])[0]

    def center(self) -> Tensor:
        """Return the mean."""
        return ops.convert_to_tensor(self.loc)

    def distribution(self) -> tfd.Distribution:
        loc = ops.convert_to_tensor(self.loc)
        scale = ops.convert_to_tensor(self.scale)
        factor = ops.convert_to_tensor(self.factor)
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
        rank: number of rows of the factor; 0 gives independent weights.
        places: which of `model.weights` are sampled, by position; None takes the trainable ones.
        **kwargs: those of `keras.layers.Layer`.
    """

    keeps_statistics = False

    def __init__(
        self, model: keras.Model, rank: int, places: Sequence[int] | None = None, **kwargs: Any
    ) -> None:
        if stochastic_layers(model):
            raise ValueError(f"`model` {model.name!r} has stochastic layers: give a plain one.")
        if places is None:
            places = places_of(model, model.trainable_weights)
        super().__init__(model, places, **kwargs)
        self.rank = checks.whole("rank", rank)
        self._add_moments(self.rank)
