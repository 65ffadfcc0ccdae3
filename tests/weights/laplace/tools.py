"""Short ways to fit a Laplace approximation, and a classifier of a few points."""

import keras
import numpy as np
from keras import layers

import tfp_ibnn as ibnn
from tests.weights.laplace_tools import X, Y

RNG = np.random.default_rng(3)
CENTERS = 2 * RNG.normal(size=(3, 4))
LABELS = np.arange(60) % 3
POINTS = (CENTERS[LABELS] + RNG.normal(size=(60, 4))).astype("float32")


def fit_images(model, structure, subset="all", **options):
    la = ibnn.Laplace(model, subset, structure, **options)
    return la.fit(X, Y, batch_size=5, verbose=0)  # the second batch is filled up


def small(units=3, loss="sparse_categorical_crossentropy", activation="softmax"):
    """Return a network of 4, 5 and `units` units with fixed weights that fit the points."""
    rng = np.random.default_rng(0)
    hidden = layers.Dense(5, activation="relu")
    last = layers.Dense(units, activation=activation)
    model = keras.Sequential([keras.Input((4,)), hidden, layers.Dropout(0.5), last])
    model.compile(loss=loss)
    kernel = rng.normal(size=(4, 5))
    phi = np.maximum(POINTS @ kernel, 0)
    design = np.concatenate([phi, np.ones((60, 1))], axis=1)
    targets = 4 * np.eye(3)[LABELS][:, np.arange(units) % 3]
    w = np.linalg.lstsq(design, targets, rcond=None)[0]
    model.set_weights([kernel, np.zeros(5), w[:-1], w[-1]])
    return model


def fitted(model, **options):
    return ibnn.Laplace(model, **options).fit(POINTS, LABELS, batch_size=3, verbose=0)


def with_options(la, **options):
    """Return the same posterior with other options."""
    other = ibnn.Laplace.from_config({**la.get_config(), **options})
    other.set_weights([np.array(w) for w in la.get_weights()])
    return other
