"""Paired differences clustered by example, and the candidates that nothing matches."""

import numpy as np
import pytest

from tfp_ibnn.calibration.candidates import NEGLIGIBLE, Cost, behind, choose, undominated

pytestmark = pytest.mark.once

RNG = np.random.default_rng(0)
SIZES = RNG.integers(1, 6, 30)
GROUPS = np.repeat(np.arange(30), SIZES)
# Rows of one example have something in common.
NLL = RNG.normal(size=(3, len(GROUPS))) + RNG.normal(size=(3, 30))[:, GROUPS]


def regression_on_a_constant(difference, groups):
    """Return the mean and its error by the sandwich formula for clusters (Liang and Zeger)."""
    x = np.ones((len(difference), 1))
    bread = np.linalg.inv(x.T @ x)
    beta = bread @ x.T @ difference
    residual = difference - x @ beta
    meat = np.zeros((1, 1))
    for group in np.unique(groups):
        inside = groups == group
        score = x[inside].T @ residual[inside]
        meat += np.outer(score, score)
    count, rows = len(np.unique(groups)), len(difference)
    correction = count / (count - 1) * (rows - 1) / (rows - x.shape[1])
    covariance = correction * bread @ meat @ bread
    return beta[0], np.sqrt(covariance[0, 0])


def test_errors_are_those_of_a_clustered_regression():
    distance, error = behind(NLL, best=0, groups=GROUPS)
    _, plain = behind(NLL, best=0)
    for place in (1, 2):
        expected = regression_on_a_constant(NLL[place] - NLL[0], GROUPS)
        np.testing.assert_allclose((distance[place], error[place]), expected)
        assert error[place] > 1.2 * plain[place]


def test_one_row_per_example_is_the_plain_error():
    rows = RNG.permutation(len(GROUPS))
    weight = RNG.integers(1, 4, len(GROUPS)).astype("float64")
    for weights in (None, weight):
        found, expected = behind(NLL, weights, groups=rows), behind(NLL, weights)
        np.testing.assert_allclose(found, expected)
    difference = NLL[1] - NLL[0]
    error = difference.std(ddof=1) / np.sqrt(len(difference))
    assert behind(NLL, best=0)[1][1] == pytest.approx(error)


def test_copies_of_a_row_in_one_example_tell_nothing_new():
    few = NLL[:, :20]
    many = np.repeat(few, 50, axis=1)
    found = behind(many, groups=np.repeat(np.arange(20), 50))
    np.testing.assert_allclose(found, behind(few))


def test_an_example_of_weight_two_counts_as_two_and_padding_not_at_all():
    weight = np.where(GROUPS < 10, 2.0, 1.0)
    twice = np.flatnonzero(GROUPS < 10)
    many = np.concatenate([NLL, NLL[:, twice]], axis=1)
    groups = np.concatenate([GROUPS, 100 + GROUPS[twice]])
    expected = behind(many, groups=groups)
    np.testing.assert_allclose(behind(NLL, weight, groups=GROUPS), expected)
    padded = np.concatenate([NLL, RNG.normal(size=(3, len(GROUPS)))], axis=1)
    weight = np.concatenate([weight, np.zeros(len(GROUPS))])
    found = behind(padded, weight, groups=np.concatenate([GROUPS, GROUPS]))
    np.testing.assert_allclose(found, expected)


def test_the_choice_knows_of_clusters():
    """By rows the difference is beyond its error; of four examples, each of 100 rows, it is not."""
    groups = np.repeat(np.arange(4), 100)
    worse = np.array([0.3, -0.1, 0.2, -0.1])[groups]
    nll = [worse + 1.0, np.ones(400)]
    assert choose(nll, [1, 2]) == 1
    assert choose(nll, [1, 2], groups=groups) == 0


def test_undominated():
    points = {
        "best and dear": (0.1, 8.0, 1.0),
        "cheap": (0.5, 1.0, 0.0),
        "its equal": (0.5, 1.0, 0.0),
        "as good and dearer": (0.5, 2.0, 0.0),
        "as cheap and worse": (0.6, 1.0, 0.0),
        "untrained": (0.4, 8.0, 0.0),
        "worse in all": (0.7, 9.0, 2.0),
    }
    scores = [score for score, *_ in points.values()]
    # Megabytes do not count.
    costs = [Cost(*cost, megabytes) for megabytes, (_, *cost) in enumerate(points.values())]
    kept = [name for name, keep in zip(points, undominated(scores, costs), strict=True) if keep]
    assert kept == ["best and dear", "cheap", "its equal", "untrained"]


def test_a_negligible_gain_is_worth_no_cost():
    base = np.array([1.0, 2.0, 3.0, 4.0])
    costs = [(1, False), (1, True)]
    # All differences are equal, so the standard error is 0.
    assert choose([base, base - 0.5 * NEGLIGIBLE], costs) == 0
    assert choose([base, base - 2 * NEGLIGIBLE], costs) == 1
