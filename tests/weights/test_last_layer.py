"""Gaussians and HMC over the last layer, against closed forms, quadrature and another optimiser."""

import keras
import numpy as np
import pytest
from keras import layers
from scipy.optimize import minimize
from scipy.stats import multivariate_normal

import tfp_ibnn as ibnn
from tests.flows.tools import numpy
from tests.weights.last_layers import LOGITS, PRIOR, Quadrature, X, Y, logistic
from tfp_ibnn.weights.natural_gradients import root_of_precision
from tfp_ibnn.weights.vectors import triangular


@pytest.fixture(scope="module")
def quadrature():
    return Quadrature(2)


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


@pytest.fixture(scope="module")
def hmc():
    made = ibnn.LastLayerHMC(logistic(2), prior_scale=PRIOR, draws=500, warmup=200)
    return made.fit(X, Y, verbose=0)


def test_hmc_has_the_moments_of_quadrature(hmc, quadrature):
    w, found = hmc.samples(), hmc.diagnostics()
    assert w.shape == (2000, 2)
    assert found["R-hat, largest"] < 1.02
    assert found["effective draws, fewest"] > 500
    assert 0.6 < found["acceptance"] < 0.98
    scale = np.sqrt(np.diag(quadrature.covariance))
    error = scale / found["effective draws, fewest"] ** 0.5
    assert np.all(np.abs(w.mean(axis=0) - quadrature.mean) < 4 * error)
    np.testing.assert_allclose(w.std(axis=0), scale, rtol=0.12)
    skew = np.mean(((w - w.mean(axis=0)) / w.std(axis=0)) ** 3, axis=0)
    assert skew[0] > 0.2  # which no Gaussian has
    np.testing.assert_allclose(numpy(hmc.mean()[0]).ravel(), w[:, 0].mean(), rtol=1e-4)


def test_hmc_draws_all_sets_in_a_mixed_order(hmc):
    drawn, stored = numpy(hmc.draw(None, np.arange(2000))), hmc.samples()
    np.testing.assert_array_equal(np.sort(drawn[:, 0]), np.sort(stored[:, 0]))
    place = {tuple(row): number for number, row in enumerate(stored)}
    first = np.array([place[tuple(row)] for row in drawn[:100]])
    assert np.histogram(first, bins=10, range=(0, 2000))[0].min() >= 8
    assert set(first % 4) == {0, 1, 2, 3}  # all chains


def test_the_report_is_a_table_and_the_file_holds_it(hmc, tmp_path):
    text = hmc.report()
    assert text.startswith("4 chains of 500 draws, 2 weights\nacceptance")
    assert len(text.splitlines()) == 5
    mc = ibnn.MonteCarlo(hmc, samples=16)
    mc.save(tmp_path / "hmc.keras")
    loaded = keras.models.load_model(tmp_path / "hmc.keras")
    np.testing.assert_array_equal(numpy(loaded(X)["mean"]), numpy(mc(X)["mean"]))
    assert loaded.inner.report() == text


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


@pytest.mark.once
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: ibnn.GaussianVI(m, covariance="kron"), "`covariance` must be one of"),
        (lambda m: ibnn.GaussianVI(m, prior_scale=0.0), "`prior_scale` must be above 0"),
        (lambda m: ibnn.GaussianVI(m, rank=0), "`rank`"),
        (lambda m: ibnn.GaussianVI(wide()), "20002 weights need 3.2 GB"),
        (lambda m: ibnn.GaussianVI(m).fit(X, Y[:3]), "as many examples"),
        (lambda m: ibnn.GaussianVI(m).fit(X, Y + 0.5), "0 or 1"),
        (lambda m: ibnn.GaussianVI(m).fit(X * np.nan, Y), "NaN or infinity"),
        (lambda m: ibnn.LastLayerHMC(m).fit(X[:0], Y[:0]), "no examples"),
        (lambda m: ibnn.GaussianVI(m, noise_scale=1.0).fit(X, Y), "`noise_scale` is for plain"),
        (lambda m: ibnn.LastLayerHMC(m, chains=1), "`chains` must be a whole number of at least 2"),
        (lambda m: ibnn.LastLayerHMC(m, draws=0), "`draws`"),
        (lambda m: ibnn.LastLayerHMC(wide()), "1000 draws of 20002 weights are too many"),
        (lambda m: ibnn.MonteCarlo(ibnn.GaussianVI(m), sampling="qmc"), "`sampling` must be"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(ValueError, match=words):
        make(logistic(2))


def wide():
    model = keras.Sequential([keras.Input((10_000,)), layers.Dense(2)])
    model.compile("sgd", LOGITS)
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The chains do not agree")
def test_a_seed_reproduces_the_chains():
    def draws(seed):
        made = ibnn.LastLayerHMC(logistic(2), chains=2, draws=8, warmup=8)
        return made.fit(X, Y, seed=seed, verbose=0).samples()

    first, again, other = draws(1), draws(1), draws(2)
    np.testing.assert_array_equal(first, again)
    assert np.all(first != other)


@pytest.mark.once
def test_chains_that_do_not_agree_are_told():
    made = ibnn.LastLayerHMC(logistic(2), draws=50, warmup=10)
    rng = np.random.default_rng(0)
    made._sets.assign(rng.normal(size=(50, 4, 2)) + np.array([0, 0, 0, 3.0])[:, None])
    assert made.diagnostics()["R-hat, largest"] > 1.5


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
