"""Targets of three kinds, and networks that end in given layers."""

import keras
import numpy as np

import tfp_ibnn as ibnn
from tests.monte_carlo_tools import dense

REGISTER = keras.saving.register_keras_serializable(package="tests")
DATA = np.random.default_rng(0)
X = DATA.normal(size=(20, 4)).astype("float32")
Y = {
    "count": DATA.poisson(2, 20).astype("float32"),
    "kind": DATA.integers(0, 3, 20),
    "size": DATA.normal(size=20).astype("float32"),
}


@REGISTER
def poisson(x):
    return ibnn.tfd.Poisson(log_rate=x)


def ends_in(*last, units=3):
    return keras.Sequential([keras.Input((4,)), dense(units), *last])
