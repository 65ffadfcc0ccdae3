import numpy as np
import pytest
from scipy.special import log_softmax, softmax
from sklearn.metrics import brier_score_loss, log_loss

import tfp_ibnn as ibnn
from tfp_ibnn.metrics import brier_score, negative_log_likelihood

pytestmark = pytest.mark.once

RNG = np.random.default_rng(0)
LABELS = RNG.integers(5, size=300)
LOGITS = 3 * RNG.standard_normal((300, 5))
PROBABILITIES = softmax(LOGITS, -1)
WEIGHTS = RNG.uniform(size=300)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
def test_likelihood_is_scikit_learns(weights):
    expected = log_loss(LABELS, PROBABILITIES, sample_weight=weights)
    for given, from_logits in ((PROBABILITIES, False), (LOGITS, True)):
        found = negative_log_likelihood(
            given, LABELS, sample_weight=weights, from_logits=from_logits
        )
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
def test_brier_score_is_scikit_learns(weights):
    expected = brier_score_loss(
        LABELS, PROBABILITIES, sample_weight=weights, scale_by_half=False, labels=range(5)
    )
    found = brier_score(PROBABILITIES, LABELS, sample_weight=weights)
    assert found == pytest.approx(expected, rel=1e-12)
    binary = PROBABILITIES[:, :1]
    halved = brier_score_loss(LABELS % 2, binary[:, 0], sample_weight=weights)
    found = brier_score(binary, LABELS % 2, sample_weight=weights)
    assert found == pytest.approx(2 * halved, rel=1e-12)


@pytest.mark.parametrize(("dtype", "cost"), [("float32", 87.3365), ("float64", 708.3964)])
def test_impossible_labels_cost_the_smallest_normal_float(dtype, cost):
    certain = np.array([[1.0, 0.0]], dtype)
    assert negative_log_likelihood(certain, [1]) == pytest.approx(cost, abs=1e-3)
    assert negative_log_likelihood(certain, [0]) == 0
    metric = ibnn.NegativeLogLikelihood(dtype=dtype)
    metric.update_state([1], certain)
    assert float(metric.result()) == pytest.approx(cost, abs=1e-3)


def test_logits_have_no_floor():
    logits = np.array([[1000.0, 0.0], [0.0, -np.inf]])
    expected = -log_softmax(logits, -1)[:, 1]
    assert negative_log_likelihood(logits[:1], [1], from_logits=True) == expected[0] == 1000
    assert negative_log_likelihood(logits[1:], [1], from_logits=True) == expected[1] == np.inf
    assert negative_log_likelihood(logits[1:], [0], from_logits=True) == 0
    metric = ibnn.NegativeLogLikelihood(from_logits=True)
    metric.update_state([1, 0], logits)
    assert float(metric.result()) == 500


def test_brier_score_runs_from_zero_to_two():
    certain = [[1.0, 0.0, 0.0]]
    assert brier_score(certain, [0]) == 0
    assert brier_score(certain, [2]) == 2
