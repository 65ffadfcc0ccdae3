"""`calibrate` on problems whose answers are known."""

import keras
import numpy as np
import pytest
from keras import layers
from scipy.special import softmax

import tfp_ibnn as ibnn
from tests.calibration.tools import LOGITS, methods
from tfp_ibnn.calibration import fresh, run, untrained
from tfp_ibnn.calibration.examples import folds_of

WEIGHTS = np.array([[2.0, 0, -1], [0, 2, 1]])


@pytest.fixture(autouse=True)
def fast(eagerly):
    """Nothing said here is about compiled graphs."""


def labelled(count, seed=0):
    """Inputs, and labels that a linear network with these weights draws."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 2)).astype("float32")
    p = softmax(x @ WEIGHTS, axis=1)
    return x, (p.cumsum(axis=1) < rng.random((count, 1))).sum(axis=1)


def linear(weights, rate=0.0):
    model = keras.Sequential([keras.Input((2,)), layers.Dense(3)])
    model.compile(keras.optimizers.SGD(rate), LOGITS)
    model.layers[-1].set_weights([weights, np.zeros(3)])
    return model


def calibrated(model, validation, **options):
    return ibnn.calibrate(model, labelled(64, 9), validation, samples=2, verbose=False, **options)


@pytest.mark.once
@pytest.mark.parametrize(("count", "seed"), [(900, 0), (4000, 2)])
def test_a_calibrated_network_is_left_as_it_is(count, seed):
    report = calibrated(linear(WEIGHTS), labelled(count, seed))
    assert report.chosen.trial.name == "as it is"
    assert report.chosen.parameter == pytest.approx(1, abs=0.1)


@pytest.mark.once
def test_logits_three_times_too_large_get_a_temperature_of_3():
    report = calibrated(linear(3 * WEIGHTS), labelled(4000))
    assert report.chosen.name == "as it is + temperature"
    assert report.chosen.parameter == pytest.approx(3, rel=0.1)
    x, _ = labelled(100, 2)
    mean = report.model.predict(x, verbose=0)["mean"]
    np.testing.assert_allclose(mean, softmax(x @ WEIGHTS, axis=1), atol=0.05)


@pytest.mark.once
def test_errors_in_one_class_are_scaled_by_class():
    """Class 0 is predicted too often; no temperature changes that."""
    model = linear(WEIGHTS)
    model.layers[-1].set_weights([WEIGHTS, np.array([2.0, 0, 0])])
    report = calibrated(model, labelled(4000))
    nll = {candidate.name: candidate.nll.mean() for candidate in report.candidates}
    assert report.chosen.name == "as it is + vector scaling"
    assert nll[report.chosen.name] < nll["as it is + temperature"] - 0.1
    assert nll["as it is + temperature"] == pytest.approx(nll["as it is"], abs=0.1)
    x, _ = labelled(100, 2)
    mean = report.model.predict(x, verbose=0)["mean"]
    np.testing.assert_allclose(mean, softmax(x @ WEIGHTS, axis=1), atol=0.05)


@pytest.mark.once
def test_what_is_memorized_of_one_half_does_not_change_the_score_of_the_other():
    """A candidate knows the labels of all examples to fit, and of no other."""
    count = 1200
    x, y = labelled(count)
    is_known = folds_of(y, 2, 0) == 0
    answers = np.where(is_known[:, None], 3 * np.eye(3)[y], 0).astype("float32")
    inputs = [keras.Input((2,), name="point"), keras.Input((), dtype="int32", name="number")]
    plain = layers.Dense(3)
    memory = layers.Embedding(count, 3)
    model = keras.Model(inputs, plain(inputs[0]))
    knowing = keras.Model(inputs, plain(inputs[0]) + memory(inputs[1]))
    plain.set_weights([WEIGHTS, np.zeros(3)])
    memory.set_weights([answers])
    model.compile("sgd", LOGITS)
    data = ({"point": x, "number": np.arange(count)}, y)
    report = ibnn.calibrate(
        model, data, data, candidates={"memory": knowing}, samples=2, verbose=False
    )
    rows = {candidate.name: candidate for candidate in report.candidates}
    np.testing.assert_allclose(rows["memory"].nll, rows["as it is"].nll, rtol=1e-5)
    # The temperature that suits what is known makes all else overconfident.
    assert rows["memory + temperature"].parameter < 0.5
    assert rows["memory + temperature"].nll.mean() > rows["as it is"].nll.mean()
    assert report.chosen.trial is rows["as it is"].trial


def test_an_ensemble_is_chosen_where_networks_disagree(monkeypatch):
    """Each network has errors of its own, which its training leaves as they are."""
    monkeypatch.setattr(run, "METHODS", methods(untrained.as_it_is, trainings=(fresh.ensembles,)))
    rng = np.random.default_rng(0)

    def build():
        return linear(WEIGHTS + rng.normal(scale=1.5, size=WEIGHTS.shape))

    model = build()
    model.fit(*labelled(64, 9), verbose=0)
    report = calibrated(model, labelled(1500), effort="trainings", build=build)
    names = [f"ensemble of {size}" for size in (2, 3, 5)]
    rows = {x.name: x for x in report.candidates}
    assert report.chosen.trial.name in names
    assert [rows[name].trial.trainings for name in names] == [1, 2, 4]
    nll = [rows[f"{name} + temperature"].nll.mean() for name in ("as it is", *names)]
    assert nll[3] < nll[0] - 0.04
    # The larger ones have the networks of the smaller ones, and the model first.
    weights = [rows[name].trial.engine.network.get_weights()[0] for name in names]
    np.testing.assert_array_equal(weights[2][:3], weights[1])
    np.testing.assert_array_equal(weights[1][0], model.get_weights()[0])
