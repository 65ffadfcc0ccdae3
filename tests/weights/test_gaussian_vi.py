"""Gaussians over the last layer, against closed forms and another optimiser."""

import keras
import numpy as np
import pytest
from keras import layers
from scipy.optimize import minimize
from scipy.stats import multivariate_normal

import tfp_ibnn as ibnn
from tests.flows.tools import numpy
from tests.weights.last_layers import PRIOR, X, Y, logistic


def linear():
    """A linear regression of known noise: inputs, targets, model, exact precision and mean."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(30, 3)).astype("float32")
    x[:, 1] += x[:, 0]
    design = np.concatenate([x, np.ones((30, 1))], axis=1)
    y = design @ [1.0, -2.0, 0.5, 0.3] + 0.4 * rng.normal(size=30)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    precision = design.T @ design / 0.4**2 + np.eye(4) / PRIOR**2
    mean = np.linalg.solve(precision, design.T @ y / 0.4**2)
    covariance = 0.4**2 * np.eye(30) + PRIOR**2 * design @ design.T
    evidence = multivariate_normal(np.zeros(30), covariance).logpdf(y)
    return x, y, model, precision, mean, evidence


def test_the_elbo_of_a_linear_model_is_the_evidence():
    x, y, model, precision, mean, evidence = linear()
    options = {"prior_scale": PRIOR, "noise_scale": 0.4}
    full = ibnn.GaussianVI(model, **options).fit(x, y, verbose=0)
    assert abs(full.elbo - evidence) < 4e-3  # 4e-6 on a CPU; a GPU multiplies in TF32
    np.testing.assert_allclose(numpy(full.distribution().mean()), mean, atol=1e-4)
    found = np.linalg.inv(numpy(full.distribution().covariance()))
    np.testing.assert_allclose(found, precision, rtol=1e-3, atol=0.1)


@pytest.mark.once
@pytest.mark.slow
def test_diagonal_and_low_rank_gaussians_of_a_linear_model():
    x, y, model, precision, _, evidence = linear()
    options = {"prior_scale": PRIOR, "noise_scale": 0.4}
    # The best diagonal Gaussian has the diagonal of the precision.
    gap = (np.log(np.diag(precision)).sum() - np.linalg.slogdet(precision)[1]) / 2
    diagonal = ibnn.GaussianVI(model, covariance="diag", **options).fit(x, y, verbose=0)
    assert abs(diagonal.elbo - (evidence - gap)) < 1e-3
    assert gap > 0.2
    scale = numpy(diagonal.distribution().stddev())
    np.testing.assert_allclose(scale, np.diag(precision) ** -0.5, rtol=1e-2)
    made = ibnn.GaussianVI(model, covariance="lowrank", rank=3, **options)
    low_rank = made.fit(x, y, steps=30, verbose=0)
    assert diagonal.elbo + gap / 2 < low_rank.elbo < evidence + 1e-3
    inside = numpy(low_rank.distribution().covariance())
    np.testing.assert_allclose(inside, np.linalg.inv(precision), atol=0.3 * inside.max())


def test_a_logistic_model_against_another_optimiser(quadrature):
    fitted = ibnn.GaussianVI(logistic(2), prior_scale=PRIOR).fit(X, Y, verbose=0)
    rng = np.random.default_rng(5)
    half = rng.standard_normal((2000, 2))
    half = half @ np.linalg.inv(np.linalg.cholesky(half.T @ half / 2000)).T
    eps, sign = np.concatenate([half, -half]), 2 * Y - 1
    design = np.concatenate([X, np.ones_like(X)], axis=1)

    def minus_elbo(p):
        factor = np.array([[np.exp(p[2]), 0], [p[4], np.exp(p[3])]])
        w = p[:2] + eps @ factor.T
        likelihood = -np.logaddexp(0, -sign * (w @ design.T)).sum(axis=1)
        prior = -np.sum(w**2, axis=1) / (2 * PRIOR**2) - 2 * np.log(PRIOR)
        return -np.mean(likelihood + prior) - p[2] - p[3] - 1

    best = minimize(minus_elbo, np.zeros(5))
    assert abs(fitted.elbo + best.fun) < 0.01
    np.testing.assert_allclose(numpy(fitted.loc.value), best.x[:2], atol=0.03)
    # And the bound lies below the evidence by the KL from the posterior.
    gap = quadrature.evidence - fitted.elbo
    assert abs(gap - quadrature.kl_of(fitted)) < 0.01
    assert gap > 0.03


def classifier():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((4, 4, 1)),
            layers.Conv2D(2, 3),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


IMAGES = np.random.default_rng(2).normal(size=(20, 4, 4, 1)).astype("float32")
LABELS = np.arange(20) % 3


@pytest.mark.once
def test_a_seed_reproduces_and_the_model_stays(tmp_path):
    model = classifier()
    before = model.get_weights()
    fits = [ibnn.GaussianVI(model, covariance=c) for c in ("diag", "diag", "diag")]
    for fit, seed in zip(fits, (3, 3, 4), strict=True):
        fit.fit(IMAGES, LABELS, steps=5, seed=seed, verbose=0)
    first, again, other = (numpy(fit.loc.value) for fit in fits)
    np.testing.assert_allclose(first, again, rtol=1e-6)
    assert not np.allclose(first, other, rtol=1e-2)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert [v.path for v in fits[0].sampled] == [v.path for v in model.layers[-1].weights]
    mc = ibnn.MonteCarlo(fits[0], samples=4, seed=0)
    found = {key: numpy(value) for key, value in mc(IMAGES).items()}
    assert found["epistemic"].max() > 1e-3
    mc.save(tmp_path / "vi.keras")
    loaded = keras.models.load_model(tmp_path / "vi.keras")
    np.testing.assert_allclose(numpy(loaded(IMAGES)["mean"]), found["mean"], atol=1e-6)
    assert loaded.inner.elbo == fits[0].elbo


@pytest.mark.once
def test_noise_that_the_network_predicts_or_that_is_estimated():
    x = np.linspace(-1, 1, 40, dtype="float32")[:, None]
    y = 2 * x[:, 0] + np.random.default_rng(0).normal(scale=0.1 + 0.2 * (x[:, 0] > 0))
    head = keras.Sequential([keras.Input((1,)), layers.Dense(2), ibnn.layers.GaussianHead()])
    head.compile("sgd", ibnn.layers.GaussianNLL())
    fitted = ibnn.GaussianVI(head, prior_scale=2.0).fit(x, y, verbose=0)
    slope = numpy(fitted.mean()[0])
    assert abs(slope[0, 0] - 2) < 0.3
    assert slope[0, 1] > 0.3  # of the raw scale: more noise to the right
    plain = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    plain.compile("sgd", "mse")
    plain.set_weights([np.full((1, 1), 2.0), np.zeros(1)])
    posterior = ibnn.GaussianVI(plain)
    target = posterior.target(x, y, verbose=0)
    residual = np.sqrt(np.mean((y - 2 * x[:, 0]) ** 2))
    np.testing.assert_allclose(target.likelihood.scale, residual, rtol=1e-3)
