"""Priors of weights and of z: the KL against closed forms and quadrature."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from scipy import stats

import tfp_ibnn as ibnn
from tests.layer_checklist import numpy
from tfp_ibnn import priors
from tfp_ibnn._core.backend import tfd

PRIORS = {
    "normal": (priors.Normal(0.4, 0.1), stats.norm(0.1, 0.4).logpdf),
    "laplace": (priors.Laplace(0.3, -0.2), stats.laplace(-0.2, 0.3).logpdf),
    "cauchy": (priors.Cauchy(0.2, 0.1), stats.cauchy(0.1, 0.2).logpdf),
    "student": (priors.StudentT(4.0, 0.5, 0.1), stats.t(4.0, 0.1, 0.5).logpdf),
    "mixture": (
        priors.ScaleMixture(0.3, 1.0, 0.1),
        lambda w: np.log(0.3 * stats.norm(0, 1).pdf(w) + 0.7 * stats.norm(0, 0.1).pdf(w)),
    ),
    "given": (priors.checked(tfd.Laplace(-0.2, 0.3)), stats.laplace(-0.2, 0.3).logpdf),
    "nested": (
        priors.checked(tfd.Independent(tfd.Laplace(ops.full((), -0.2), np.float32(0.3)), 0)),
        stats.laplace(-0.2, 0.3).logpdf,
    ),
}


def quadrature(log_prob, loc, scale):
    """Return KL[N(loc, scale^2) || p] for one number."""
    w = np.linspace(loc - 10 * scale, loc + 10 * scale, 20_001)
    q = stats.norm(loc, scale)
    return np.trapezoid(q.pdf(w) * (q.logpdf(w) - log_prob(w)), w)


def quantiles(count):
    """Return numbers at which averages are those of a standard normal."""
    return stats.norm.ppf((np.arange(count) + 0.5) / count).astype("float32")


@pytest.mark.parametrize("name", PRIORS)
@pytest.mark.parametrize(("loc", "scale"), [(0.3, 0.05), (-0.1, 0.4), (0.0, 2.0)])
def test_the_kl_is_that_of_quadrature(name, loc, scale):
    prior, log_prob = PRIORS[name]
    count = 2**14
    full = [ops.full((count,), x) for x in (loc, scale)]
    kl = float(prior.kl(*full, lambda: ops.convert_to_tensor(quantiles(count)))) / count
    assert kl == pytest.approx(quadrature(log_prob, loc, scale), rel=2e-3, abs=1e-3)


def test_closed_forms():
    loc, scale = np.array([0.3, -1.0], "float32"), np.array([0.1, 2.0], "float32")
    q = tfd.Normal(loc, scale)
    expected = np.sum(numpy(tfd.kl_divergence(q, tfd.Normal(0.1, 0.4))))
    got = priors.Normal(0.4, 0.1).kl(ops.convert_to_tensor(loc), ops.convert_to_tensor(scale), None)
    assert float(got) == pytest.approx(expected, rel=1e-5)
    assert float(priors.gaussian_entropy(scale)) == pytest.approx(
        np.sum(numpy(q.entropy())), rel=1e-5
    )
    tied = np.sum(numpy(tfd.kl_divergence(q, tfd.Normal(loc, 0.4))))
    got = priors.Tied(0.4).kl(ops.convert_to_tensor(loc), ops.convert_to_tensor(scale), None)
    assert float(got) == pytest.approx(tied, rel=1e-5)


@pytest.mark.parametrize("name", PRIORS)
def test_weights_with_any_prior_are_saved(name, tmp_path):
    prior, _ = PRIORS[name]
    det = keras.Sequential([keras.Input((3,)), layers.Dense(2, name="dense")])
    model = ibnn.to_stochastic(det, ibnn.MeanField(prior=prior, beta=2.0), train_size=10)
    model.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    (layer,), (loaded,) = map(ibnn.stochastic_layers, (model, again))
    assert float(loaded.summary().kl) == pytest.approx(float(layer.summary().kl), rel=1e-6)
    x = np.ones((4, 3), "float32")
    model(x)
    assert float(model.losses[0]) > 0


def test_distributions_over_arrays():
    make = lambda: layers.Dense(2, use_bias=False)  # noqa: E731
    rows = tfd.MultivariateNormalDiag(np.zeros(2, "float32"), np.array([0.5, 2.0], "float32"))
    columns = tfd.Normal(np.zeros(2, "float32"), np.array([0.5, 2.0], "float32"))
    found = []
    for prior in (rows, columns):
        layer = ibnn.MeanField(prior=prior, seed=0).wrap(make(), train_size=10)
        layer.build((None, 3))
        layer.layer.set_weights([np.ones((3, 2), "float32")])
        found.append(float(layer.summary().kl))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    for wrong in (
        tfd.Normal(np.zeros(3, "float32"), 1.0),
        tfd.MultivariateNormalDiag(np.zeros(1, "float32"), np.ones(1, "float32")),
    ):
        layer = ibnn.MeanField(prior=wrong).wrap(make(), train_size=10)
        with pytest.raises(ValueError, match=r"kernel has the shape \(3, 2\).*tfd.Normal\(0.0"):
            layer.build((None, 3))


def test_an_object_with_log_prob_works_and_is_not_saved(tmp_path):
    class Flat:
        def log_prob(self, x):
            return ops.zeros_like(x)

    det = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    model = ibnn.to_stochastic(det, ibnn.MeanField(prior=Flat()), train_size=10)
    (layer,) = ibnn.stochastic_layers(model)
    summary = layer.summary()
    assert float(summary.kl) == pytest.approx(-float(summary.entropy), rel=1e-6)
    with pytest.raises(ValueError, match="ibnn.priors.Prior"):
        model.save(tmp_path / "m.keras")


@pytest.mark.parametrize(
    "make",
    [
        lambda prior: ibnn.NormalAffine(prior=prior, initial_scale=0.2),
        lambda prior: ibnn.MixturePosterior(2, mean_spread=0.0, scale_spread=0.0, prior=prior),
        lambda prior: ibnn.NormalPlanar1d(prior=prior, initial_scale=0.2),
    ],
    ids=["gaussian", "mixture", "flow"],
)
def test_posteriors_over_z_take_any_prior(make, tmp_path):
    posterior = make(priors.Laplace(0.3, 0.9))
    posterior.build((None, 1))
    scale = 0.2 if not isinstance(posterior, ibnn.MixturePosterior) else 0.05
    noise = quantiles(4096)[:, None]
    component = np.arange(4096) % 2 if posterior.components > 1 else None
    kl = np.mean(numpy(posterior.transform(ops.convert_to_tensor(noise), component).kl))
    expected = quadrature(stats.laplace(0.9, 0.3).logpdf, 1.0, scale)
    assert kl == pytest.approx(expected, rel=0.02)
    config = keras.saving.serialize_keras_object(posterior)
    again = keras.saving.deserialize_keras_object(config)
    assert keras.saving.serialize_keras_object(again) == config

    layer = ibnn.StochasticDense(2, posterior=posterior, train_size=10)
    layer(np.ones((4, 3), "float32"))
    assert np.isfinite(float(layer.losses[0]))


def test_errors_of_posteriors_over_z():
    with pytest.raises(ValueError, match="leave `prior` out"):
        ibnn.NormalAffine(prior=priors.Laplace(), learn_prior_scale=True)
    with pytest.raises(ValueError, match="leave `prior` out"):
        ibnn.MixturePosterior(prior=priors.Laplace(), kl="averaged")
    posterior = ibnn.NormalAffine(prior=priors.Tied(0.1))
    posterior.build((None, 2))
    with pytest.raises(ValueError, match="ibnn.MeanField"):
        posterior.prior()
    with pytest.raises(ValueError, match=r"z has the shape \(2,\)"):
        ibnn.NormalAffine(prior=tfd.Normal(np.zeros(3, "float32"), 1.0)).build((None, 2))
    with pytest.raises(ValueError, match="`pi` must be"):
        priors.ScaleMixture(pi=1.5)


@pytest.mark.parametrize("posterior", [ibnn.NormalAffine, ibnn.NormalPlanar1d, ibnn.NormalFull])
def test_a_given_prior_may_have_another_precision(float64, posterior):
    prior = ibnn.tfd.Normal(np.float32(1.0), np.float32(0.5))
    one = posterior(prior=prior)
    one.build((3,))
    z, kl = one.sample_and_kl((4,))
    assert keras.backend.standardize_dtype(kl.dtype) == "float64"
    density = ops.convert_to_numpy(one.distribution().log_prob(z))
    gap = (ops.convert_to_numpy(z) - 1) / 0.5
    wanted = density + np.sum(gap**2 / 2 + np.log(0.5 * np.sqrt(2 * np.pi)), axis=-1)
    if posterior is not ibnn.NormalPlanar1d:  # their entropy is in closed form
        wanted += -ops.convert_to_numpy(one.distribution().entropy()) - density
    np.testing.assert_allclose(ops.convert_to_numpy(kl), wanted, rtol=1e-5)
