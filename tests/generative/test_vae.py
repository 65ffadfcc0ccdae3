"""Autoencoders: against a model of known evidence, quadrature, autodiff, SciPy, and bad input."""

import itertools

import keras
import numpy as np
import pytest
from keras import layers
from scipy import special, stats

import tfp_ibnn as ibnn
from tests import autodiff
from tests.layer_checklist import numpy
from tfp_ibnn import flows

RNG = np.random.default_rng(0)
BITS = np.array(list(itertools.product((0.0, 1.0), repeat=4)), "float32")
GREY = (RNG.integers(256, size=(12, 2, 2)) / 255).astype("float32")


def coders(shape=(4,), latent_size=2, units=5):
    encoder = [keras.Input(shape), layers.Flatten(), layers.Dense(units, activation="tanh")]
    decoder = [keras.Input((latent_size,)), layers.Dense(int(np.prod(shape)))]
    return keras.Sequential(encoder), keras.Sequential([*decoder, layers.Reshape(shape)])


def made(shape=(4,), latent_size=2, layers=(), seed=0, **options):
    """Return an autoencoder whose weights differ from their start."""
    keras.utils.set_random_seed(seed)
    vae = ibnn.VAE(*coders(shape, latent_size), latent_size, layers, seed=seed, **options)
    rng = np.random.default_rng(seed)
    for v in vae.trainable_variables:
        v.assign(numpy(v) + 0.4 * rng.normal(size=v.shape))
    vae.compile(keras.optimizers.SGD(0.0), run_eagerly=True)
    return vae


# Probabilistic PCA: x = loadings z + center + noise, whose evidence is Gaussian.
LOADINGS = np.array([[1.0, 0.5], [2.0, 0.0], [0.0, 1.0], [-0.5, 1.0]])
LOADINGS[:, 1] -= LOADINGS[:, 0] * (LOADINGS[:, 0] @ LOADINGS[:, 1] / (LOADINGS[:, 0] ** 2).sum())
CENTER, NOISE = np.array([1.0, -2.0, 0.0, 3.0]), 0.5
PPCA = stats.multivariate_normal(CENTER, LOADINGS @ LOADINGS.T + NOISE**2 * np.eye(4))
X = PPCA.rvs(300, random_state=np.random.default_rng(1))


def linear(width=1.0):
    """Return the model of x, with the exact posterior, or one that is wider."""
    encoder = keras.Sequential([keras.Input((4,)), layers.Identity()])
    decoder = keras.Sequential([keras.Input((2,)), layers.Dense(4)])
    vae = ibnn.VAE(encoder, decoder, 2, likelihood="gaussian", seed=0)
    decoder.set_weights([LOADINGS.T, CENTER])
    variance = 1 / (1 + (LOADINGS**2).sum(0) / NOISE**2)
    slope = LOADINGS * variance / NOISE**2
    raw = np.log(np.expm1(width * variance**0.5))
    vae.head.set_weights([np.hstack([slope, 0 * slope]), np.hstack([-CENTER @ slope, raw])])
    vae.raw_scale.assign(np.log(np.expm1(NOISE)))
    return vae


def test_bound_is_the_evidence_at_the_exact_posterior(float64):
    terms = linear()(np.tile(X, (200, 1)))
    bound = -numpy(terms["reconstruction"] + terms["kl"]).reshape(200, -1)
    expected = PPCA.logpdf(X)
    assert bound.mean() == pytest.approx(expected.mean(), abs=1e-2)
    error = (bound.mean(0) - expected) / (bound.std(0) / 200**0.5)
    assert np.abs(error).max() < 4.5


def test_every_importance_weight_is_the_evidence_at_the_exact_posterior(float64):
    found = linear().negative_log_likelihood(X[:7], samples=13, batch_size=4)
    np.testing.assert_allclose(found, -PPCA.logpdf(X[:7]), atol=1e-4)  # scales are above 1e-6


