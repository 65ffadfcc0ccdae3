"""What is not trained: Laplace, of a part of many examples, at the best of some priors."""

import keras
import numpy as np
import pytest
from keras import layers

from tests.calibration.tools import Batches, classes
from tfp_ibnn.calibration import examples, untrained
from tfp_ibnn.calibration.examples import Examples, Training, Validation
from tfp_ibnn.calibration.trials import Setting


def test_prior_precision_of_laplace_is_that_of_the_least_nll(small):
    held_out, output = (
        Examples(small.x[60:], small.y[60:].astype(int)),
        classes(3, from_logits=False),
    )
    training = Training((small.x[:60], small.y[:60]), 60, 2, None, 0)
    data = Validation(held_out, held_out)
    setting = Setting(small.model, output, *2 * [None], training, data, 2, 0)
    trial = next(untrained.laplace_of_the_last_layer(setting))
    place = [x is trial.engine.network.prior_precision for x in trial.engine.network.variables]
    priors = [float(state[place.index(True)]) for state in trial.states]
    np.testing.assert_allclose(np.divide(priors, priors[0]), untrained.PRIOR_FACTORS, rtol=1e-5)
    trial.try_states(data, output)
    nll = [output.best_nll(trial.engine.draw(x, held_out.x), held_out.y) for x in trial.states]
    assert trial.nll == min(nll) < max(nll)
    assert trial.best is trial.states[np.argmin(nll)]


def test_laplace_uses_a_part_of_many_examples(small, monkeypatch):
    monkeypatch.setattr(untrained, "EXAMPLES", 25)
    x, y, output = small.x[:60], small.y[:60], classes(3, from_logits=False)
    for data in ((x, y), Batches(x, y)):
        training = Training(data, 60, 2, None, 0)
        some = examples.read(data, small.model, output, "train", every=3)
        np.testing.assert_array_equal(some.x, x[::3])
        np.testing.assert_array_equal(some.y, y[::3])
    setting = Setting(small.model, output, *2 * [None], training, None, 2, 0)
    posterior = next(untrained.laplace_of_the_last_layer(setting)).engine.network
    config = posterior.get_config()
    assert config["fit"]["examples"] == 20
    assert config["temperature"] == pytest.approx(1 / 3)


def fitted(model, train, output):
    """A `Laplace` of the last layer."""
    training = Training(train, 60, 2, None, 0)
    setting = Setting(model, output, *2 * [None], training, None, 2, 0)
    (trial,) = untrained.laplace_of_the_last_layer(setting)
    assert not trial.fate
    return trial.engine.network


@pytest.mark.once
def test_an_example_of_weight_2_counts_as_two_for_laplace(small):
    x, y = small.x[:60], small.y[:60].astype(int)
    output = classes(3, from_logits=False)
    once = fitted(small.model, (x, y), output).get_config()["fit"]
    twice = fitted(small.model, (x, y, np.full(60, 2.0)), output).get_config()["fit"]
    assert twice == pytest.approx({key: 2 * value for key, value in once.items()}, rel=1e-5)


@pytest.mark.once
@pytest.mark.parametrize("positions", [(), (5,)])
@pytest.mark.parametrize("has_weights", [False, True])
def test_ignored_labels_are_no_examples_of_laplace(positions, has_weights):
    random = np.random.default_rng(0)
    model = keras.Sequential([keras.Input((*positions, 2)), layers.Dense(3, "softmax")])
    x = random.normal(size=(60, *positions, 2)).astype("float32")
    y = random.integers(0, 3, (60, *positions))
    weight = random.random(60) if has_weights else np.ones(60)
    is_kept = random.random(y.shape) < 0.7
    of_each = weight.reshape(60, *len(positions) * [1]) * is_kept
    expected = fitted(model, (x, y, of_each), classes(3, from_logits=False))
    output = classes(3, from_logits=False)
    output.ignored = 255
    given = (x, np.where(is_kept, y, 255)[..., None])
    found = fitted(model, (*given, weight) if has_weights else given, output)
    for one, other in zip(found.variables, expected.variables, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-4)
