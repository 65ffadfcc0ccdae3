import keras
import numpy as np
import pytest
from keras import layers
from sklearn.covariance import EmpiricalCovariance
from sklearn.metrics import average_precision_score, roc_auc_score

import tfp_ibnn as ibnn
from tests.decisions.tools import FAR, NEW, RNG, X, Y, oracle
from tests.precision import at_least


@pytest.fixture(autouse=True)
def fast(eagerly):
    """Nothing said here is about compiled graphs."""


KINDS = (
    "max_probability",
    "entropy",
    "energy",
    "mahalanobis",
    "relative_mahalanobis",
    "knn",
    "vim",
)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_an_oracle(model, kind):
    found = ibnn.OODDetector(model, kind, k=5).fit(X, Y)
    close = {"rtol": 1e-3, "atol": 2 * at_least(5e-5)}  # two layers make the features
    for x in (NEW, FAR):
        np.testing.assert_allclose(found.score(x), oracle(kind, model, x), **close)


@pytest.mark.once
def test_evaluation_and_threshold(model):
    found = ibnn.OODDetector(model, "mahalanobis").fit(X)
    known, unknown = found.score(NEW), found.score(FAR)
    scores = found.evaluate(NEW, FAR)
    labels, both = np.r_[np.zeros(40), np.ones(30)], np.r_[known, unknown]
    assert scores["auroc"] == pytest.approx(roc_auc_score(labels, both))
    assert scores["aupr"] == pytest.approx(average_precision_score(labels, both))
    assert scores["auroc"] > 0.5  # higher is more unusual
    limit = found.threshold(0.9)
    assert np.mean(found.score(X) <= limit) == pytest.approx(0.9, abs=0.01)
    assert np.mean(known <= found.threshold(0.8, NEW)) == pytest.approx(0.8, abs=0.03)


@pytest.mark.once
def test_bank_and_layer(model):
    small = ibnn.OODDetector(model, "knn", k=5, bank=30).fit(X)
    whole = ibnn.OODDetector(model, "knn", k=5).fit(X)
    assert (small.score(FAR) >= whole.score(FAR) - 1e-4).all()
    assert small.score(FAR).sum() > whole.score(FAR).sum()
    inputs = ibnn.OODDetector(model, "mahalanobis", layer="first").fit(X)
    known = EmpiricalCovariance().fit(X).mahalanobis(FAR)
    np.testing.assert_allclose(inputs.score(FAR), known, rtol=1e-3)
    # Positions are averaged.
    image = keras.Sequential([keras.Input((2, 3, 4)), layers.Conv2D(2, 1), layers.Flatten()])
    image.add(layers.Dense(3, "softmax"))
    x = RNG.normal(size=(60, 2, 3, 4)).astype("float32")
    found = ibnn.OODDetector(image, "mahalanobis", layer=image.layers[0].name).fit(x)
    known = EmpiricalCovariance().fit(x.mean(axis=(1, 2))).mahalanobis(x.mean(axis=(1, 2)))
    np.testing.assert_allclose(found.score(x), known, rtol=1e-3)


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3, "softmax")

    def call(self, x):
        return self.dense(x)


def own():
    made = Own()
    made(X)
    return ibnn.MonteCarlo(made, 1, head="softmax", from_logits=False)


@pytest.mark.once
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: ibnn.OODDetector(m, "best"), "`score` must be one of"),
        (lambda m: ibnn.OODDetector(own(), "knn"), "needs features of a Functional"),
        (lambda m: ibnn.OODDetector(m, "knn", layer="none"), r"one of \['first', 'last'\]"),
        (lambda m: ibnn.OODDetector(m, "vim", layer="first"), "`layer`=None"),
        (lambda m: ibnn.OODDetector(m, "epistemic"), "needs a posterior"),
        (lambda m: ibnn.OODDetector(m, "knn", k=0), "`k` must be"),
        (lambda m: ibnn.OODDetector(m, "knn").score(X), "call `fit` first"),
        (lambda m: ibnn.OODDetector(m).threshold(0.9), "call `fit` first"),
        (lambda m: ibnn.OODDetector(m).threshold(95, X), "`true_positive_rate` must be between"),
        (lambda m: ibnn.OODDetector(m, "knn").fit(X[:49]), "k=50 neighbors .*; got 49"),
        (lambda m: ibnn.OODDetector(m, "relative_mahalanobis").fit(X), "`y` must hold the classes"),
        (lambda m: ibnn.OODDetector(m, "mahalanobis").fit(X, Y[1:]), "`y` must hold 150 numbers"),
        (lambda m: ibnn.OODDetector(m, "mahalanobis").fit(X, X), r"`y`.* one-hot; got \[.* 0"),
        (lambda m: ibnn.OODDetector(m, "knn").fit(np.nan * X), "holds? NaN"),
        (lambda m: ibnn.OODDetector(m, "knn").fit(X[:0]), "`x` holds no examples"),
        (lambda m: ibnn.OODDetector(m, "mahalanobis").fit(X, X[:, 0]), "several examples each"),
        (lambda m: ibnn.OODDetector(m, "vim").fit(X[:2]), "need more than .* examples; got 2"),
        (lambda m: ibnn.OODDetector(m).score(np.nan * X), "`x` holds NaN"),
    ],
)
def test_bad_input(model, make, message):
    with pytest.raises(ValueError, match=message):
        make(model)
