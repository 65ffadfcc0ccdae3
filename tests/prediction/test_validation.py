"""Models, inputs and answers that no prediction can be made of."""

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests.monte_carlo_tools import averaged, data, dense, numpy, set_weights, shallow
from tests.prediction.tools import evaluate, predict


def test_a_stateful_layer_is_refused():
    """Its states are of the rows of one batch, which draws multiply."""
    sizes = {"batch_shape": (2, 3, 4)}
    plain = keras.Sequential([keras.Input(**sizes), layers.GRU(2, stateful=True), layers.Dense(2)])
    noisy = ibnn.to_stochastic(plain, ibnn.NormalAffine(), train_size=2)
    for model in (noisy, ibnn.DeepEnsemble([plain])):
        with pytest.raises(ValueError, match="`stateful=True`"):
            ibnn.MonteCarlo(model, head="softmax", from_logits=True)


@pytest.fixture(scope="module")
def logits_taken_for_probabilities():
    return averaged(shallow(None), 4, from_logits=False)


@pytest.mark.once
def test_outputs_that_are_no_probabilities_are_refused(logits_taken_for_probabilities):
    mc = logits_taken_for_probabilities
    with pytest.raises(ValueError, match="4 of 4 examples.*sum to 1.*from_logits=True"):
        predict(mc, data(4, 4))
    with pytest.raises(ValueError, match="sum to 1.*from_logits=True"):
        evaluate(mc, data(4, 4), np.zeros(4, int))
    with pytest.raises(ValueError, match="sum to 1.*from_logits=True"):
        mc.predict_on_batch(data(4, 4))
    sigmoid = averaged(shallow("sigmoid"), 4, head="softmax")
    with pytest.raises(ValueError, match="sum to 1"):
        predict(sigmoid, data(4, 4))
    tanh = averaged(shallow("tanh"), 4, head="sigmoid")
    with pytest.raises(ValueError, match="not probabilities"):
        predict(tanh, data(4, 4))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_inputs_that_are_not_finite_are_refused(value):
    """A ReLU may hide them on the way."""
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4, activation="relu"), dense(3, "softmax")]
    )
    mc = averaged(set_weights(model), 2)
    x, y = data(6, 4), np.zeros(6, int)
    x[2, 1] = value
    for attempt in (
        lambda: predict(mc, x),
        lambda: mc.predict_on_batch(x),
        lambda: evaluate(mc, x, y),
    ):
        with pytest.raises(ValueError, match="NaN or infinity.*number 2"):
            attempt()


def test_weights_that_are_not_finite_are_refused():
    model = shallow()
    model.layers[-1].layer.bias.assign([0.0, np.nan, 0.0])
    with pytest.raises(ValueError, match="3 of 3 examples.*not finite"):
        predict(averaged(model, 2), data(3, 4))


def test_a_spread_that_is_not_finite_is_refused(known_gaussian):
    """The mean alone is; the answer as a whole is not."""
    model = keras.models.clone_model(known_gaussian)
    model.set_weights(known_gaussian.get_weights())
    model.layers[0].layer.bias.assign([0.0, np.nan])
    mc = averaged(model, 2)
    with pytest.raises(ValueError, match="not finite"):
        predict(mc, np.ones((3, 1), "float32"))


@pytest.fixture(scope="module")
def of_three_classes():
    return averaged(shallow(), 2, seed=0)


@pytest.mark.parametrize(
    "y",
    [
        np.array([0, 1, 3]),
        np.array([0, 1, -1]),
        np.array([0.0, 1.0, np.nan]),
        np.array([0.0, 1.0, 0.5]),
        np.zeros((3, 3)),
        np.full((3, 3), 1 / 3),
    ],
)
def test_labels_outside_of_the_classes_are_refused(of_three_classes, y):
    with pytest.raises(ValueError, match="labels outside its classes"):
        evaluate(of_three_classes, data(3, 4), y)


def test_a_single_batch_is_checked_likewise(of_three_classes):
    with pytest.raises(ValueError, match="labels outside its classes"):
        of_three_classes.test_on_batch(data(3, 4), np.array([0, 1, 3]))


@pytest.mark.parametrize("shape", [(3, 4), (3, 2), (3, 1, 1), (3, 3, 1)])
def test_labels_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="shape"):
        evaluate(averaged(shallow(), 2), data(3, 4), np.zeros(shape, int))


def test_labels_are_needed(of_three_classes):
    with pytest.raises(ValueError, match="`y`|labels|targets"):
        evaluate(of_three_classes, data(3, 4))


@pytest.mark.once
def test_an_empty_batch_can_be_called(of_three_classes):
    """As by a replica that has no example."""
    empty = of_three_classes(np.zeros((0, 4), "float32"))
    assert numpy(empty["mean"]).shape == (0, 3)
    assert numpy(empty["entropy"]).shape == (0,)


def test_no_example_has_no_prediction_and_no_score(of_three_classes):
    with pytest.raises(ValueError, match="`x` holds no example"):
        evaluate(of_three_classes, data(0, 4), np.zeros(0, int))
    for method in (of_three_classes.predict, of_three_classes.predict_on_batch):
        with pytest.raises(ValueError, match="`x` holds no example"):
            method(data(0, 4))
