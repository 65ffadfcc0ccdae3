"""Steps of natural gradients keep a precision positive definite."""

import numpy as np
import pytest

from tfp_ibnn.weights.natural_gradients import root_of_precision
from tfp_ibnn.weights.vectors import triangular


def test_steps_far_beyond_a_gaussian_keep_it_positive_definite():
    vectors = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 6)))[0]
    values = np.array([1e10, 3e9, 0.5, 0.1, -2.0, 3.0])  # 1 - e + e^2 / 2 of these, e beyond 1 too
    excess = vectors * values @ vectors.T
    root = root_of_precision(np.eye(6) - excess, (excess + excess.T) / 2)
    found = np.linalg.solve(root, vectors[:, 2])
    assert found @ found == pytest.approx(1 / (1 - 0.5 + 0.125), rel=1e-4)
    factor = vectors * np.logspace(0, -10, 6)
    lower = triangular(factor)
    np.testing.assert_allclose(lower, np.tril(lower))
    assert (np.diagonal(lower) > 0).all()
    np.testing.assert_allclose(lower @ lower.T, factor @ factor.T, atol=1e-15)
