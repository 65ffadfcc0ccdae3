"""References by random-walk Metropolis, against closed forms."""

import numpy as np
import pytest
from keras import ops
from scipy.stats import truncnorm

import tfp_ibnn as ibnn
from tests.diagnostics import problems
from tests.diagnostics.problems import NOISE, PRIOR, WEIGHTS, X, Y, Z
from tests.diagnostics.test_reference_hmc import assert_gaussian

WALK = {"sampler": "metropolis", "verbose": 0}
RATE = 0.234


def test_the_weights_of_a_linear_regression(full_precision):
    known = {"noise_scale": NOISE, "prior_scale": PRIOR}
    found = ibnn.diagnostics.hmc(
        problems.network(), (X, Y), over="weights", draws=1500, **known, **WALK
    )
    assert found.samples.shape == (4, 1500, 4)
    assert_gaussian(found, WEIGHTS)
    seen = found.diagnostics()
    assert abs(seen["acceptance"] - RATE) < 0.05
    assert seen["R-hat, largest"] < 1.02
    assert seen["effective draws, fewest"] > 500
    assert seen["divergences"] == 0
    evidence = ibnn.diagnostics.bridge(found)
    assert abs(evidence.value - WEIGHTS.evidence) < max(0.02, 4 * evidence.error)


@pytest.mark.once
def test_z_of_a_linear_network(full_precision):
    model = problems.stochastic()
    found = ibnn.diagnostics.hmc(model, (X, Y), noise_scale=NOISE, draws=1500, **WALK)
    assert_gaussian(found, Z)


def correlated(w):
    """N(0, C) with standard deviations 1 and 100, and a correlation of 0.9."""
    first, second = w[:, 0], w[:, 1] / 100
    return -(first**2 - 1.8 * first * second + second**2) / (2 * (1 - 0.9**2))


@pytest.mark.once
def test_steps_fit_the_shape_of_the_density():
    target = problems.density(correlated)
    found = ibnn.diagnostics.hmc(target, draws=2000, **WALK)
    covariance = np.cov(found.samples.reshape(-1, 2).T)
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), [1, 100], rtol=0.1)
    assert abs(covariance[0, 1] / 100 - 0.9) < 0.15
    assert found.seen["effective draws, fewest"] > 1000


@pytest.mark.once
@pytest.mark.filterwarnings("ignore:The chains do not agree")
def test_steps_shrink_until_enough_are_accepted():
    """Steps of 2.4 / 8^0.5 are too long for narrow ridges, which no Gaussian fits."""
    ridges = ibnn.diagnostics.Density(
        lambda w: ops.sum(-(w**2) / 2 + 3 * ops.cos(9 * w), axis=-1), np.zeros(8, "float32")
    )
    found = ibnn.diagnostics.hmc(ridges, draws=300, warmup=300, **WALK)
    assert abs(found.seen["acceptance"] - RATE) < 0.06


@pytest.mark.once
def test_no_draw_lies_where_the_density_is_zero_or_not_a_number():
    def half(w):
        inside = ops.where(w > -1, w, 1.0)
        value = -ops.sum(inside**2, axis=-1) / 2
        return ops.where(ops.all(w > -1, axis=-1), value, float("nan"))

    target = ibnn.diagnostics.Density(half, np.array([0.5], "float32"), prior_scale=0.1)
    found = ibnn.diagnostics.hmc(target, draws=1500, start="prior", **WALK)
    assert found.samples.min() > -1
    error = 4 * truncnorm.std(-1, np.inf) / found.seen["effective draws, fewest"] ** 0.5
    assert abs(found.samples.mean() - truncnorm.mean(-1, np.inf)) < error


@pytest.mark.filterwarnings("ignore:The chains do not agree")
def test_a_seed_repeats():
    def draws(seed):
        target = problems.density(problems.banana)
        return ibnn.diagnostics.hmc(target, draws=8, warmup=8, seed=seed, **WALK).samples

    np.testing.assert_array_equal(draws(1), draws(1))
    assert np.all(draws(1) != draws(2))


@pytest.mark.once
def test_it_is_refused_if_it_takes_too_long():
    with pytest.raises(ValueError, match="4 chains over 4 numbers would take about"):
        ibnn.diagnostics.hmc(problems.network(), (X, Y), time_limit=1e-6, **WALK)
