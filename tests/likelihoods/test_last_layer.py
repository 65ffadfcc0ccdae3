"""What the last layer of a network tells of its outputs."""

import keras
import pytest
from keras import layers, ops

from tests.likelihoods.tools import ends_in
from tests.monte_carlo_tools import dense
from tfp_ibnn.layers import GaussianHead
from tfp_ibnn.likelihoods import Categorical, Gaussian, Labels
from tfp_ibnn.likelihoods.infer import likelihood_of

pytestmark = pytest.mark.once


def functional(function):
    inputs = keras.Input((4,))
    return keras.Model(inputs, function(dense(3)(inputs)))


def nested(activation):
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation=activation)])
    inputs = keras.Input((4,))
    return keras.Model(inputs, inner(dense(4)(inputs)))


FOUND = {
    "softmax": (lambda: ends_in(layers.Softmax()), Categorical, False),
    "softmax activation": (lambda: ends_in(layers.Activation("softmax")), Categorical, False),
    "softmax of dense": (
        lambda: ends_in(layers.Dense(3, activation="softmax")),
        Categorical,
        False,
    ),
    "softmax operation": (lambda: functional(ops.softmax), Categorical, False),
    "softmax before reshape": (
        lambda: ends_in(layers.Softmax(), layers.Reshape((1, 3))),
        Categorical,
        False,
    ),
    "softmax nested": (lambda: nested("softmax"), Categorical, False),
    "sigmoid": (lambda: ends_in(layers.Activation("sigmoid")), Labels, False),
    "sigmoid operation": (lambda: functional(ops.sigmoid), Labels, False),
    "gaussian": (lambda: ends_in(GaussianHead(), units=4), Gaussian, None),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_last_layer_tells(name):
    make, kind, from_logits = FOUND[name]
    found = likelihood_of(make())
    assert type(found) is kind
    assert getattr(found, "from_logits", None) == from_logits
