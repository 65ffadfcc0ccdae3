"""Small stochastic networks, their data, and a short way to train them."""

import keras
import numpy as np

import tfp_ibnn as ibnn
from tests.layer_checklist import numpy

N = 16


def data(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


X, Y = data(N, 4), data(N, 2, seed=1)


def network(posterior=None, train_samples=1, **kwargs):
    posterior = posterior or ibnn.NormalAffine(initial_scale=0.2)
    inputs = keras.Input((4,))
    hidden = ibnn.StochasticDense(
        3, "tanh", posterior=posterior, train_size=N, name="one", **kwargs
    )
    last = ibnn.StochasticDense(2, posterior=posterior, train_size=N, name="two", **kwargs)
    return ibnn.StochasticModel(inputs, last(hidden(inputs)), train_samples=train_samples)


def plain_network(**kwargs):
    """The same without the class of its own."""
    return keras.Sequential(
        [
            keras.Input((4,)),
            ibnn.StochasticDense(
                2,
                posterior=ibnn.NormalAffine(initial_scale=0.2),
                train_size=N,
                name="one",
                **kwargs,
            ),
        ]
    )


def fit(model, epochs=1, callbacks=(), **kwargs):
    if model.built and not model.optimizer.built:  # TensorFlow would trace the first step twice
        model.optimizer.build(model.trainable_variables)
    return model.fit(
        X, Y, batch_size=8, epochs=epochs, callbacks=list(callbacks), verbose=0, **kwargs
    ).history


def values(weights):
    return [numpy(weight.value).copy() for weight in weights]
