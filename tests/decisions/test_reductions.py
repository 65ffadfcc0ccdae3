"""Scores of positions, and of images by them."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from scipy.special import logsumexp
from sklearn.covariance import EmpiricalCovariance
from sklearn.neighbors import NearestNeighbors

import tfp_ibnn as ibnn
from tfp_ibnn.decisions.reductions import reduced

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 5, 3)).astype("float32")
NEW = RNG.normal(size=(12, 5, 3)).astype("float32") + 0.5
Y = RNG.integers(3, size=(40, 5))
LENGTHS = RNG.integers(1, 6, size=(12, 1))
MASK = np.arange(5) < LENGTHS
PADDED = np.where(MASK[..., None], NEW, 0).astype("float32")


@pytest.fixture(autouse=True)
def fast(eagerly):
    """Nothing said here is about compiled graphs."""


def steps(last=None):
    """A network of sequences with padding."""
    last = last or layers.TimeDistributed(layers.Dense(3, "softmax"))
    parts = [keras.Input((5, 3)), layers.Masking(), layers.Dense(4, "tanh"), last]
    model = keras.Sequential(parts)
    rng = np.random.default_rng(5)
    for weight in model.weights:
        weight.assign(rng.normal(size=weight.shape))
    return model


def features_of(model, x):
    kernel, bias = (ops.convert_to_numpy(w) for w in model.weights[:2])
    return np.tanh(x @ kernel + bias)


def oracle(kind, model, x):
    """The scores of positions by other means, on their features as rows."""
    rows, new = features_of(model, X).reshape(-1, 4), features_of(model, x)
    kernel, bias = (ops.convert_to_numpy(w) for w in model.weights[2:])
    logits = new @ kernel.reshape(4, 3) + bias
    p = np.exp(logits - logsumexp(logits, axis=-1, keepdims=True))
    if kind == "max_probability":
        return -p.max(axis=-1)
    if kind == "entropy":
        return -(p * np.log(p)).sum(axis=-1)
    if kind == "energy":
        return -logsumexp(logits, axis=-1)
    flat = new.reshape(-1, 4)
    if kind == "knn":
        unit = [v / np.linalg.norm(v, axis=1, keepdims=True) for v in (rows, flat)]
        return NearestNeighbors(n_neighbors=5).fit(unit[0]).kneighbors(unit[1])[0][:, 4]
    means = [rows[Y.ravel() == c].mean(axis=0) for c in range(3)]
    within = EmpiricalCovariance(assume_centered=True).fit(rows - np.array(means)[Y.ravel()])
    return np.min([within.mahalanobis(flat - m) for m in means], axis=0)


KINDS = ("max_probability", "entropy", "energy", "knn", "mahalanobis")


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_positions(kind):
    """Each by itself, their mean and the largest, without those that are padding."""
    model = steps()
    expected = oracle(kind, model, NEW).reshape(12, 5)
    close = {"rtol": 2e-3, "atol": 2e-4}
    for reduction, of_example in (
        (None, np.where(MASK, expected, np.nan)),
        ("mean", np.sum(MASK * expected, axis=1) / LENGTHS[:, 0]),
        ("max", np.where(MASK, expected, -np.inf).max(axis=1)),
    ):
        found = ibnn.OODDetector(model, kind, k=5, reduction=reduction).fit(X, Y)
        np.testing.assert_allclose(found.score(PADDED), of_example, **close)
        np.testing.assert_allclose(found.score(PADDED, batch_size=5), of_example, **close)
        np.testing.assert_allclose(found(PADDED), of_example, **close)
    known = np.asarray(found.arrays["known"])
    assert known.shape == (40,)
    assert found.threshold(0.9) == pytest.approx(np.quantile(known, 0.9, method="higher"))


@pytest.mark.once
def test_a_convolution_has_energies():
    model = steps(layers.Conv1D(3, 1, activation="softmax"))
    found = ibnn.OODDetector(model, "energy", reduction=None).fit(X)
    np.testing.assert_allclose(found.score(NEW), oracle("energy", model, NEW), rtol=1e-3)
    images = keras.Sequential([keras.Input((4, 4, 2)), layers.Conv2D(3, 1, activation="softmax")])
    vim = ibnn.OODDetector(images, "vim").fit(RNG.normal(size=(9, 4, 4, 2)))
    assert vim.score(np.ones((2, 4, 4, 2))).shape == (2,)


@pytest.mark.once
def test_padding_is_no_score():
    found = ibnn.OODDetector(steps(), "entropy", reduction=None).fit(PADDED)
    known = oracle("entropy", steps(), NEW)
    assert found.arrays["known"].shape[0] == LENGTHS.sum()
    assert found.threshold(0.5) == pytest.approx(np.quantile(known[MASK], 0.5, method="higher"))
    scores = found.evaluate(PADDED, X)
    assert 0 < scores["auroc"] < 1
    other = ibnn.OODDetector(steps(), "mahalanobis", reduction=None).fit(PADDED)
    assert other.arrays["known"].shape[0] == LENGTHS.sum()
    rows = features_of(steps(), NEW)[MASK]
    expected = EmpiricalCovariance().fit(rows).mahalanobis(rows)
    np.testing.assert_allclose(other.score(PADDED)[MASK], expected, rtol=2e-3)


@pytest.mark.once
def test_datasets_weights_and_samples(monkeypatch):
    model = steps()
    weight = (RNG.random((40, 5)) < 0.7).astype("float32")
    found = ibnn.OODDetector(model, "mahalanobis", reduction=None)
    found.fit(X, Y, sample_weight=weight)
    parts = [(X[s], Y[s], weight[s]) for s in (slice(15), slice(15, 40))]
    again = ibnn.OODDetector(model, "mahalanobis", reduction=None).fit(iter(parts))
    np.testing.assert_allclose(again.score(NEW), found.score(NEW), rtol=1e-4)
    assert found.arrays["known"].shape[0] == weight.sum()
    with pytest.raises(ValueError, match="read only once"):
        ibnn.OODDetector(model, "mahalanobis").fit(iter(parts))
    small = ibnn.OODDetector(model, "knn", k=5, bank=30).fit(X)
    assert small.arrays["bank"].shape == (4, 30)
    example = ibnn.OODDetector(model, "mahalanobis").fit(X, Y[:, 0])
    assert example.arrays["means"].shape[0] == 3


@pytest.mark.parametrize("kind", ["entropy", "knn"])
@pytest.mark.parametrize("reduction", [None, "max"])
def test_files_and_exports(kind, reduction, tmp_path):
    found = ibnn.OODDetector(steps(), kind, k=5, reduction=reduction).fit(X)
    found.save(tmp_path / "made.keras")
    loaded = keras.saving.load_model(tmp_path / "made.keras")
    assert loaded.reduction == reduction
    np.testing.assert_allclose(loaded.score(PADDED), found.score(PADDED), rtol=1e-5, atol=1e-6)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        found.export(tmp_path / "1")
        served = tf.saved_model.load(str(tmp_path / "1")).signatures["serve"]
        score = served(inputs=tf.constant(PADDED))["score"]
        np.testing.assert_allclose(score, found.score(PADDED), rtol=1e-5, atol=1e-6)


@pytest.mark.once
def test_a_file_of_0_1_0_scores_as_it_did():
    """It sums the scores of outputs, and has the score of the mean of all features."""
    model = steps()
    config = ibnn.OODDetector(model, "entropy").get_config()
    del config["reduction"]
    old = ibnn.OODDetector.from_config(config)
    old.inner.inner.set_weights(model.get_weights())
    np.testing.assert_allclose(old.score(NEW), oracle("entropy", model, NEW).sum(axis=1), rtol=1e-4)
    pooled = ibnn.OODDetector(model, "mahalanobis", reduction="pooled").fit(X)
    means = features_of(model, X).mean(axis=1)
    expected = EmpiricalCovariance().fit(means).mahalanobis(features_of(model, NEW).mean(axis=1))
    np.testing.assert_allclose(pooled.score(NEW), expected, rtol=2e-3)


@pytest.mark.once
def test_without_positions_nothing_is_reduced():
    scores = np.arange(3.0)
    for reduction in ("mean", "max", None, "pooled"):
        np.testing.assert_array_equal(reduced(scores, None, reduction), scores)
    flat = keras.Sequential([keras.Input((3,)), layers.Dense(2, "softmax")])
    assert (
        ibnn.OODDetector(flat, "knn", k=2, reduction=None).fit(X[:, 0]).score(NEW[:, 0]).ndim == 1
    )
    with pytest.raises(ValueError, match="`reduction` must be one of .*; got 'sum'"):
        ibnn.OODDetector(flat, reduction="sum")


@pytest.mark.once
def test_weights_that_nothing_reads_are_refused():
    flat = keras.Sequential([keras.Input((3,)), layers.Dense(2, "softmax")])
    for detector, x in (
        (ibnn.OODDetector(flat, "knn", k=2), X[:, 0]),
        (ibnn.OODDetector(steps(), "entropy"), X),
    ):
        with pytest.raises(ValueError, match="`sample_weight` is for scores of features at pos"):
            detector.fit(x, sample_weight=np.ones(40))
