"""References by HMC, against closed forms and direct passes through the networks."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from scipy.stats import norm

import tfp_ibnn as ibnn
from tests.diagnostics import problems
from tests.diagnostics.problems import NOISE, PRIOR, WEIGHTS, X, Y, Z
from tests.flows.tools import numpy
from tests.precision import after_products, at_least
from tfp_ibnn.diagnostics.targets import target_of

QUICK = {"sampler": "hmc", "verbose": 0}
KNOWN = {"noise_scale": NOISE, "prior_scale": PRIOR}


def assert_gaussian(reference, known):
    """Mean and covariance are the known ones, up to the error of so many effective draws."""
    rows = reference.samples.reshape(-1, reference.target.size)
    error = np.sqrt(np.diag(known.covariance) / reference.seen["effective draws, fewest"])
    assert np.all(np.abs(rows.mean(axis=0) - known.mean) < 4 * error)
    np.testing.assert_allclose(rows.std(axis=0), np.sqrt(np.diag(known.covariance)), rtol=0.1)
    root = np.linalg.cholesky(known.precision)
    np.testing.assert_allclose(root.T @ np.cov(rows.T) @ root, np.eye(len(root)), atol=0.25)


@pytest.fixture(scope="module")
def linear():
    model = problems.network()
    return ibnn.diagnostics.hmc(model, (X, Y), over="weights", **KNOWN, **QUICK)


def test_the_weights_of_a_linear_model(linear, full_precision):
    assert linear.samples.shape == (4, 500, 4)
    assert linear.diagnostics()["R-hat, largest"] < 1.02
    assert linear.diagnostics()["effective draws, fewest"] > 500
    assert linear.diagnostics()["divergences"] == 0
    assert_gaussian(linear, WEIGHTS)
    w = linear.samples[0, :20]
    np.testing.assert_allclose(linear.target.values(w), WEIGHTS.log_joint(w), atol=1e-3)
    slopes = (WEIGHTS.mean - w) @ WEIGHTS.precision
    np.testing.assert_allclose(linear.target.gradients(w), slopes, rtol=1e-3, atol=0.02)
    assert str(linear).startswith("4 chains of 500 draws, 4 numbers\nacceptance")


def test_predictions_of_the_draws(linear, full_precision):
    found = linear.predict(X, draws=50, batch_size=7)
    rows = np.swapaxes(linear.samples, 0, 1).reshape(-1, 4)
    some = rows[np.linspace(0, 1999, 50).round().astype(int)]
    np.testing.assert_allclose(found[..., 0], some[:, :3] @ X.T + some[:, 3:], atol=1e-4)
    mc = ibnn.MonteCarlo(linear.posterior(draws=50), samples=50)
    np.testing.assert_allclose(numpy(mc(X)["mean"]), found.mean(axis=0), atol=1e-4)


def test_bridge_sampling_of_these_draws(linear):
    found = ibnn.diagnostics.bridge(linear)
    assert 1e-4 < found.error < 0.01
    assert abs(found.value - WEIGHTS.evidence) < max(0.005, 4 * found.error)


def test_z_of_a_linear_network(full_precision):
    model = problems.stochastic()
    reference = ibnn.diagnostics.hmc(model, (X, Y), noise_scale=NOISE, **QUICK)
    assert_gaussian(reference, Z)
    w = reference.samples[0, :20]
    np.testing.assert_allclose(reference.target.values(w), Z.log_joint(w), atol=1e-3)
    found = reference.predict(X, draws=2000)[..., 0]
    expected = (X * problems.KERNEL) @ Z.mean + problems.BIAS
    np.testing.assert_allclose(found.mean(axis=0), expected, atol=0.05)
    with pytest.raises(ValueError, match=r"use reference.predict"):
        reference.posterior()


@pytest.mark.filterwarnings("ignore:The chains do not agree", "ignore:.* steps diverged")
def test_all_weights_of_a_network_with_a_hidden_layer():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, "tanh"), layers.Dense(1)])
    model.compile("sgd", "mse")
    options = {"over": "weights", "chains": 2, "draws": 10, "warmup": 10, "start": "prior"}
    found = ibnn.diagnostics.hmc(model, (X, Y), **options, **KNOWN, **QUICK)
    assert found.samples.shape == (2, 10, 11)
    w = found.samples[0]
    hidden = np.tanh(X @ w[:, :6].reshape(-1, 3, 2) + w[:, None, 6:8])
    outputs = (hidden @ w[:, 8:10, None])[..., 0] + w[:, 10:]
    joint = norm(outputs, NOISE).logpdf(Y).sum(axis=1) + norm(0, PRIOR).logpdf(w).sum(axis=1)
    np.testing.assert_allclose(found.target.values(w), joint, rtol=after_products(1e-4, 4))
    every = found.predict(X, draws=20)[..., 0]
    atol = after_products(1e-4, 4, np.abs(outputs).max())
    np.testing.assert_allclose(every[::2], outputs, atol=atol)
    mc = ibnn.MonteCarlo(found.posterior(draws=20), samples=20)
    np.testing.assert_allclose(numpy(mc(X)["mean"])[:, 0], every.mean(axis=0), atol=atol)


def images(policy="float32"):
    """A classifier whose first and last layer have z, the last one with a softmax."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((5, 5, 2)),
            layers.Conv2D(3, 3, activation="relu", dtype=policy),
            layers.BatchNormalization(dtype=policy),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model = ibnn.to_stochastic(model, ibnn.NormalPlanar1d(sides="both"), train_size=12)
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_z_of_all_layers_in_order(policy):
    model, rng = images(policy), np.random.default_rng(0)
    x, y = rng.normal(size=(12, 5, 5, 2)).astype("float32"), np.arange(12) % 3
    target = target_of(model, (x, y))
    first, last = ibnn.stochastic_layers(model)
    assert target.size == 5 + 30
    z = (1 + 0.2 * rng.normal(size=(3, 35))).astype("float32")
    outputs = []
    for row in z:
        draws = {first: row[None, :5], last: row[None, 5:]}
        draws = {layer: ops.convert_to_tensor(part) for layer, part in draws.items()}
        with ibnn.noise.scope(groups=1, losses=False, draws=draws):
            outputs.append(numpy(model(x, training=False)))
    near = {"atol": 1e-5 if policy == "float32" else 0.02}
    np.testing.assert_allclose(target.predict(z, x, batch_size=5), outputs, **near)
    likelihood = np.log(np.array(outputs)[:, np.arange(12), y]).sum(axis=1)
    scale = first.posterior.prior_scale
    prior = -np.sum(((z - 1) / scale) ** 2, axis=1) / 2
    prior -= 35 * np.log(scale * np.sqrt(2 * np.pi))
    near = {"rtol": 1e-5 if policy == "float32" else 2e-2}
    np.testing.assert_allclose(target.values(z), likelihood + prior, **near)
    assert last.layer.activation is keras.activations.softmax  # which was left out, in between
    if policy == "float32":
        step = np.zeros(35)
        step[[2, 20]] = 0.01
        slope = (target.values(z + step) - target.values(z - step)) / 0.02
        near = 0.1 if at_least(0) else 0.02  # differences of values in TF32
        np.testing.assert_allclose(target.gradients(z)[:, [2, 20]].sum(axis=1), slope, atol=near)


