"""Scales, biases and rising maps of each class, against SciPy's and scikit-learn's own fits."""

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax
from sklearn.isotonic import IsotonicRegression

from tests.calibration.tools import classes
from tfp_ibnn.likelihoods import class_scaling as module
from tfp_ibnn.likelihoods.temperature import DOUBT, best_temperature

pytestmark = pytest.mark.once

RNG = np.random.default_rng(0)
FITS = {"vector": module.best_vector, "isotonic": module.best_isotonic}


def drawn(p, rng):
    """Labels drawn from class probabilities (examples, classes)."""
    return np.sum(rng.random((len(p), 1)) > p.cumsum(axis=1)[:, :-1], axis=1)


def problem(count=150, width=3, seed=0):
    """Logits that are wrong in every class, labels and whole weights."""
    rng = np.random.default_rng(seed)
    truth = 1.5 * rng.normal(size=(count, width))
    logits = truth * np.linspace(0.5, 2.5, width) + np.linspace(-1, 1, width)
    return logits, drawn(softmax(truth, axis=1), rng), rng.integers(0, 3, count)


def nll(p, y):
    return -np.log(p[np.arange(len(y)), y])


def test_vector_scaling_has_the_least_loss():
    logits, y, weight = problem()
    temperature = best_temperature(logits[:, None], y, weight, DOUBT)

    def loss(parameters):
        scale, bias = parameters.reshape(2, 3)
        log_q = log_softmax(scale * log_softmax(logits, axis=1) + bias, axis=1)
        data = np.average(-log_q[np.arange(150), y], weights=weight)
        pull = np.sum((scale * temperature - 1) ** 2) + np.sum(bias**2)
        return data + DOUBT * pull / weight.sum()

    best = minimize(loss, np.zeros(6), method="BFGS", options={"gtol": 1e-8})
    found = module.best_vector(logits, y, weight)
    np.testing.assert_allclose(np.concatenate([found.scale, found.bias]), best.x, atol=2e-4)
    assert loss(np.concatenate([found.scale, found.bias])) <= best.fun + 1e-12
    expected = softmax(found.scale * log_softmax(logits, axis=1) + found.bias, axis=1)
    np.testing.assert_allclose(found.probabilities(logits), expected)


@pytest.mark.parametrize("kind", FITS)
def test_weights_are_repetitions(kind):
    logits, y, weight = problem()
    found = FITS[kind](logits, y, weight.astype("float64"))
    many = FITS[kind](np.repeat(logits, weight, axis=0), np.repeat(y, weight))
    np.testing.assert_allclose(found.probabilities(logits), many.probabilities(logits), atol=1e-5)
    once = FITS[kind](logits, y)
    assert np.abs(found.probabilities(logits) - once.probabilities(logits)).max() > 0.01


@pytest.mark.parametrize("width", [2, 4])
def test_isotonic_regression_is_that_of_scikit_learn(width):
    logits, y, weight = problem(400, width)
    logits[100:200] = logits[:100]  # equal probabilities, of other labels
    found = module.best_isotonic(logits, y, weight)
    other, *_ = problem(300, width, seed=1)
    p, new = softmax(logits, axis=1), softmax(2 * other, axis=1)
    total = weight.sum() + width
    expected = []
    for number in range(width):
        theirs = IsotonicRegression(
            y_min=1 / total, y_max=(weight.sum() + 1) / total, out_of_bounds="clip"
        )
        theirs.fit(p[:, number], y == number, sample_weight=weight)
        expected.append(theirs.predict(new[:, number]))
    expected = np.stack(expected, axis=1)
    assert len(found.inputs) == (1 if width == 2 else width)
    np.testing.assert_allclose(
        found.probabilities(2 * other), expected / expected.sum(axis=1, keepdims=True), atol=1e-6
    )
    if width == 2:  # then one map says it all: that of the other class is its mirror image
        np.testing.assert_allclose(expected.sum(axis=1), 1, atol=1e-9)


def test_errors_in_one_class_are_for_a_vector_and_not_for_a_temperature():
    truth = 2 * RNG.normal(size=(6000, 4))
    y = drawn(softmax(truth, axis=1), RNG)
    logits = truth + np.array([2.5, 0, 0, 0])  # the first class is seen where it is not
    output, raw = classes(4, from_logits=True), logits[:, None]
    fit, new = slice(3000), slice(3000, None)
    scores = {}
    for fitted in (False, True, "vector", "isotonic"):
        parameter = output.parameter(raw[fit], y[fit], fitted)
        scores[fitted] = output.nll(output.predict(raw[new], parameter), y[new]).mean()
    possible = nll(softmax(truth[new], axis=1), y[new]).mean()
    lost = scores[False] - possible
    assert scores[True] - possible > 0.6 * lost
    assert scores["vector"] - possible < 0.05 * lost
    assert scores["isotonic"] < scores[True]


@pytest.mark.parametrize("kind", FITS)
def test_a_calibrated_network_stays_within_a_standard_error(kind):
    logits = 2 * RNG.normal(size=(4000, 3))
    p = softmax(logits, axis=1)
    y = drawn(p, RNG)
    found = FITS[kind](logits[:2000], y[:2000]).probabilities(logits[2000:])
    before = nll(p[2000:], y[2000:])
    assert abs(nll(found, y[2000:]).mean() - before.mean()) < before.std() / 2000**0.5


@pytest.mark.parametrize("kind", FITS)
def test_few_examples_of_a_class_change_it_little(kind):
    """Without one example of the last class, it stays possible."""
    p = np.tile([[0.6, 0.3, 0.1]], (60, 1))
    found = FITS[kind](np.log(p), np.arange(60) % 2).probabilities(np.log(p))
    assert 0.01 < found[0, 2] < 0.1
    np.testing.assert_allclose(found.sum(axis=1), 1)


def test_impossible_classes_stay_finite():
    log_p = np.log(np.maximum(np.eye(3)[[0, 1, 2, 0] * 20], np.finfo("float32").tiny))
    log_p[::7] = [0, -np.inf, -np.inf]
    for fit in FITS.values():
        found = fit(log_p, np.array([0, 1, 2, 1] * 20)).probabilities(log_p)
        assert np.isfinite(found).all()
        assert found.min() > 0


def test_maps_of_many_corners_are_thinned_out_evenly():
    values = np.linspace(0, 1, 3000) ** 2
    stored = module._stored_corners(values)
    assert len(stored) == module.CORNERS
    assert (stored[0], stored[-1]) == (0, 2999)
    x = np.arange(3000)
    np.testing.assert_allclose(np.interp(x, stored, values[stored]), values, atol=1e-5)
    unchanged = module.identical_maps(3).probabilities(np.log([[0.2, 0.3, 0.5]]))
    np.testing.assert_allclose(unchanged, [[0.2, 0.3, 0.5]])
