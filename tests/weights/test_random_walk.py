"""Metropolis steps of a random walk, against closed forms and quadrature."""

import numpy as np
import pytest
from keras import ops

from tests import autodiff
from tests.flows.tools import numpy
from tfp_ibnn._core.backend import KEY_DTYPE, tfp
from tfp_ibnn.weights.random_walk import RandomWalk

CHAINS = 4000
KEY = np.array([1, 2], KEY_DTYPE)


def log_normal(w):
    return -ops.sum(w**2, axis=-1) / 2


def two_hills(w):
    """Two hills of unequal height and width."""
    x = w[..., 0]
    return ops.log(2 * ops.exp(-4 * (x + 1) ** 2) + ops.exp(-((x - 1) ** 2)))


def step_sizes(size):
    return np.full((CHAINS, 1), size, "float32")


def test_steps_are_gaussian_and_of_the_size_that_is_kept():
    walk = RandomWalk(log_normal, step_sizes(1.0))
    state = ops.convert_to_tensor(np.full((CHAINS, 2), 3.0, "float32"))
    results = walk.bootstrap_results(state)._replace(step_size=step_sizes(0.5))
    proposed, results = walk.one_step(state, results, seed=KEY)
    moves = (numpy(proposed) - 3) / 0.5
    assert np.all(np.abs(moves.mean(axis=0)) < 4 / CHAINS**0.5)
    np.testing.assert_allclose(np.cov(moves.T), np.eye(2), atol=0.1)
    np.testing.assert_allclose(np.mean(moves**4, axis=0), 3, rtol=0.2)
    expected = -np.sum(numpy(proposed) ** 2, axis=1) / 2
    np.testing.assert_allclose(results.target_log_prob, expected, rtol=1e-5)
    np.testing.assert_array_equal(results.log_acceptance_correction, 0)


@pytest.mark.parametrize("size", [0.5, 2.4])
def test_acceptance_of_a_gaussian_is_the_closed_form(size):
    """Of steps N(0, s^2) from draws of N(0, 1), 2 atan(2 / s) / pi are accepted."""
    kernel = tfp.mcmc.MetropolisHastings(RandomWalk(log_normal, step_sizes(size)))
    start = np.random.default_rng(0).normal(size=(CHAINS, 1)).astype("float32")
    state = ops.convert_to_tensor(start)
    _, results = kernel.one_step(state, kernel.bootstrap_results(state), seed=KEY)
    expected = 2 * np.arctan(2 / size) / np.pi
    assert abs(numpy(results.is_accepted).mean() - expected) < 4 * 0.5 / CHAINS**0.5
    rate = np.exp(np.minimum(numpy(results.log_accept_ratio), 0)).mean()
    assert abs(rate - expected) < 4 * 0.5 / CHAINS**0.5


def test_chains_end_in_the_density_of_quadrature():
    def last_places(state):
        kernel = tfp.mcmc.MetropolisHastings(RandomWalk(two_hills, step_sizes(1.5)))
        return tfp.mcmc.sample_chain(
            1, state, kernel=kernel, num_burnin_steps=60, trace_fn=None, seed=KEY
        )

    start = ops.convert_to_tensor(np.full((CHAINS, 1), 3.0, "float32"))
    x = numpy(autodiff.jit(last_places, [])(start))[0, :, 0]
    grid = np.linspace(-6, 7, 4001)
    density = np.exp(numpy(two_hills(ops.convert_to_tensor(grid[:, None].astype("float32")))))
    cumulative = np.cumsum(density) / density.sum()
    ranks = np.interp(np.sort(x), grid, cumulative)
    uniform = (np.arange(CHAINS) + 0.5) / CHAINS
    assert np.abs(ranks - uniform).max() < 1.95 / CHAINS**0.5  # Kolmogorov-Smirnov, p = 0.001
