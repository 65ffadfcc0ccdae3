"""Small networks with known weights, and short ways to average them."""

import keras
import numpy as np
from keras import ops

import tfp_ibnn as ibnn
from tfp_ibnn._core import constraints

__all__ = [
    "JAX",
    "averaged",
    "classifier",
    "data",
    "dense",
    "linear",
    "numpy",
    "set_weights",
    "shallow",
    "statistics",
]

JAX = keras.backend.backend() == "jax"


def numpy(x):
    return ops.convert_to_numpy(x)


def data(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def set_weights(model, seed=0, size=0.5):
    """Give all trainable weights values that are the same on every backend."""
    rng = np.random.default_rng(seed)
    for weight in model.trainable_weights:
        weight.assign((size * rng.normal(size=weight.shape)).astype(weight.dtype))
    return model


def dense(units, activation=None, **kwargs):
    kwargs.setdefault("train_size", 10)
    return ibnn.StochasticDense(units, activation=activation, **kwargs)


def classifier(activation="softmax", classes=3, **kwargs):
    """A network of four inputs: a plain layer, and two stochastic ones."""
    return set_weights(
        keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(5, activation="tanh"),
                dense(4, "tanh", **kwargs),
                dense(classes, activation, **kwargs),
            ]
        )
    )


def shallow(activation="softmax", **kwargs):
    """A network of one stochastic layer, which compiles quickly."""
    return set_weights(keras.Sequential([keras.Input((4,)), dense(3, activation, **kwargs)]))


def linear(kernel, loc, scale, activation=None):
    """The network activation(sum_i w_i z_i x_i), with z_i from N(loc_i, scale_i^2)."""
    kernel, loc, scale = (np.asarray(part, "float32") for part in (kernel, loc, scale))
    layer = dense(kernel.shape[1], activation, use_bias=False)
    model = keras.Sequential([keras.Input((len(kernel),)), layer])
    layer.layer.kernel.assign(kernel)
    layer.posterior.affine.shift.assign(loc)
    layer.posterior.affine.raw_scale.assign([constraints.inverse_scale(float(s)) for s in scale])
    return model


def averaged(model, *args, **kwargs):
    """Return a MonteCarlo that runs eagerly where that is quicker than to compile it."""
    monte_carlo = ibnn.MonteCarlo(model, *args, **kwargs)
    if not JAX:
        monte_carlo.compile(run_eagerly=True)
    return monte_carlo


def statistics(monte_carlo, x):
    """Return the prediction for one batch the quick way: compiled on JAX, eagerly elsewhere."""
    if JAX:
        return monte_carlo.predict_on_batch(x)
    monte_carlo.resample()
    return {key: numpy(value) for key, value in monte_carlo(x).items()}
