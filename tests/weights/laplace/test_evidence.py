"""The evidence of a linear model against algebra."""

import keras
import numpy as np
import pytest
from keras import layers
from scipy.stats import multivariate_normal

import tfp_ibnn as ibnn
from tests.weights.laplace_tools import (
    OPTIONS,
    RNG,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:The network does not seem to be trained"),
    pytest.mark.filterwarnings("ignore:The scale and shift"),
]


@pytest.fixture(scope="module")
def linear():
    """A linear regression at its most probable weights for a prior and a noise scale."""
    prior, scale, x = 0.7, 0.4, RNG.normal(size=(20, 3))
    y = x @ [1.0, -2.0, 0.5] + 0.3 + scale * RNG.normal(size=20)
    model = keras.Sequential([keras.Input((3,), dtype="float64"), layers.Dense(1, **OPTIONS)])
    model.compile(loss="mse")
    design = np.concatenate([x, np.ones((20, 1))], axis=1)
    precision = design.T @ design / scale**2 + prior * np.eye(4)
    w = np.linalg.solve(precision, design.T @ y / scale**2)
    model.set_weights([w[:3, None], w[3:]])
    options = {"hessian_structure": "full", "prior_precision": prior, "noise_scale": scale}
    la = ibnn.Laplace(model, **options).fit(x, y, verbose=0)
    return la, design, y, precision, w


def test_the_evidence_of_a_linear_model_is_exact(linear):
    la, design, y, precision, w = linear
    covariance = 0.4**2 * np.eye(20) + design @ design.T / 0.7
    exact = multivariate_normal(np.zeros(20), covariance).logpdf(y)
    assert la.log_marginal_likelihood() == pytest.approx(exact, abs=1e-9)
    posterior = la.distribution()
    np.testing.assert_allclose(posterior.mean(), w, atol=1e-12)
    np.testing.assert_allclose(posterior.covariance(), np.linalg.inv(precision), atol=1e-12)


@pytest.mark.once
def test_the_fixed_point_maximises_the_evidence(linear):
    evidence = linear[0].evidence
    prior, scale = evidence.maximize()
    best = evidence.log_prob(prior, scale)
    for factor in (0.9, 0.99, 1.01, 1.1):
        assert evidence.log_prob(prior * factor, scale) < best
        assert evidence.log_prob(prior, scale * factor) < best
    assert evidence.maximize(2.0)[0] == 2.0
    assert evidence.maximize(None, 0.3)[1] == 0.3
    half = evidence._replace(temperature=0.5)
    double = evidence._replace(eigenvalues=2 * evidence.eigenvalues)
    assert half.log_prob(3.0, 0.4) == pytest.approx(double.log_prob(3.0, 0.4))
    assert half.log_prob(3.0, 0.4) < evidence.log_prob(3.0, 0.4)
