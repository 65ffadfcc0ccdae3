"""Likelihoods of TFP: their losses, and the density averaged over the draws."""

import keras
import numpy as np
import pytest
import scipy.stats
from keras import layers, ops

import tfp_ibnn as ibnn
from tests.layer_checklist import numpy
from tests.likelihoods.tools import X, Y, poisson

DATA = np.random.default_rng(1)
OUTPUTS = DATA.normal(size=(20, 6)).astype("float32")


def mixture(x):
    logits, locs, raw = ops.split(x, 3, axis=-1)
    parts = ibnn.tfd.Normal(locs, ops.softplus(raw))
    return ibnn.tfd.MixtureSameFamily(ibnn.tfd.Categorical(logits=logits), parts)


def negative_binomial(x):
    return ibnn.tfd.NegativeBinomial(total_count=3.0, logits=x)


def triangular(x):
    scale = ibnn.tfd.MultivariateNormalTriL
    zero = ops.zeros_like(x[..., 2])
    rows = [[ops.exp(x[..., 2]), zero], [x[..., 3], ops.exp(x[..., 4])]]
    matrix = ops.stack([ops.stack(row, axis=-1) for row in rows], axis=-2)
    return scale(x[..., :2], matrix)


def test_poisson_loss():
    y, x = Y["count"], OUTPUTS[:, :1]
    right = -scipy.stats.poisson.logpmf(y, np.exp(x[:, 0].astype("float64")))
    loss = ibnn.layers.DistributionNLL(poisson, reduction=None)
    for target in (y, y[:, None]):
        np.testing.assert_allclose(loss(target, x), right, rtol=1e-5)


def test_losses_of_independent_numbers_are_summed():
    y, x = DATA.poisson(2, (20, 3)), OUTPUTS[:, :3]
    right = -scipy.stats.poisson.logpmf(y, np.exp(x.astype("float64"))).sum(axis=-1)
    found = ibnn.layers.DistributionNLL(poisson, reduction=None)(y, x)
    np.testing.assert_allclose(found, right, rtol=1e-5)


def test_negative_binomial_loss():
    y, x = Y["count"], OUTPUTS[:, :1]
    p = 1 / (1 + np.exp(x[:, 0].astype("float64")))
    right = -scipy.stats.nbinom.logpmf(y, 3.0, p)
    found = ibnn.layers.DistributionNLL(negative_binomial, reduction=None)(y, x)
    np.testing.assert_allclose(found, right, rtol=1e-4)


def test_mixture_loss():
    y = Y["size"]
    logits, locs, raw = np.split(OUTPUTS.astype("float64"), 3, axis=-1)
    weights = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    density = scipy.stats.norm.pdf(y[:, None], locs, np.log1p(np.exp(raw)))
    right = -np.log((weights * density).sum(axis=-1))
    for target in (y, y[:, None]):
        found = ibnn.layers.DistributionNLL(mixture, reduction=None)(target, OUTPUTS)
        np.testing.assert_allclose(found, right, rtol=1e-4)


def test_multivariate_loss():
    y, x = DATA.normal(size=(20, 2)).astype("float32"), OUTPUTS[:, :5]
    right = []
    for row, target in zip(x.astype("float64"), y, strict=True):
        factor = np.array([[np.exp(row[2]), 0], [row[3], np.exp(row[4])]])
        right.append(-scipy.stats.multivariate_normal.logpdf(target, row[:2], factor @ factor.T))
    found = ibnn.layers.DistributionNLL(triangular, reduction=None)(y, x)
    np.testing.assert_allclose(found, right, rtol=1e-3)


def first_column(x):
    return ibnn.tfd.Poisson(log_rate=x[:, :1])


@pytest.mark.parametrize("make", [poisson, negative_binomial, mixture, first_column])
def test_the_averaged_density_is_that_of_all_draws(eagerly, make):
    keras.utils.set_random_seed(1)
    size = 6 if make is mixture else 1
    model = keras.Sequential([keras.Input((4,)), layers.Dense(size)])
    sto = ibnn.to_stochastic(model, ibnn.NormalAffine(initial_scale=0.5, seed=0), train_size=20)
    sto.compile("adam", ibnn.layers.DistributionNLL(make))
    y = Y["size"] if make is mixture else Y["count"]
    mc = ibnn.MonteCarlo(sto, samples=7, seed=0)
    found = mc.predict(X, verbose=0)
    assert found["parameters"].shape == (20, 7, size)
    each = [make(ops.convert_to_tensor(found["parameters"][:, i])) for i in range(7)]
    shape = found["mean"].shape
    means = np.stack([numpy(x.mean()).reshape(shape) for x in each])
    variances = np.stack([numpy(x.variance()).reshape(shape) for x in each])
    np.testing.assert_allclose(found["mean"], means.mean(axis=0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["epistemic"], means.var(axis=0), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found["aleatoric"], variances.mean(axis=0), rtol=1e-4)
    target = ops.convert_to_tensor(y if make is mixture else y[:, None])
    density = np.mean([np.exp(numpy(x.log_prob(target))) for x in each], axis=0)
    scores = mc.evaluate(X, y, verbose=0, return_dict=True)
    assert scores["nll"] == pytest.approx(-np.log(density).mean(), rel=1e-4)
    assert scores["loss"] == pytest.approx(scores["nll"], rel=1e-5)


@pytest.mark.slow
def test_training_lowers_the_loss_of_counts():
    keras.utils.set_random_seed(0)
    x = DATA.normal(size=(200, 2)).astype("float32")
    y = DATA.poisson(np.exp(x[:, 0])).astype("float32")
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    sto = ibnn.to_stochastic(model, ibnn.NormalAffine(seed=0), train_size=200)
    sto.compile(keras.optimizers.Adam(0.05), ibnn.layers.DistributionNLL(poisson))
    history = sto.fit(x, y, epochs=10, verbose=0).history["loss"]
    assert history[-1] < history[0] - 0.1


def test_what_is_wrong_with_a_likelihood_is_said(eagerly):
    with pytest.raises(ValueError, match="`make` must be a function"):
        ibnn.layers.DistributionNLL("poisson")
    with pytest.raises(ValueError, match="`make` must return a TFP distribution"):
        ibnn.layers.DistributionNLL(lambda x: x)(np.ones(20), OUTPUTS[:, :2])
    with pytest.raises(ValueError, match="targets must have the shape"):
        ibnn.layers.DistributionNLL(poisson)(np.ones((20, 3)), OUTPUTS[:, :2])
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    with pytest.warns(UserWarning, match="no stochastic layer"):
        mc = ibnn.MonteCarlo(model, head=lambda x: ibnn.tfd.LogitNormal(x, 1.0))
    with pytest.raises(ValueError, match="LogitNormal has no mean"):
        mc.predict(X, verbose=0)
    sto = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=20)
    with pytest.raises(ValueError, match="`interval` is not for TFP"):
        ibnn.MonteCarlo(sto, samples=2, head=poisson, interval=0.9).predict(X, verbose=0)
