"""A network with noise, its inputs, and the values of its weights."""

import keras
import numpy as np
from keras import layers

import tfp_ibnn as ibnn
from tests.layer_checklist import numpy

N = 50
POSTERIORS = {
    "gaussian": ibnn.NormalAffine,
    "planar": ibnn.NormalPlanar1d,
    "invconv": lambda **kwargs: ibnn.NormalInvConv(1, 1, **kwargs),
    "mixture": lambda **kwargs: ibnn.MixturePosterior(2, **kwargs),
    "base-mixture": lambda **kwargs: ibnn.FlowPosterior(
        [ibnn.flows.Planar()], components=2, **kwargs
    ),
}


def identity(posterior=None, **kwargs):
    """A stochastic layer whose output for ones is z."""
    return ibnn.Stochastic(layers.Identity(), posterior, train_size=N, **kwargs)


def mlp(posterior=None, **kwargs):
    return keras.Sequential(
        [
            keras.Input((4,)),
            ibnn.StochasticDense(5, activation="tanh", posterior=posterior, train_size=N, **kwargs),
            ibnn.StochasticDense(2, posterior=posterior, train_size=N, **kwargs),
        ]
    )


def data(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def distinct_rows(outputs):
    """Rows that differ by more than rounding, which may depend on a row's place in the batch."""
    return len(np.unique(outputs.round(5), axis=0))


def values(weights):
    return [numpy(weight.value).copy() for weight in weights]


def unchanged(before, after):
    return [np.array_equal(a, b) for a, b in zip(before, after, strict=True)]


def fit(model, epochs=1):
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(data(16, 4), data(16, 2, seed=1), batch_size=8, epochs=epochs, verbose=0)
