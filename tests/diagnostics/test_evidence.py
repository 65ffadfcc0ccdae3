"""The log-evidence, where it is known."""

import numpy as np
import pytest
from keras import ops
from scipy.stats import norm, t

import tfp_ibnn as ibnn
from tests.diagnostics import problems
from tests.diagnostics.problems import NOISE, PRIOR, WEIGHTS, X, Y, Z
from tfp_ibnn.diagnostics import Reference


def test_smc_of_a_linear_model():
    options = {"prior_scale": PRIOR, "noise_scale": NOISE, "verbose": 0}
    found = ibnn.diagnostics.smc(problems.network(), (X, Y), **options)
    assert 0.005 < found.error < 0.06
    assert abs(found.value - WEIGHTS.evidence) < max(0.05, 3 * found.error)


def test_smc_of_many_numbers():
    """Particles must not swing to the other side of a Gaussian, and stay as far from its center."""
    size, width = 30, 0.2

    def log_prob(w):
        far = np.log(2 * np.pi) * size / 2
        return -ops.sum(ops.square(w) + ops.square((w - 1) / width), axis=-1) / 2 - far

    exact = norm(0, (1 + width**2) ** 0.5).logpdf(1) + np.log(width * (2 * np.pi) ** 0.5)
    target = ibnn.diagnostics.Density(log_prob, np.zeros(size, "float32"))
    found = ibnn.diagnostics.smc(target, particles=256, runs=4, verbose=0)
    assert abs(found.value - size * exact) < max(0.3, 4 * found.error)
    assert found.error < 0.3


def test_bridge_sampling_holds_out_weights_of_any_size():
    """Draws of a Student t under a Gaussian: the ratios of densities span 30 orders."""
    rng = np.random.default_rng(0)
    samples = rng.standard_t(3, size=(4, 500, 2))

    def log_prob(w):
        return ops.sum(-2 * ops.log(1 + ops.square(w) / 3), axis=-1)

    target = ibnn.diagnostics.Density(log_prob, [0, 0])
    found = ibnn.diagnostics.bridge(Reference(samples, target, {}))
    exact = -2 * t(3).logpdf(0)
    assert abs(found.value - exact) < 4 * found.error < 0.6


@pytest.mark.slow
def test_smc_over_z():
    options = {"noise_scale": NOISE, "verbose": 0}
    found = ibnn.diagnostics.smc(problems.stochastic(), (X, Y), **options)
    assert abs(found.value - Z.evidence) < 0.05


@pytest.mark.once
def test_smc_finds_both_modes():
    target = problems.density(problems.two_modes)
    found = ibnn.diagnostics.smc(target, particles=256, verbose=0)
    assert abs(found.value) < 4 * found.error < 0.3  # one mode alone has log(0.7) or log(0.3)


def two_modes(rng, draws):
    """Exact draws of the mixture, as a reference."""
    side = np.where(rng.random((4, draws, 1)) < 0.3, 3.0, -3.0)
    samples = side + 0.5 * rng.normal(size=(4, draws, 2))
    return Reference(samples, problems.density(problems.two_modes), {})


@pytest.mark.once
def test_bridge_sampling_of_a_mixture_and_its_error():
    rng = np.random.default_rng(0)
    found = [ibnn.diagnostics.bridge(two_modes(rng, 250), seed=i) for i in range(12)]
    values, errors = np.transpose(found)
    assert abs(values.mean()) < 3 * values.std() / 12**0.5
    assert 0.5 < values.std() / errors.mean() < 2  # the errors are as large as they say
    assert errors.max() < 0.15


@pytest.mark.once
@pytest.mark.filterwarnings("ignore:The chains do not agree")
def test_refusals():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="at least 20; it has 16"):
        ibnn.diagnostics.bridge(two_modes(rng, 4))
    target = problems.density(problems.banana)
    for name in ("particles", "runs"):
        with pytest.raises(ValueError, match=f"`{name}` must be a whole number"):
            ibnn.diagnostics.smc(target, **{name: 0})
    with pytest.raises(ValueError, match="`seed`"):
        ibnn.diagnostics.smc(target, seed=-1)
