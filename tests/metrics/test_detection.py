import itertools

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from tfp_ibnn.metrics import aupr, auroc, fpr_at_95_tpr, ood_scores, risk_coverage

pytestmark = pytest.mark.once

RNG = np.random.default_rng(0)
KNOWN = RNG.normal(size=300).round(1)  # rounded, so that there are ties
UNKNOWN = RNG.normal(1.0, size=200).round(1)


def test_area_under_roc_is_the_chance_of_the_right_order():
    difference = UNKNOWN[:, None] - KNOWN
    expected = np.mean((difference > 0) + 0.5 * (difference == 0))
    assert auroc(KNOWN, UNKNOWN) == pytest.approx(expected, rel=1e-12)
    assert auroc(UNKNOWN, KNOWN) == pytest.approx(1 - expected, rel=1e-12)


def test_unknown_is_the_positive_class():
    labels = np.r_[np.zeros(300), np.ones(200)]
    scores = np.r_[KNOWN, UNKNOWN]
    assert auroc(KNOWN, UNKNOWN) == pytest.approx(roc_auc_score(labels, scores), rel=1e-12)
    expected = average_precision_score(labels, scores)
    assert aupr(KNOWN, UNKNOWN) == pytest.approx(expected, rel=1e-12)
    assert aupr(KNOWN, UNKNOWN) != pytest.approx(aupr(-UNKNOWN, -KNOWN), abs=1e-3)


def test_false_positives_at_95_percent():
    expected = min(
        np.mean(KNOWN >= threshold)
        for threshold in UNKNOWN
        if np.mean(UNKNOWN >= threshold) >= 0.95
    )
    assert fpr_at_95_tpr(KNOWN, UNKNOWN) == pytest.approx(expected, rel=1e-12)
    # 19 of 20 are enough, to the letter.
    assert fpr_at_95_tpr([0.5, -1.0], np.r_[0.0, np.ones(19)]) == 0
    assert fpr_at_95_tpr([0.5, -1.0], np.r_[0.0, np.ones(18)]) == 0.5


@pytest.mark.parametrize("function", [auroc, aupr, fpr_at_95_tpr])
def test_any_shape_and_precision(function):
    expected = function(KNOWN.astype("float16"), UNKNOWN.astype("float16"))
    shaped = function(KNOWN.reshape(3, 100).astype("float16"), UNKNOWN.reshape(2, 10, 10))
    assert 0 < expected < 1
    assert shaped == pytest.approx(function(KNOWN.astype("float16"), UNKNOWN))
    assert function([0.0], [1.0]) == (0 if function is fpr_at_95_tpr else 1)


def test_risk_is_the_mean_loss_of_the_most_certain():
    rng = np.random.default_rng(1)
    uncertainty, loss = rng.permutation(50), rng.uniform(size=50)
    curve = risk_coverage(uncertainty, loss)
    for i, (coverage, risk) in enumerate(zip(curve.coverage, curve.risk, strict=True), 1):
        assert coverage == pytest.approx(i / 50)
        assert risk == pytest.approx(np.mean(loss[uncertainty < i]))
    assert curve.area == pytest.approx(np.mean(curve.risk))
    best = risk_coverage(loss, loss)
    assert best.excess_area == pytest.approx(0, abs=1e-12)
    assert curve.excess_area == pytest.approx(curve.area - best.area)
    assert curve.excess_area > 0.01


def test_ties_have_the_mean_over_all_orders():
    uncertainty = np.array([0.1, 0.5, 0.5, 0.5, 0.9])
    loss = np.array([0.3, 0.0, 1.0, 0.7, 0.2])
    risks = [
        np.cumsum(loss[[0, *tied, 4]]) / np.arange(1, 6)
        for tied in itertools.permutations([1, 2, 3])
    ]
    for order in (np.arange(5), [3, 4, 2, 0, 1]):
        curve = risk_coverage(uncertainty[order], loss[order])
        np.testing.assert_allclose(curve.risk, np.mean(risks, axis=0), rtol=1e-12)
        assert curve.area == pytest.approx(np.mean(risks), rel=1e-12)


def test_wrong_or_right_is_a_loss():
    curve = risk_coverage([1.0, 2.0], np.array([False, True]))
    np.testing.assert_array_equal(curve.risk, [0.0, 0.5])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: auroc([], [1.0]), "`known` must hold at least one"),
        (lambda: aupr([1.0], []), "`unknown` must hold at least one"),
        (lambda: fpr_at_95_tpr([1.0, np.nan], [1.0]), "`known` must be finite; got nan at .* 1"),
        (lambda: auroc([1.0], [np.inf]), "`unknown` must be finite; got inf"),
        (lambda: risk_coverage([1.0], [1.0, 2.0]), "`loss` must hold 1 numbers.*; got 2"),
        (lambda: risk_coverage([1.0], [np.nan]), "`loss` must be finite"),
        (lambda: risk_coverage([], []), "`uncertainty` must hold at least one"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_ood_scores_are_the_three_of_them():
    known, unknown = [0.1, 0.2, 0.4, 0.35], [0.3, 0.9, 0.38]
    assert ood_scores(known, unknown) == {
        "auroc": auroc(known, unknown),
        "aupr": aupr(known, unknown),
        "fpr95": fpr_at_95_tpr(known, unknown),
    }
