"""The log-evidence, where it is known."""

import numpy as np
import pytest

import tfp_ibnn as ibnn
from tests.diagnostics import problems
from tests.diagnostics.problems import NOISE, PRIOR, WEIGHTS, X, Y, Z
from tfp_ibnn.diagnostics import Reference


def test_smc_of_a_linear_model():
    options = {"prior_scale": PRIOR, "noise_scale": NOISE, "verbose": 0}
    found = ibnn.diagnostics.smc(problems.network(), (X, Y), **options)
    assert 0.005 < found.error < 0.06
    assert abs(found.value - WEIGHTS.evidence) < max(0.05, 3 * found.error)


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