def test_importance_weights_correct_a_wrong_posterior(float64, capsys):
    vae, expected = linear(1.5), -PPCA.logpdf(X)
    found = [vae.negative_log_likelihood(X, n, verbose=1).mean() for n in (1, 300)]
    assert found[0] > expected.mean() + 0.2
    assert found[1] == pytest.approx(expected.mean(), abs=1e-2)
    assert "3/3" in capsys.readouterr().out


def best_evidence(x):
    """The mean log evidence of the most likely probabilistic PCA, of two columns."""
    values = np.linalg.eigvalsh(np.cov(x.T, bias=True))
    values[:2] = values[:2].mean()
    return -0.5 * (np.log(values).sum() + 4 * np.log(2 * np.pi) + 4)


@pytest.mark.slow
def test_training_reaches_the_evidence():
    encoder = keras.Sequential([keras.Input((4,)), layers.Identity()])
    decoder = keras.Sequential([keras.Input((2,)), layers.Dense(4)])
    vae = ibnn.VAE(encoder, decoder, 2, likelihood="gaussian", seed=0)
    rate = keras.optimizers.schedules.CosineDecay(0.05, 1000)
    vae.compile(keras.optimizers.Adam(rate), steps_per_execution=10)
    vae.fit(np.tile(X, (10, 1)), epochs=100, batch_size=300, verbose=0)
    terms = vae(np.tile(X, (100, 1)).astype("float32"))
    bound = -numpy(terms["reconstruction"] + terms["kl"]).mean()
    assert bound == pytest.approx(best_evidence(X), abs=0.05)
    found = vae.negative_log_likelihood(X, samples=20).mean()
    assert found == pytest.approx(-best_evidence(X), abs=0.02)


@pytest.mark.parametrize(
    "options",
    [
        {"prior": 3, "layers": [flows.Planar()]},
        pytest.param(
            {"prior": ibnn.FlowDensity([flows.Spline(bins=4)], base=2)}, marks=pytest.mark.slow
        ),
    ],
    ids=["mixture", "flow"],
)
def test_likelihood_is_that_of_quadrature_and_sums_to_one(float64, options):
    """Over all 16 images of four bits, with one latent dimension."""
    vae = made(latent_size=1, **options)
    # A wide posterior, which weights can correct.
    vae.head.set_weights([0.2 * numpy(vae.head.kernel), np.array([0.0, 3.0])])
    z = np.linspace(-12, 12, 3001)[:, None]
    prior = np.exp(numpy(vae.prior(z))) * (z[1] - z[0])
    likelihood = stats.bernoulli.pmf(BITS[:, None], vae.decode(z)).prod(-1)
    expected = likelihood @ prior
    assert expected.sum() == pytest.approx(1, abs=1e-4)
    found = vae.negative_log_likelihood(BITS, samples=2000)
    np.testing.assert_allclose(found, -np.log(expected), atol=0.2)
    assert np.exp(-found).sum() == pytest.approx(1, abs=0.04)
    draws = vae.sample(3000, seed=1)
    assert draws.mean(0) == pytest.approx(prior @ vae.decode(z), abs=0.03)


def test_closed_kl_is_the_mean_of_its_estimates(float64):
    vae = made()
    closed = numpy(vae(BITS)["kl"])
    h, eps = vae.encoder(BITS), np.random.default_rng(0).normal(size=(4000, 16, 2))
    logs = numpy(vae._sampled_terms(BITS, h, eps)[1])
    assert np.abs((logs.mean(0) - closed) / (logs.std(0) / 4000**0.5)).max() < 4
    assert np.ptp(closed) > 0.1


