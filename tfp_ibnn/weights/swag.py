"""SWAG: a Gaussian over weights, from the path that SGD takes."""

import collections
import math
import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor, tfd
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.weights.flat import FlatPosterior, places_of
from tfp_ibnn.weights.snapshots import Snapshots

_SMALLEST_VARIANCE = 1e-20  # of weights that never move, such as those of dead units


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class GaussianWeights(FlatPosterior):
    """A Gaussian over some weights of a network: N(mean, diag(variance) + factor^T factor).

    Takes rank + 2 times the memory of the weights; a draw costs rank + 1 normal-sized products.
    Weights that are not sampled, batch-norm statistics among them, stay those of the network.

    Args:
        model: a built Keras model without stochastic layers.
        rank: number of rows of the factor.
        places: which of `model.weights` are sampled, by position; None takes the trainable ones.
        **kwargs: those of `keras.layers.Layer`.
    """

    arguments = ("rank",)
    keeps_statistics = False

    def __init__(
        self, model: keras.Model, rank: int, places: Sequence[int] | None = None, **kwargs: Any
    ) -> None:
        if stochastic_layers(model):
            raise ValueError(f"`model` {model.name!r} has stochastic layers: give a plain one.")
        places = places_of(model, model.trainable_weights) if places is None else places
        wide = any(w.dtype == "float64" for w in model.weights)
        super().__init__(model, places, **{"dtype": "float64" if wide else "float32", **kwargs})
        self.rank = checks.positive_integer("rank", rank)
        self._mean = self._add("mean", (self.size,))
        self._variance = self._add("variance", (self.size,))
        self._factor = self._add("factor", (self.rank, self.size))

    def assign(self, mean: np.ndarray, variance: np.ndarray, factor: np.ndarray) -> None:
        """Set the moments, (size,), (size,) and (rank, size), in the order of `sampled`."""
        self._mean.assign(mean)
        self._variance.assign(np.maximum(variance, _SMALLEST_VARIANCE))
        self._factor.assign(factor)

    def draw(self, key: Tensor, number: int | Tensor) -> Tensor:
        """Return draw `number` of those a key gives, (size,)."""
        eps = self._standard_normal(key, number, self.size + self.rank)
        common = ops.matmul(eps[None, self.size :], self._factor)[0]
        return self._mean + ops.sqrt(self._variance) * eps[: self.size] + common

    def center(self) -> Tensor:
        """Return the means."""
        return ops.convert_to_tensor(self._mean)

    def distribution(self) -> Any:
        """Return the Gaussian over one vector: the values of `sampled`, flat, in order."""
        return tfd.MultivariateNormalDiagPlusLowRankCovariance(
            loc=ops.convert_to_tensor(self._mean),
            cov_diag_factor=ops.convert_to_tensor(self._variance),
            cov_perturb_factor=ops.transpose(self._factor),
        )


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class SWAG(Snapshots):
    """Fit a Gaussian to the weights along the path of SGD: a callback, whose result is a posterior.

        N(mean, 1/2 (diag(variance) + D^T D / (K - 1)))

    Mean and variance are those of all snapshots; the K rows of D are the last ones, less the mean.
    (The paper subtracts the mean so far, not knowing the last one yet.) Use a constant learning
    rate, high enough for SGD to wander. The posterior takes K + 2 times the memory of the weights.

    Args:
        every: take a snapshot after every so many epochs, or steps.
        start: how many to leave out first.
        unit: "epoch" or "step", of the two numbers.
        folder: for the snapshots, as for `Snapshots`; None keeps them in memory.
        rank: K, at least 2; as many as there are snapshots, if they are fewer.

    Example:
        >>> import keras, numpy as np, tfp_ibnn as ibnn
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.SGD(0.1), "mse")
        >>> swag, x = ibnn.SWAG(start=2, rank=5), np.ones((4, 3), "float32")
        >>> log = model.fit(x, x[:, :1], epochs=8, verbose=0, callbacks=[swag])
        >>> mc = ibnn.MonteCarlo(swag.posterior(), samples=16)

        With batch normalization: `swag.posterior().materialize(16, x_train)`.

    References:
        Maddox et al., A Simple Baseline for Bayesian Uncertainty in Deep Learning, arXiv
        1902.02476.
    """

    least = 2

    def __init__(
        self,
        every: int = 1,
        start: int = 0,
        unit: str = "epoch",
        folder: str | os.PathLike | None = None,
        rank: int = 20,
    ) -> None:
        super().__init__(every, start, unit, folder)
        self.rank = checks.positive_integer("rank", rank)
        if self.rank < 2:
            raise ValueError(f"`rank` must be at least 2; got {rank}.")

    def _posterior(self, model: keras.Model) -> GaussianWeights:
        made = GaussianWeights(model, min(self.rank, len(self.steps)))
        shapes = [tuple(w.shape) for w in model.weights]
        rows, mean, squares = collections.deque(maxlen=made.rank), 0.0, 0.0
        for number, values in enumerate(self.read(), 1):
            if [value.shape for value in values] != shapes:
                raise ValueError("The snapshots have other shapes than the weights of `model`.")
            rows.append(np.concatenate([values[i].ravel() for i in made.places]))
            if not np.isfinite(rows[-1]).all():
                raise ArithmeticError(f"Snapshot {number} is not finite: the training diverged.")
            gap = rows[-1].astype("float64") - mean
            mean = mean + gap / number
            squares = squares + gap * (rows[-1] - mean)
        factor = (np.stack(rows) - mean) / math.sqrt(2 * (made.rank - 1))
        made.assign(mean, squares / number / 2, factor)
        return made
