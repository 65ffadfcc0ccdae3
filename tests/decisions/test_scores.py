"""A new score of `OODDetector` is one class."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfp_ibnn as ibnn
from tfp_ibnn.decisions.feature_scores import FEATURE_SCORES, FeatureScore
from tfp_ibnn.decisions.scores import OUTPUT_SCORES, OutputScore

X = np.random.default_rng(0).normal(size=(60, 3)).astype("float32")


class Margin(OutputScore):
    """Minus the difference of the two largest probabilities."""

    def of_prediction(self, prediction):
        top, _ = ops.top_k(prediction["mean"], 2)
        return top[:, 1] - top[:, 0]


class Box(FeatureScore):
    """How far features lie outside of the range of training."""

    name = "box"

    def learn(self, features, y, layer):
        return {"low": features.min(axis=0), "high": features.max(axis=0)}

    def of_features(self, features, arrays):
        below = arrays["low"] - features
        above = features - arrays["high"]
        return ops.max(ops.maximum(ops.maximum(below, above), 0), axis=1)


@pytest.fixture(scope="module")
def model():
    return keras.Sequential([keras.Input((3,)), layers.Dense(4, "softmax")])


@pytest.mark.once
def test_a_new_score_of_outputs(model, monkeypatch):
    monkeypatch.setitem(OUTPUT_SCORES, "margin", Margin)
    detector = ibnn.OODDetector(model, "margin").fit(X)
    p = np.sort(ops.convert_to_numpy(model(X)), axis=1)
    np.testing.assert_allclose(detector.score(X), p[:, -2] - p[:, -1], atol=1e-6)
    assert detector.get_config()["score"] == "margin"


def test_a_new_score_of_features_is_kept_in_files(model, monkeypatch, tmp_path):
    monkeypatch.setitem(FEATURE_SCORES, "box", Box)
    detector = ibnn.OODDetector(model, "box").fit(X)
    assert detector.threshold(0.99) == 0
    far = X[:2] + 50
    found = detector.score(far)
    np.testing.assert_allclose(found, (far - X.max(axis=0)).max(axis=1), rtol=1e-5)
    detector.save(tmp_path / "box.keras")
    loaded = keras.saving.load_model(tmp_path / "box.keras")
    np.testing.assert_array_equal(loaded.score(far), found)


@pytest.mark.once
def test_a_name_that_no_score_has(model):
    with pytest.raises(ValueError, match="`score` must be one of .*'vim'.*; got 'box'"):
        ibnn.OODDetector(model, "box")
