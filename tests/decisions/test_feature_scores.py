"""Scores of features where classes are tight, units dead or neighbors close."""

import keras
import numpy as np
import pytest
from keras import layers
from sklearn.covariance import EmpiricalCovariance
from sklearn.neighbors import NearestNeighbors

import tfp_ibnn as ibnn
from tests.decisions.tools import X, Y, head_of


@pytest.fixture(autouse=True)
def fast(eagerly):
    """Nothing said here is about compiled graphs."""


@pytest.mark.once
def test_labels_may_be_one_hot(model):
    plain, one_hot = (
        ibnn.OODDetector(model, "relative_mahalanobis").fit(X, y)
        for y in (Y, np.eye(Y.max() + 1)[Y])
    )
    np.testing.assert_array_equal(plain.score(X), one_hot.score(X))


@pytest.mark.once
def test_targets_of_a_regression_are_no_classes():
    x = X[:, :2]
    regression = keras.Sequential([keras.Input((2,)), layers.Dense(2)])
    regression.compile("sgd", "mse")
    detector = ibnn.OODDetector(regression, "mahalanobis")
    for y in (x, x[:, 0], x[:, :1]):
        with pytest.raises(ValueError, match=r"predicts numbers: leave `y` out, fit\(x\)"):
            detector.fit(x, y)
    detector.fit(x, Y)  # classes of the user's
    with pytest.raises(ValueError, match="predicts numbers: take score='mahalanobis' or 'knn'"):
        ibnn.OODDetector(regression, "relative_mahalanobis").fit(x)


def test_dead_units_leave_vim_a_scale():
    """Half of the directions, and more, are without variance: their residual is 0."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 10)).astype("float32")
    x[:, 4:] = 0
    model = head_of(10, rng.normal(size=(10, 3)) * np.r_[np.ones(4), np.zeros(6)][:, None])
    made = ibnn.OODDetector(model, "vim").fit(x)
    assert np.isfinite(made.threshold())
    far = x + np.float32([0, 0, 0, 0, 2, 2, 2, 2, 2, 2])
    assert made.evaluate(x, far)["auroc"] > 0.9
    assert np.isfinite(keras.ops.convert_to_numpy(made.serve(far)["score"])).all()
    for constant in (x * 0, x * 0 + 1):
        with pytest.raises(ValueError, match="features and logits that vary"):
            ibnn.OODDetector(model, "vim").fit(constant)
        with pytest.raises(ValueError, match="vary within classes"):
            ibnn.OODDetector(model, "mahalanobis").fit(constant)


@pytest.mark.once
def test_vim_is_not_inverted_by_negative_logits():
    """Logits mean the same when all are shifted: the residual still counts as unusual."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(300, 8)) * [3, 3, 3, 3, 0.3, 0.3, 0.3, 0.3]
    far = x + [0, 0, 0, 0, 3, 3, 3, 3]
    kernel = rng.normal(size=(8, 3)) * np.r_[1, 1, 1, 1, 0, 0, 0, 0][:, None]
    made = ibnn.OODDetector(head_of(8, kernel, bias=-100.0), "vim").fit(x)
    assert keras.ops.convert_to_numpy(made.arrays["alpha"]) > 0
    assert made.evaluate(x, far)["auroc"] > 0.9


def test_mahalanobis_of_tight_classes():
    """Classes 10,000 times as far apart as they are wide."""
    rng = np.random.default_rng(2)
    y = np.arange(300) % 3
    x = (1e4 * rng.normal(size=(3, 4))[y] + rng.normal(size=(300, 4))).astype("float32")
    made = ibnn.OODDetector(head_of(4, rng.normal(size=(4, 3))), "mahalanobis").fit(x, y)
    means = np.stack([x[c == y].astype("float64").mean(axis=0) for c in range(3)])
    within = EmpiricalCovariance(assume_centered=True).fit(x - means[y])
    known = np.min([within.mahalanobis(x - m) for m in means], axis=0)
    found = made.score(x)
    assert (found >= 0).all()
    assert np.corrcoef(found, known)[0, 1] > 0.999


@pytest.mark.parametrize("at_once", [8192, 70])
def test_neighbours_of_close_features(at_once, monkeypatch):
    """Features of almost one direction, also where the bank takes several blocks."""
    monkeypatch.setattr("tfp_ibnn.decisions.feature_scores._AT_ONCE", at_once)
    rng = np.random.default_rng(3)
    x = (5 + 2e-3 * rng.normal(size=(200, 4))).astype("float32")
    made = ibnn.OODDetector(head_of(4, rng.normal(size=(4, 3))), "knn", k=5).fit(x[:150])
    unit = x.astype("float64") / np.linalg.norm(x.astype("float64"), axis=1, keepdims=True)
    near = NearestNeighbors(n_neighbors=5).fit(unit[:150])
    known = near.kneighbors(unit[150:])[0][:, 4]
    found = made.score(x[150:])
    assert len(np.unique(found)) > 40
    np.testing.assert_allclose(found, known, rtol=0.02)
