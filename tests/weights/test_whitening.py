"""Coordinates in which draws are standard normal."""

import numpy as np
import pytest

from tfp_ibnn.weights.whitening import colored, refitted, whitened


@pytest.mark.once
@pytest.mark.parametrize("diagonal", [False, True])
def test_coordinates_that_do_not_fit_take_the_moments_of_the_draws(diagonal):
    rng = np.random.default_rng(0)
    loc, root = rng.normal(size=3), np.array([[3.0, 0, 0], [1, 1, 0], [0, 0.5, 0.2]])
    factor = np.array([1.0, 2, 3]) if diagonal else np.tril(rng.normal(size=(3, 3))) + 3 * np.eye(3)
    draws, state = rng.normal(size=(500, 4, 3)) @ root.T + 2, rng.normal(size=(4, 3))
    center, changed, moved = refitted(loc, factor, state, draws)
    before = colored(state, loc, factor)
    np.testing.assert_allclose(colored(moved, center, changed), before)
    white = whitened(colored(draws.reshape(-1, 3), loc, factor), center, changed)
    np.testing.assert_allclose(white.mean(axis=0), 0, atol=1e-6)
    covariance = np.cov(white.T)
    np.testing.assert_allclose(np.diag(covariance), 1, rtol=1e-3)
    if not diagonal:
        np.testing.assert_allclose(covariance, np.eye(3), atol=1e-3)
    same = refitted(loc, factor, state, rng.normal(size=(500, 4, 3)))
    assert same[0] is loc
    assert same[1] is factor
