"""Mixtures: their KL, which is a bound or an average, and their start."""

import numpy as np
import pytest

import tfp_ibnn as ibnn
from tests.flows.tools import close, numpy
from tests.posteriors.tools import GIVEN_THE_COMPONENT, Grid, draw, quadrature_cases
from tests.registry import make_posterior

BOUNDS = sorted(GIVEN_THE_COMPONENT)


@pytest.mark.once
@quadrature_cases(BOUNDS)
def test_mixture_kl_is_a_bound_loose_by_at_most_log_k(float64, name, channels):
    posterior = make_posterior(name, channels, seed=4, size=0.7)
    grid = Grid(posterior)
    close(grid.integral(), 1.0, 2e-3)
    kl = draw(posterior, 20_000)[1]
    error = 5 * kl.std() / kl.size**0.5 + 2e-3
    gap = kl.mean() - grid.kl(posterior)
    assert 1e-2 < gap < np.log(3) + error


@pytest.mark.once
@pytest.mark.parametrize("name", BOUNDS)
def test_bound_is_tight_for_equal_components_and_log_k_off_for_distant_ones(float64, name):
    posterior = make_posterior(name, channels=1, prior_scale=5.0, initial_scale=0.5)
    loc = posterior.loc if name.startswith("Mixture") else posterior.base_loc
    for apart, expected in ((0.0, 0.0), (4.0, np.log(3))):
        loc.assign(apart * np.arange(3.0)[:, None])
        if name.startswith("Mixture"):
            posterior.raw_scale.assign(np.full((3, 1), -2.0))
        else:
            posterior.base_raw_scale.assign(np.full((3, 1), -2.0))
        kl = draw(posterior, 100_000)[1]
        close(kl.mean() - Grid(posterior, 20_001).kl(posterior), expected, 0.02)


@pytest.mark.parametrize("kl", ["bound", "averaged"])
def test_mixture_kl_against_its_formula(float64, kl):
    posterior = make_posterior(f"MixturePosterior-{kl}", channels=4, seed=1)
    m = numpy(posterior.loc.value)
    s = 1e-6 + np.log1p(np.exp(numpy(posterior.raw_scale.value)))
    entropy = np.mean(np.sum(np.log(s) + 0.5 * np.log(2 * np.pi * np.e), axis=1))
    close(float(posterior.entropy()), entropy, 1e-10)
    if kl == "averaged":  # the average of one draw from each component
        m, s = m.mean(axis=0, keepdims=True), np.sqrt(np.sum(s**2, axis=0, keepdims=True)) / 3
    each = np.sum(np.log(0.5 / s) + (s**2 + (m - 1) ** 2) / (2 * 0.5**2) - 0.5, axis=1)
    close(float(posterior.sample_and_kl((2,))[1]), each.mean(), 1e-10)


def test_mixture_components_start_around_prior_loc():
    posterior = ibnn.MixturePosterior(
        8, mean_spread=0.75, initial_scale=0.05, scale_spread=0.02, prior_loc=2.0
    )
    posterior.build((None, 400))
    loc, scale = numpy(*posterior._loc_and_scale())
    np.testing.assert_allclose(loc.mean(axis=0), 2.0, atol=1e-5)
    np.testing.assert_allclose(loc.std(), 0.75 * (7 / 8) ** 0.5, rtol=0.05)
    np.testing.assert_allclose([scale.mean(), scale.std()], [0.05, 0.02], rtol=0.05)
