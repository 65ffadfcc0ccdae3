"""What is found out of a network's likelihood, and what is not guessed."""

import re

import keras
import pytest
from keras import layers, losses

import tfp_ibnn as ibnn
from tests.likelihoods.tools import ends_in
from tests.monte_carlo_tools import dense
from tfp_ibnn.layers import GaussianNLL
from tfp_ibnn.likelihoods import Categorical, Gaussian, Labels, Point
from tfp_ibnn.likelihoods.infer import likelihood_of

pytestmark = pytest.mark.once

LOSSES = {
    "sparse": (losses.SparseCategoricalCrossentropy(from_logits=True), Categorical),
    "categorical": (losses.CategoricalCrossentropy(from_logits=True), Categorical),
    "focal": (losses.CategoricalFocalCrossentropy(from_logits=True), Categorical),
    "binary": (losses.BinaryCrossentropy(from_logits=True), Labels),
    "listed": ([losses.BinaryCrossentropy(from_logits=True)], Labels),
    "mse": ("mse", Point),
    "mse function": (losses.mean_squared_error, Point),
    "huber": (losses.Huber(), Point),
    "gaussian": (GaussianNLL(), Gaussian),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_tells_of_a_linear_layer(name):
    loss, kind = LOSSES[name]
    model = ends_in(units=4)
    model.compile("sgd", loss)
    found = likelihood_of(model)
    assert type(found) is kind
    assert getattr(found, "from_logits", True) is True


@pytest.mark.parametrize(
    "loss", ["sparse_categorical_crossentropy", losses.categorical_crossentropy]
)
def test_linear_outputs_are_not_taken_for_probabilities(loss):
    """The loss says they are; the layer says they cannot be."""
    model = ends_in()
    model.compile("sgd", loss)
    with pytest.raises(ValueError, match="linear.*from_logits=True"):
        likelihood_of(model)


def test_what_is_said_goes_before_what_is_found():
    model = ends_in()
    model.compile("sgd", "mse")
    assert type(likelihood_of(model, "softmax", True)) is Categorical
    assert type(likelihood_of(model, "sigmoid", True)) is Labels
    assert type(likelihood_of(ends_in(units=1), None, True)) is Labels
    assert type(likelihood_of(ends_in(), None, True)) is Categorical
    assert type(likelihood_of(ends_in(layers.Softmax()), "point")) is Point


def test_nothing_is_guessed():
    with pytest.raises(ValueError, match='It is unknown.*not compiled.*from_logits=True.*"point"'):
        likelihood_of(ends_in())
    with pytest.raises(ValueError, match="It is unknown what.*another axis"):
        likelihood_of(keras.Sequential([keras.Input((2, 4)), dense(3), layers.Softmax(axis=1)]))


class Odd(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return y_pred


def odd(y_true, y_pred):
    return y_pred


@pytest.mark.parametrize(
    ("loss", "name"), [(Odd(), "Odd"), ([odd], "odd"), ("kl_divergence", "'kl_divergence'")]
)
def test_a_loss_that_does_not_tell_is_named_with_the_remedy(loss, name):
    model = ends_in()
    model.compile("sgd", loss)
    line = 'ibnn.MonteCarlo(model, head="softmax", from_logits=True)'
    with pytest.raises(ValueError, match=f"its loss is {name}.*{re.escape(line)}"):
        ibnn.MonteCarlo(model)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_logits_that_are_probabilities_are_refused(kind):
    with pytest.raises(ValueError, match=f"`from_logits` is True.*{kind}"):
        likelihood_of(ends_in(layers.Activation(kind)), from_logits=True)


def test_an_unknown_head_is_refused():
    with pytest.raises(ValueError, match="`head` must be one of 'softmax'.*'logits'"):
        likelihood_of(ends_in(), "logits")