@pytest.mark.once
def test_a_posterior_has_its_own_prior():
    gaussian = ibnn.GaussianVI(problems.network(), **KNOWN)
    target, w = target_of(gaussian, (X, Y)), np.ones((2, 4))
    np.testing.assert_allclose(target.values(w), WEIGHTS.log_joint(w), rtol=1e-5)
    wider = target_of(gaussian, (X, Y), prior_scale=6.0)
    assert wider.prior_scale == 6.0


def test_chains_in_several_modes_do_not_agree():
    target = problems.density(problems.two_modes)
    with pytest.warns(UserWarning, match="The chains do not agree"):
        found = ibnn.diagnostics.hmc(target, start="prior", chains=8, draws=50, **QUICK)
    assert found.diagnostics()["R-hat, largest"] > 3
    side = np.sign(found.samples.mean(axis=(1, 2)))
    assert {-1, 1} == set(side)


@pytest.mark.once
@pytest.mark.filterwarnings("ignore:The chains do not agree")
def test_divergences_of_a_funnel_and_progress_are_shown(capsys):
    target, options = problems.density(problems.funnel), {"draws": 100, "warmup": 100}
    with pytest.warns(UserWarning, match="steps diverged"):
        found = ibnn.diagnostics.hmc(target, sampler="hmc", verbose=2, **options)
    assert found.seen["divergences"] > 0
    text = capsys.readouterr().out
    assert "20/20" in text
    assert "4 chains of 100 draws, 2 numbers\nacceptance" in text
    assert "divergences" in found.report()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* steps diverged")