@pytest.mark.parametrize(
    "flow",
    [
        flows.Planar(),
        pytest.param(flows.Sylvester(units=2), marks=pytest.mark.slow),
        pytest.param(flows.InverseAutoregressive(hidden=4), marks=pytest.mark.slow),
        pytest.param(flows.AffineCoupling(hidden=4), marks=pytest.mark.slow),
    ],
    ids=["planar", "sylvester", "autoregressive", "coupling"],
)
def test_flow_posterior_is_the_change_of_variables(float64, flow):
    """For each x by itself, and as if there were several draws."""
    vae = made(layers=[flow, flows.Radial()])
    h, eps = vae.encoder(BITS), RNG.normal(size=(16, 2))
    z, found, *_ = map(numpy, vae._draw(h, eps))
    matrices = autodiff.jacobian(lambda eps: vae._draw(h, eps)[0], eps)
    changes = np.linalg.slogdet(matrices)[1]
    np.testing.assert_allclose(found, stats.norm.logpdf(eps).sum(-1) - changes, rtol=1e-6)
    assert np.ptp(changes) > 0.1
    both = vae._draw(h, np.stack([0 * eps, eps]))
    np.testing.assert_allclose(numpy(both[0])[1], z, rtol=1e-9)
    np.testing.assert_allclose(numpy(both[1])[1], found, rtol=1e-9)
    np.testing.assert_allclose(numpy(both[0])[0], vae.encode(BITS), rtol=1e-9)


@pytest.mark.parametrize("scale", [1e-3, 0.05, 3.0])
def test_discretised_logistic_is_the_difference_of_distributions(float64, scale):
    vae = made(likelihood="discretised_logistic")
    vae.raw_scale.assign(np.log(np.expm1(scale - 1e-6)))
    levels, means = np.arange(256) / 255, np.array([-0.4, 0.0, 0.2, 0.501, 1.0, 1.2])
    found = numpy(vae._log_likelihood(levels[:, None], means))
    np.testing.assert_allclose(np.exp(found).sum(0), 1, rtol=1e-9)
    edges = np.concatenate([[-np.inf], levels[:-1] + 0.5 / 255, [np.inf]])
    expected = np.diff(special.expit((edges[:, None] - means) / scale), axis=0)
    np.testing.assert_allclose(np.exp(found), expected, atol=1e-12)
    assert np.isfinite(found).all()  # where the difference is 0 already


@pytest.mark.once
@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian", "discretised_logistic"])
def test_plain_autoencoder_has_the_likelihood_of_its_reconstruction(float64, likelihood):
    vae = made((2, 2), posterior="point", likelihood=likelihood)
    terms, x = {k: numpy(v) for k, v in vae(GREY).items()}, GREY.astype("float64")
    mean = vae.reconstruct(GREY)
    if likelihood == "bernoulli":
        logs = special.xlogy(x, mean) + special.xlog1py(1 - x, -mean)
    elif likelihood == "gaussian":
        logs = stats.norm.logpdf(x, mean, 1e-6 + np.logaddexp(0, numpy(vae.raw_scale)))
    else:
        assert 0 <= mean.min() < mean.max() <= 1
        decoded = numpy(vae.decoder(vae.encode(GREY)))
        logs = numpy(vae._log_likelihood(x, decoded))
    np.testing.assert_allclose(terms["reconstruction"], -logs.sum((1, 2)), rtol=1e-5)
    assert not terms["kl"].any()
    np.testing.assert_array_equal(vae.encode(GREY, seed=3), vae.encode(GREY))
    with pytest.raises(ValueError, match="has no likelihood"):
        vae.negative_log_likelihood(GREY)


@pytest.mark.slow
def test_training_lowers_the_loss_of_each_kind():
    for options in ({"layers": [flows.Planar()], "prior": 2}, {"posterior": "point"}):
        vae = made((2, 2), **options)
        vae.compile(keras.optimizers.Adam(0.05))
        loss = vae.fit(GREY, epochs=15, batch_size=12, verbose=0).history["loss"]
        assert np.mean(loss[-3:]) < np.mean(loss[:3]) - 0.1


def test_beta_is_annealed_in_compiled_steps_and_free_bits_bound_the_kl():
    vae = made(beta=0.5)
    vae.compile(keras.optimizers.SGD(0.0))
    for stop, last in ((None, 0.5), (2.0, 2.0)):
        options = {"verbose": 0, "callbacks": [ibnn.KLAnnealing(1, stop=stop)]}
        history = vae.fit(BITS, epochs=2, batch_size=16, **options).history
        loss, *parts = (np.array(history[key]) for key in ("loss", "reconstruction", "kl"))
        np.testing.assert_allclose(loss, parts[0] + [0, last] * parts[1], rtol=1e-5)
    outputs = {"reconstruction": np.ones(3), "kl": np.array([0.5, -0.1, 0.8])}
    for free, expected in ((0.0, [2, 0.8, 2.6]), (0.3, [2, 0.8, 2.6]), (0.5, [2, 2, 2])):
        vae.free_bits = free
        np.testing.assert_allclose(numpy(vae.example_losses(outputs)), expected, rtol=1e-5)


