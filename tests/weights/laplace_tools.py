"""A small network in float64, and its Gauss-Newton matrix from Jacobians."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from scipy.special import softmax

from tests.autodiff import whole_jacobian
from tfp_ibnn._core import keras_internals

RNG = np.random.default_rng(0)
X = RNG.normal(size=(7, 6, 6, 2))
Y = np.arange(7) % 3
OPTIONS = {"dtype": "float64"}


def slow_on_jax(test):
    """Leave a test to `make test-slow` on JAX, which takes seconds to compile each network."""
    return pytest.mark.slow(test) if keras.backend.backend() == "jax" else test


def network(kind="plain", activation="softmax"):
    """Return a network with strides, padding, dilation and a residual; or other layers."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 6, 2), dtype="float64")
    if kind == "plain":
        x = layers.Conv2D(3, 3, 2, padding="same", activation="relu", **OPTIONS)(inputs)
        x = layers.BatchNormalization(**OPTIONS)(x)
        y = layers.Conv2D(3, 2, padding="same", dilation_rate=2, use_bias=False, **OPTIONS)(x)
        x = layers.Add(**OPTIONS)([x, y])
    else:
        x = layers.DepthwiseConv2D(3, 2, **OPTIONS)(inputs)
        x = layers.LayerNormalization(**OPTIONS)(x)
        x = layers.BatchNormalization(**OPTIONS)(x)
        x = layers.Activation("relu", **OPTIONS)(x)
    x = layers.Flatten(**OPTIONS)(x)
    outputs = layers.Dense(3, activation=activation, name="last", **OPTIONS)(x)
    model = keras.Model(inputs, outputs)
    for v in model.weights:
        least = 0.5 if v.path.endswith(("variance", "gamma")) else -0.4
        v.assign(RNG.uniform(least, least + 0.8, v.shape))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=activation == "linear")
    model.compile(loss=loss)
    return model


def flat(variables):
    return np.concatenate([ops.convert_to_numpy(v).ravel() for v in variables])


def jacobian(model, variables, x=X):
    """Return logits (N, K) and their Jacobian (N, K, W); of a softmax, its logarithm's."""
    is_linear = model.layers[-1].activation is keras.activations.linear
    sizes = np.cumsum([int(np.prod(v.shape)) for v in variables])[:-1]

    def outputs(w):
        parts = ops.split(w, sizes.tolist())
        pairs = [(v, ops.reshape(part, v.shape)) for v, part in zip(variables, parts, strict=True)]
        with keras_internals.values_in_place(pairs):
            found = model(x, training=False)
            return found if is_linear else ops.log(found)

    w = flat(variables)
    return ops.convert_to_numpy(outputs(ops.convert_to_tensor(w))), whole_jacobian(outputs, w)


def gauss_newton(logits, j):
    p = softmax(logits, axis=-1)
    hessians = np.einsum("nk,kl->nkl", p, np.eye(p.shape[1])) - np.einsum("nk,nl->nkl", p, p)
    return np.einsum("nkw,nkl,nlv->wv", j, hessians, j)


def dense(structure, function=lambda values: values):
    """Return a structure's Q s(l) Q^T as a matrix."""
    eye = ops.eye(structure.size, dtype=structure.variables[0].dtype)
    return ops.convert_to_numpy(structure.scaled(eye, function))
