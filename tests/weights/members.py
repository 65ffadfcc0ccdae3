"""Examples for the members of an ensemble, and small networks that learn them."""

import keras
import numpy as np
import pytest

JAX = keras.backend.backend() == "jax"
SLOW = pytest.mark.slow
X = np.random.default_rng(0).normal(size=(20, 6, 6, 3)).astype("float32")
Y = np.random.default_rng(1).integers(0, 4, 20)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SMALL, LABELS = X.reshape(20, -1)[:, :5], Y


def small(seed, rate=0.1, builds=None):
    if builds is not None:
        builds.append(seed)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4)])
    model.compile(keras.optimizers.SGD(rate), LOSS)
    return model


def dropping(seed, **options):
    rate = options.get("rate", 0.1 * seed)
    parts = [keras.layers.Dropout(rate), keras.layers.Dense(4, **options.get("dense", {}))]
    model = keras.Sequential([keras.Input((5,)), *parts])
    model.compile("sgd", options.get("loss", LOSS))
    return model
