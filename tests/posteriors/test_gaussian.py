"""Correlated Gaussians against their closed forms."""

import numpy as np
import pytest
from keras import ops

import tfp_ibnn as ibnn
from tests.flows.tools import close, numpy
from tests.posteriors.tools import CORRELATED, log_density
from tests.registry import make_posterior


@pytest.mark.parametrize("name", sorted(CORRELATED))
def test_correlated_gaussians_have_the_closed_form(float64, name):
    posterior = make_posterior(name, channels=4, seed=1)
    p, q, each = 0.5, posterior.distribution(), numpy(posterior.loc.value)
    eye = ops.eye(4, dtype="float64")
    factor = numpy(posterior.transform(eye).z) - each  # the noise e_c gives column c
    covariance = factor.T @ factor
    close(numpy(q.covariance()), covariance, 1e-9)
    assert np.abs(covariance - np.diag(np.diag(covariance))).max() > 0.1
    log_det = np.linalg.slogdet(covariance)[1]
    trace = (np.trace(covariance) + np.sum((each - 1) ** 2)) / p**2
    found = posterior.summary()
    close(float(found.kl), (trace - 4 - log_det) / 2 + 4 * np.log(p), 1e-9)
    close(float(found.entropy), (log_det + 4 * np.log(2 * np.pi * np.e)) / 2, 1e-9)
    other = posterior.copy(prior=ibnn.priors.Normal(p, loc=1.0))
    other.build((4,))
    other.set_weights(posterior.get_weights())
    found = other.summary()
    close(numpy(found.kl), -float(found.entropy) - log_density(posterior.prior(), found.z), 1e-9)


def test_a_low_rank_covariance_is_a_diagonal_plus_that_rank(float64):
    posterior = ibnn.NormalLowRank(rank=1)
    posterior.build((5,))
    posterior.columns.assign(np.random.default_rng(0).normal(size=(5, 1)))
    scale = 0.1
    rest = numpy(posterior.distribution().covariance()) - scale**2 * np.eye(5)
    values = np.linalg.eigvalsh(rest)
    assert values[-1] > 1e-2
    assert np.abs(values[:-1]).max() < 1e-7
