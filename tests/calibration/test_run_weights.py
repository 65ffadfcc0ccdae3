"""Weights of validation and test examples: 2 counts one twice, and 0 leaves it out."""

import keras
import numpy as np
import pytest
from keras import layers
from scipy.special import softmax

import tfp_ibnn as ibnn
from tests.calibration.tools import methods
from tfp_ibnn.calibration import run, untrained
from tfp_ibnn.calibration.report import behind, choose
from tfp_ibnn.likelihoods import Categorical, Gaussian, Point

RNG = np.random.default_rng(0)
COUNT = 120
REPEATS = RNG.integers(0, 4, COUNT)
LOGITS = 3 * RNG.normal(size=(COUNT, 5, 3)).astype("float32")
LABELS = RNG.integers(0, 3, COUNT)
LOC, SCALE = RNG.normal(size=(COUNT, 5, 2)), RNG.uniform(0.5, 2, size=(COUNT, 5, 2))
NUMBERS = RNG.normal(size=(COUNT, 2)) * [1.0, 3.0]
OUTPUTS = {
    "classes": (Categorical(True, width=3), LOGITS, LABELS),
    "numbers": (Point(2), LOC, NUMBERS),
    "scales": (Gaussian(4), np.concatenate([LOC, SCALE], axis=-1), NUMBERS),
}


def repeated(*arrays):
    return [np.repeat(x, REPEATS, axis=0) for x in arrays]


@pytest.mark.once
@pytest.mark.parametrize(("output", "raw", "y"), OUTPUTS.values(), ids=OUTPUTS)
def test_weights_are_repetitions(output, raw, y):
    many_raw, many_y = repeated(raw, y)
    parameter = output.fit(many_raw, many_y)
    weight = REPEATS.astype("float64")
    np.testing.assert_allclose(output.fit(raw, y, weight), parameter, rtol=1e-3)
    assert not np.allclose(output.fit(raw, y), parameter, rtol=1e-2)
    expected = output.best_nll(many_raw, many_y)
    assert output.best_nll(raw, y, weight) == pytest.approx(expected, rel=1e-5)
    prediction, many = output.predict(raw, parameter), output.predict(many_raw, parameter)
    found = output.evidence(prediction, y, 0, weight)
    expected = output.evidence(many, many_y, 0)
    for scores in (found, expected):
        scores.pop("ECE floor", None)  # whose labels are drawn
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.once
def test_weights_decide_the_choice():
    nll, weight = RNG.normal(size=(3, COUNT)), REPEATS.astype("float64")
    for found, expected in zip(behind(nll, weight), behind(repeated(*nll)), strict=True):
        np.testing.assert_allclose(found, expected)
    # Each is the better one where its own examples are.
    first = np.arange(COUNT) < COUNT / 2
    nll = np.stack([np.where(first, 1.0, 2.0), np.where(first, 2.0, 1.0)])
    nll += 0.01 * RNG.normal(size=nll.shape)
    for better, weight in enumerate((first, ~first)):
        assert choose(nll, [(1,), (1,)], 0.1 + weight) == better


@pytest.fixture
def classifier(monkeypatch, eagerly):
    """A classifier with its data, and the network as it is the only candidate."""
    monkeypatch.setattr(run, "METHODS", methods(untrained.as_it_is))
    model = keras.Sequential([keras.Input((3,)), layers.Dense(3, activation="softmax")])
    model.layers[0].set_weights([4 * np.eye(3, dtype="float32"), np.zeros(3, "float32")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    x = RNG.normal(size=(COUNT, 3)).astype("float32")
    y = np.array([RNG.choice(3, p=p) for p in softmax(x.astype("float64"), axis=1)])
    return model, x, y


def calibrated(model, data, validation):
    return ibnn.calibrate(model, data, validation, samples=2, epochs=1, verbose=False)


def test_a_weighted_validation_set(classifier):
    model, x, y = classifier
    weight = REPEATS.astype("float64")
    wrong_x, wrong_y = np.where(weight[:, None] > 0, x, np.nan), np.where(weight > 0, y, 99)
    report = calibrated(model, (x, y), (wrong_x, wrong_y, weight))
    scaled = report.candidates[1]
    assert len(report.y) == np.sum(REPEATS > 0)
    many_x, many_y = repeated(x, y)
    log_p = np.log(model.predict(many_x, verbose=0))[:, None]
    expected = Categorical(True, width=3).fit(log_p, many_y)
    assert scaled.parameter == pytest.approx(expected, rel=1e-3)
    kept = weight[weight > 0]
    row = report.table()[scaled.name]
    assert row["NLL"] == pytest.approx(np.sum(kept * scaled.nll) / kept.sum())
    assert f"NLL {row['NLL']:.4f}" in report.why()
    rows = report.evaluate((wrong_x, wrong_y, weight)).rows, report.evaluate((many_x, many_y)).rows
    for name in rows[0]:
        for score in ("accuracy", "NLL", "Brier", "ECE"):
            assert rows[0][name][score] == pytest.approx(rows[1][name][score], abs=1e-6)
        assert rows[0][name]["behind best"] == rows[1][name]["behind best"]
    with pytest.raises(ValueError, match=r"`test` has weights, which `decide` cannot use"):
        report.decide((x, y, np.full(COUNT, 2.0)))


def test_weights_that_only_compare_are_refused(classifier):
    model, x, y = classifier
    with pytest.raises(ValueError, match=r"sum to at least 50.* weight / weight\.mean\(\)"):
        calibrated(model, (x, y), (x, y, np.full(COUNT, 1 / COUNT)))
    with pytest.raises(ValueError, match="`validation` needs one weight, 0 or above"):
        calibrated(model, (x, y), (x, y, -np.ones(COUNT)))
    with pytest.raises(ValueError, match="`validation` needs one weight, 0 or above"):
        calibrated(model, (x, y), (x, y, np.ones((COUNT, 2))))