def test_a_banana():
    found = ibnn.diagnostics.hmc(problems.density(problems.banana), draws=1000, verbose=0)
    x, y = found.samples.reshape(-1, 2).T
    assert abs(x.mean()) < 0.2
    assert abs(x.var() - 1) < 0.25
    assert abs(y.mean() - 1) < 0.25
    assert abs(y.var() - 3) < 1.2
    evidence = ibnn.diagnostics.bridge(found)
    assert abs(evidence.value - np.log(2 * np.pi)) < 4 * evidence.error < 0.4


@pytest.mark.slow
def test_nuts_over_the_last_layer():
    found = ibnn.diagnostics.hmc(problems.network(), (X, Y), verbose=0, **KNOWN)
    assert found.seen["R-hat, largest"] < 1.02
    assert_gaussian(found, WEIGHTS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The chains do not agree")
def test_a_seed_repeats():
    def draws(seed):
        target = problems.density(problems.banana)
        return ibnn.diagnostics.hmc(target, draws=8, warmup=8, seed=seed, **QUICK).samples

    np.testing.assert_array_equal(draws(1), draws(1))
    assert np.all(draws(1) != draws(2))


def nowhere(w):
    return ops.sum(ops.log(w), axis=-1)  # infinite at 0, NaN below


@pytest.mark.once
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampler": "gibbs"}, "`sampler` must be one of"),
        ({"start": "zero"}, "`start` must be one of"),
        ({"chains": 1}, "`chains` must be a whole number of at least 2"),
        ({"draws": 0}, "`draws`"),
        ({"warmup": 0}, "`warmup`"),
        ({"seed": -1}, "`seed`"),
        ({"time_limit": 0}, "`time_limit` must be above 0"),
        ({"time_limit": 1e-6}, "4 chains over 4 numbers would take about"),
        ({"over": "biases"}, "`over` must be one of"),
        ({"over": "z"}, "has no stochastic layer"),
        ({"prior_scale": 0.0}, "`prior_scale` must be above 0"),
        ({"noise_scale": -1.0}, "`noise_scale`"),
        ({"data": (X, Y[:3])}, "as many examples"),
        ({"data": None}, "Give arrays x and y"),
        ({"model": 3}, "`model` must be a Keras model"),
        ({"model": problems.stochastic, "over": "weights"}, "has stochastic layers"),
        ({"model": problems.stochastic, "prior_scale": 1.0}, "`prior_scale` is for weights"),
        ({"model": lambda: problems.density(nowhere)}, "NaN or infinite at its start"),
    ],
)
def test_refusals(options, words):
    options = {"model": problems.network, "data": (X, Y), "verbose": 0, **options}
    model = options.pop("model")
    with pytest.raises(ValueError, match=words):
        ibnn.diagnostics.hmc(model() if callable(model) else model, **options)


@pytest.mark.once
@pytest.mark.parametrize(
    ("posterior", "options"),
    [(ibnn.MeanField(), {}), (ibnn.NormalAffine(), {"noise": "position"})],
)
def test_posteriors_that_are_not_over_one_z_are_refused(posterior, options):
    model = ibnn.to_stochastic(problems.network(), posterior, train_size=30, **options)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"must be over z, .* that of 'dense.*' is"):
        ibnn.diagnostics.hmc(model, (X, Y), verbose=0)
