"""The network whose outputs and features are scored."""

import keras
import pytest
from keras import layers

from tests.decisions.tools import D


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(1)
    parts = [keras.Input((6,)), layers.Dense(D, "tanh", name="first")]
    found = keras.Sequential([*parts, layers.Dense(3, "softmax", name="last")])
    found.layers[-1].bias.assign([0.3, -0.2, 0.1])
    return found
