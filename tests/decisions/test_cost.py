import numpy as np
import pytest
from scipy.stats import beta

import tfp_ibnn as ibnn
from tfp_ibnn.decisions import error_threshold

pytestmark = pytest.mark.once

RNG = np.random.default_rng(0)
P = RNG.dirichlet(np.ones(3), size=40)


@pytest.mark.parametrize("refuse", [None, -0.2, 9.0])
def test_decisions_are_the_best_of_all(refuse):
    cost = np.random.default_rng(1).uniform(-1, 5, (3, 4))
    found = ibnn.decide(P, cost, refuse)

    def expected(p, action):
        return refuse if action == -1 else sum(p[k] * cost[k, action] for k in range(3))

    actions = range(-1 if refuse is not None else 0, 4)
    for p, chosen in zip(P, found, strict=True):
        assert expected(p, chosen) == pytest.approx(min(expected(p, a) for a in actions))
    assert (found == -1).any() == (refuse == -0.2)


def test_without_costs_the_likeliest_class_is_taken_or_refused():
    np.testing.assert_array_equal(ibnn.decide(P), P.argmax(axis=1))
    found = ibnn.decide(P, refuse=0.3)
    np.testing.assert_array_equal(found == -1, P.max(axis=1) < 0.7)
    assert ibnn.decide([[0.7, 0.3]], refuse=0.3) == [0]  # at equal cost it answers
    np.testing.assert_array_equal(ibnn.decide([[0.8], [0.2]]), [1, 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((P, np.ones((2, 3))), r"`cost` must be finite, of the shape \(3 classes"),
        ((P, np.full((3, 2), np.nan)), "`cost` must be finite"),
        ((P, None, np.nan), "`refuse` must be a finite number"),
        ((2 * P,), "`probabilities` must be finite, 0 or above, and sum to 1"),
        ((P[0],), "`probabilities` must have the shape"),
    ],
)
def test_bad_input_of_decisions(arguments, message):
    with pytest.raises(ValueError, match=message):
        ibnn.decide(*arguments)


def made(confidence, seed):
    """Predictions of two classes that are right as often as the confidence says."""
    rng = np.random.default_rng(seed)
    top = 1 - 0.5 * rng.random(confidence) ** 4
    y = (rng.random(confidence) > top).astype(int)
    return np.stack([top, 1 - top], axis=1), y


WRONG = 0.5 * ((np.arange(200_000) + 0.5) / 200_000) ** 4  # how likely, by rising order
MEANS = np.cumsum(WRONG) / np.arange(1, 200_001)


def true_error(threshold):
    return MEANS[np.searchsorted(WRONG, 1 - threshold, side="right") - 1]


def test_the_error_of_what_is_answered_is_guaranteed():
    """The bound is broken in at most 10 % of validation sets, and not in far fewer."""
    found = [error_threshold(*made(600, seed), 0.05, confidence=0.9) for seed in range(200)]
    assert min(x["answered"] for x in found) > 0
    broken = sum(true_error(x["threshold"]) > 0.05 for x in found)
    assert broken <= 33  # 99.8 % of binomial draws with 10 % of 200
    assert broken >= 2


def test_threshold_is_what_it_says():
    p, y = made(5000, 0)
    found = error_threshold(p, y, 0.05)
    answered = ibnn.decide(p, refuse=1 - found["threshold"]) != -1
    assert found["answered"] == pytest.approx(answered.mean())
    wrong = int((y[answered] == 1).sum())
    assert found["bound"] == pytest.approx(beta.ppf(0.95, wrong + 1, answered.sum() - wrong))
    assert found["bound"] <= 0.05 < wrong / answered.sum() + 0.02
    looser = error_threshold(p, y, 0.1)
    assert looser["threshold"] < found["threshold"]


def test_299_answers_without_an_error_are_needed():
    p, y = np.tile([0.9, 0.1], (299, 1)), np.zeros(299)
    assert error_threshold(p, y)["answered"] == 1
    with pytest.raises(ValueError, match="at least 299 answers without an error.*got 298"):
        error_threshold(p[1:], y[1:])
    y[0] = 1
    assert error_threshold(p, y) == {"threshold": 2, "answered": 0, "bound": 1}
    with pytest.raises(ValueError, match="`error` must be between 0 and 1; got 0"):
        error_threshold(p, y, error=0)
    with pytest.raises(ValueError, match="`y` must be whole numbers"):
        error_threshold(p, y + 0.5)


def test_decisions_step_by_step():
    p = P.reshape(8, 5, 3)
    found = ibnn.decide(p, refuse=0.4)
    assert found.shape == (8, 5)
    np.testing.assert_array_equal(found.ravel(), ibnn.decide(P, refuse=0.4))