@pytest.mark.once
def test_weights_multiply_losses_as_in_keras():
    vae = made(posterior="point")
    weight = RNG.uniform(size=16).astype("float32")
    losses = numpy(vae(BITS)["reconstruction"])
    weighted = {"loss": np.mean(weight * losses)}
    weighted["reconstruction"] = np.average(losses, weights=weight)
    given = {"sample_weight": weight, "batch_size": 16, "verbose": 0}
    scores = vae.evaluate(BITS, **given, return_dict=True)
    history = vae.fit(BITS, **given).history
    for key, expected in weighted.items():
        assert scores[key] == pytest.approx(expected, rel=1e-5)
        assert history[key][0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.slow), "flows"])
def test_save_and_load(eagerly, kind, tmp_path):
    prior = ibnn.FlowDensity([flows.AffineCoupling(hidden=4)], base=2)
    options = {"layers": [flows.Planar()], "prior": prior, "beta": 0.5, "free_bits": 0.1}
    vae = made((2, 2), likelihood="gaussian", **(options if kind == "flows" else {}))
    vae.fit(GREY, verbose=0, validation_data=GREY)
    vae.beta.assign(0.7)
    vae.save(tmp_path / "vae.keras")
    loaded = keras.models.load_model(tmp_path / "vae.keras")
    assert loaded.get_config().keys() == vae.get_config().keys()
    for one, other in zip(vae.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(numpy(one), numpy(other))
    for name, argument in (("encode", GREY), ("sample", 5)):
        found = [getattr(each, name)(argument, seed=3) for each in (vae, loaded)]
        np.testing.assert_allclose(*found, rtol=1e-5)
    scores = [each.evaluate(GREY, verbose=0) for each in (vae, loaded)]  # the same noise, too
    np.testing.assert_allclose(*scores, rtol=1e-5)


def test_seeds_repeat_and_differ(eagerly):
    first, again = (made(seed=0).fit(BITS, verbose=0).history for _ in range(2))
    assert first == again
    vae = made()
    assert np.abs(numpy(vae(BITS)["reconstruction"] - vae(BITS)["reconstruction"])).max() > 0.01
    for draw in (lambda seed: vae.encode(BITS, seed), lambda seed: vae.sample(5, seed)):
        np.testing.assert_array_equal(draw(1), draw(1))
        assert np.abs(draw(1) - draw(2)).max() > 0.01


@pytest.mark.once
def test_draws_have_the_mean_and_deviation_of_the_posterior():
    vae = made()
    x = np.repeat(BITS[:1], 4000, 0)
    loc, raw = np.split(numpy(vae.head(vae.encoder(BITS[:1])))[0], 2)
    z, scale = vae.encode(x, seed=0), np.logaddexp(0, raw)
    np.testing.assert_allclose(vae.encode(BITS[:1])[0], loc, rtol=1e-5)
    assert np.abs((z.mean(0) - loc) / scale).max() < 4 / 4000**0.5
    np.testing.assert_allclose(z.std(0), scale, rtol=0.05)


@pytest.mark.once
def test_interpolation_leads_from_one_reconstruction_to_the_other():
    vae = made((2, 2))
    found = vae.interpolate(GREY[:3], GREY[3:6], steps=5)
    assert found.shape == (3, 5, 2, 2)
    ends = vae.reconstruct(GREY[:6])
    np.testing.assert_allclose(found[:, 0], ends[:3], rtol=1e-5)
    np.testing.assert_allclose(found[:, -1], ends[3:], rtol=1e-5)
    middle = vae.decode((vae.encode(GREY[:3]) + vae.encode(GREY[3:6])) / 2)
    np.testing.assert_allclose(found[:, 2], middle, rtol=1e-5)


def test_mixed_precision_leaves_posterior_and_likelihood_in_float32(policy):
    policy("mixed_bfloat16")
    vae = made((2, 2), layers=[flows.Planar()], likelihood="discretised_logistic", prior=2)
    assert vae.encoder.compute_dtype == "bfloat16"
    terms = vae(GREY)
    found = [*map(numpy, terms.values()), vae.encode(GREY), vae.sample(2)]
    assert np.isfinite(vae.negative_log_likelihood(GREY[:2], samples=2)).all()
    assert {x.dtype for x in found} == {np.dtype("float32")}
    assert {v.dtype for v in vae.head.weights + vae.prior.weights} == {"float32"}


@pytest.mark.slow
def test_compiled_equals_eager():
    vae = made((2, 2), posterior="point")
    vae.compile(jit_compile=True)
    found = vae.predict(GREY, verbose=0)["reconstruction"]
    np.testing.assert_allclose(found, numpy(vae(GREY)["reconstruction"]), rtol=1e-5)


@pytest.mark.slow
def test_a_step_of_flows_under_jit():
    vae = made((2, 2), layers=[flows.Planar(), flows.Planar(), flows.AffineCoupling()], prior=2)
    vae.compile("adam", jit_compile=True)
    assert np.isfinite(vae.fit(GREY, verbose=0).history["loss"]).all()


def with_nan():
    return np.where(np.arange(16)[:, None] == 3, np.nan, BITS)


def remade(encoder=None, decoder=None, latent_size=2, **options):
    one, other = coders()
    return ibnn.VAE(encoder or one, decoder or other, latent_size, **options)


def images(*more):
    return keras.Sequential([keras.Input((4, 4, 1)), layers.Conv2D(2, 3), *more])


@pytest.mark.once
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: made().fit(with_nan()), "values of `x` hold NaN .* the first is number 3"),
        (lambda: made().fit(255 * BITS), r"in \[0, 1\]; got values from 0 to 255"),
        (lambda: made().evaluate(-BITS), r"in \[0, 1\]; got values from -1 to -?0"),
        (lambda: made().fit(BITS[:, :3]), r"examples of shape \(4,\); got \(16, 3\)"),
        (lambda: made().encode(BITS[0]), r"examples of shape \(4,\); got \(4,\)"),
        (lambda: made().fit(BITS[:0]), r"got \(0, 4\)"),
        (lambda: made().fit(BITS, BITS), "no targets"),
        (lambda: made().interpolate(BITS, BITS, 1), "`steps`"),
        (lambda: made().negative_log_likelihood(BITS, samples=0), "`samples`"),
        (
            lambda: remade(latent_size=3),
            r"`decoder` \(None, 3\) into x; .* \(None, 2\), \(None, 4\)",
        ),
        (lambda: remade(latent_size=0), "`latent_size`"),
        (lambda: remade(decoder=coders((5,))[1]), r"shapes are \[\(None, 4\), .* \(None, 5\)\]"),
        (lambda: remade(images()), r"`encoder` must turn x into vectors .* \(None, 2, 2, 2\)"),
        (lambda: remade(layers.Dense(2)), r"`encoder` must turn x into vectors .* \[None, None, "),
        (lambda: remade(likelihood="poisson"), "`likelihood` must be one of 'bernoulli'"),
        (lambda: remade(posterior="flow"), "`posterior` must be one of"),
        (lambda: remade(prior="normal"), "`prior`"),
        (lambda: remade(prior=ibnn.FlowDensity([], condition=2)), "without a condition"),
        (lambda: remade(prior=ibnn.FlowDensity([ibnn.flows.Dequantize(4)])), "or a surjection"),
        (lambda: remade(beta=-1), "`beta`"),
        (lambda: remade(free_bits=-1), "`free_bits`"),
        (lambda: remade(flows=["planar"]), "`flows` must be a list of flows"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
