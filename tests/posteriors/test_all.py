"""Posteriors: z, KL and entropy against TFP's densities, quadrature and closed forms."""

import inspect

import keras
import numpy as np
import pytest
from keras import ops

import tfp_ibnn as ibnn
from tests import autodiff
from tests.flows.tools import close, numpy, slope_by_differences
from tests.registry import (
    FLOW_NAMES,
    FLOWS,
    LINEAR,
    POSTERIORS,
    RECIPES,
    VARIANTS,
    make_posterior,
    min_channels,
    min_posterior_channels,
    over,
    tolerance,
)
from tfp_ibnn import noise
from tfp_ibnn._core.backend import tfd
from tfp_ibnn.posteriors import Template

NAN = float("nan")

ON_JAX = keras.backend.backend() == "jax"

# What differs between the settings of a flow is shown by the tests of flows.
SETTINGS = {f"over-{name}" for name in VARIANTS}
every_posterior = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SETTINGS else []) for name in POSTERIORS],
)
# The recipes hold every kind of flow: enough for what is slow.
SELECTED = [name for name in POSTERIORS if not name.startswith("over-")]
selected_posterior = pytest.mark.parametrize("name", SELECTED)

# KL and entropy of these are one number, not one for each draw.
CORRELATED = {"NormalFull", "NormalLowRank"}
CLOSED_FORM = {"NormalAffine", "MixturePosterior-bound", "MixturePosterior-averaged", *CORRELATED}
# Given the component, their KL is not that of the marginal density, but above it.
GIVEN_THE_COMPONENT = {"mixture-base-shared", "MixturePosterior-bound"}
ESTIMATED = [
    name for name in POSTERIORS if name not in CLOSED_FORM | GIVEN_THE_COMPONENT | SETTINGS
]
BOUNDS = sorted(GIVEN_THE_COMPONENT)


def fresh(x):
    """A tensor that TFP's cache does not know."""
    return ops.convert_to_tensor(np.array(ops.convert_to_numpy(x)))


def log_density(distribution, z):
    return numpy(distribution.log_prob(fresh(z)))


def draw(posterior, count):
    """Many draws: z and the KL of each, or of all."""
    return numpy(*posterior.sample_and_kl((count,)))


def pairs(posterior, count=32, seed=3):
    """Mirrored noise under every component: z has the exact mean of a linear posterior."""
    half = np.random.default_rng(seed).normal(size=(count, posterior.channels))
    noise = np.concatenate([half, -half]).astype(posterior.dtype)
    if posterior.components == 1:
        return noise, None
    every = np.arange(posterior.components, dtype="int32")
    return noise[:, None, :], every


class Grid:
    """Quadrature with q's own density, in one or two dimensions."""

    def __init__(self, posterior, points=4001):
        dimensions = posterior.channels
        points = points if dimensions == 1 else 401
        sample = draw(posterior, 20_000)[0]
        middle, low, high = np.median(sample, axis=0), sample.min(axis=0), sample.max(axis=0)
        axes = [
            np.linspace(m + 1.6 * (a - m), m + 1.6 * (b - m), points)
            for m, a, b in zip(middle, low, high, strict=True)
        ]
        self.cell = np.prod([axis[1] - axis[0] for axis in axes])
        self.z = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, dimensions)
        self.log_q = log_density(posterior.distribution(), self.z)
        self.q = np.exp(self.log_q)

    def integral(self, value=1.0):
        return np.sum(self.q * value) * self.cell

    def kl(self, posterior):
        return self.integral(self.log_q - log_density(posterior.prior(), self.z))


def quadrature_cases(names):
    """Each in as few channels as it takes: quadrature in two dimensions takes long."""
    return pytest.mark.parametrize(
        ("name", "channels"), [(name, min_posterior_channels(name)) for name in names]
    )


def test_registry_holds_every_recipe():
    recipes = {name for name in ibnn.__all__ if name.startswith("Normal")}
    assert recipes | {"MixturePosterior"} == {name.split("-")[0] for name in RECIPES}


# ------------------------------------------------------------------------------- z, KL and density


# Enough to show it on JAX: a flow, one with a network, a mixture.
ON_BOTH = ("NormalPlanar1d", "NormalIAF", "mixture-base")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ON_BOTH else pytest.mark.once) for name in ESTIMATED],
)
def test_kl_and_entropy_of_each_draw_are_those_of_the_tfp_density(float64, name):
    posterior = make_posterior(name, channels=3, seed=1)
    z, kl = numpy(*posterior.sample_and_kl((2, 64)))
    assert z.shape == (2, 64, 3)
    assert kl.shape == (2, 64)
    expected = log_density(posterior.distribution(), z) - log_density(posterior.prior(), z)
    allowed = tolerance(name, 1e-7)
    close(kl, expected, allowed)
    assert np.ptp(kl) > 1e-3
    draws = posterior.summary()
    close(numpy(draws.entropy), -log_density(posterior.distribution(), draws.z), allowed)
    close(float(posterior.entropy()), numpy(draws.entropy).mean(), 1e-10)


@pytest.mark.once
@selected_posterior
def test_one_draw_has_no_batch_axis(float64, name):
    z, kl = make_posterior(name, channels=3, seed=1).sample_and_kl()
    assert z.shape == (3,)
    assert kl.shape == ()


@pytest.mark.once
@selected_posterior
def test_draws_have_the_moments_of_the_tfp_distribution(float64, name):
    posterior = make_posterior(name, channels=2, seed=1, size=0.7)
    count = 20_000
    z = draw(posterior, count)[0]
    seed = ops.convert_to_tensor([0, 5], "uint32" if ON_JAX else "int32")
    other = numpy(posterior.distribution().sample(count, seed=seed))
    for function in (lambda x: x, np.square, np.sin, lambda x: np.prod(x, axis=-1)):
        ours, theirs = function(z), function(other)
        error = np.sqrt((ours.var(axis=0) + theirs.var(axis=0)) / count)
        assert np.all(np.abs(ours.mean(axis=0) - theirs.mean(axis=0)) < 5 * error)


@pytest.mark.parametrize(
    "name",
    ["NormalAffine", "NormalPlanar1d", "NormalGlowStep", "mixture-base", "mixture-base-planar"],
)
def test_the_distribution_of_flows_has_their_mean(float64, name):
    posterior = make_posterior(name, channels=4, seed=1, size=0.7)
    for q in (posterior.distribution(), posterior.distribution().copy()):
        assert isinstance(q, ibnn.tfd.TransformedDistribution)
        close(numpy(q.mean()), numpy(posterior.mean()), 1e-6)


def test_gaussian_has_the_closed_form(float64):
    posterior = make_posterior("NormalAffine", channels=3, seed=1)
    m, raw = numpy(posterior.affine.shift.value), numpy(posterior.affine.raw_scale.value)
    s, p = 1e-6 + np.log1p(np.exp(raw)), 0.5
    z, kl = draw(posterior, 200_000)
    expected = np.sum(np.log(p / s) + (s**2 + (m - 1) ** 2) / (2 * p**2) - 0.5)
    close(kl, expected, 1e-10)
    close(float(posterior.entropy()), np.sum(np.log(s) + 0.5 * np.log(2 * np.pi * np.e)), 1e-10)
    each = log_density(posterior.distribution(), z) - log_density(posterior.prior(), z)
    assert abs(each.mean() - kl) < 5 * each.std() / len(z) ** 0.5
    assert np.all(np.abs(z.mean(axis=0) - m) < 5 * s / len(z) ** 0.5)
    np.testing.assert_allclose(z.std(axis=0), s, rtol=0.02)


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


@pytest.mark.once
@quadrature_cases([name for name in ESTIMATED if name in SELECTED])
def test_expected_kl_and_entropy_agree_with_quadrature(float64, name, channels):
    posterior = make_posterior(name, channels, seed=4, size=0.5)
    grid = Grid(posterior)
    close(grid.integral(), 1.0, 2e-3)
    kl = draw(posterior, 20_000)[1]
    assert abs(kl.mean() - grid.kl(posterior)) < 5 * kl.std() / len(kl) ** 0.5 + 2e-3
    entropies = numpy(posterior.summary().entropy)
    error = 5 * entropies.std() / (len(entropies) / 2) ** 0.5
    assert abs(float(posterior.entropy()) - grid.integral(-grid.log_q)) < error
    assert kl.std() > 1e-3


@pytest.mark.parametrize("channels", [1, 2])
def test_gaussian_agrees_with_quadrature(float64, channels):
    posterior = make_posterior("NormalAffine", channels, seed=4)
    grid = Grid(posterior)
    close(grid.integral(), 1.0, 1e-6)
    close(float(posterior.sample_and_kl()[1]), grid.kl(posterior), 1e-5)
    close(float(posterior.entropy()), grid.integral(-grid.log_q), 1e-5)


@pytest.mark.once
@quadrature_cases(BOUNDS)
def test_mixture_kl_is_a_bound_loose_by_at_most_log_k(float64, name, channels):
    posterior = make_posterior(name, channels, seed=4, size=0.7)
    grid = Grid(posterior)
    close(grid.integral(), 1.0, 2e-3)
    kl = draw(posterior, 20_000)[1]
    error = 5 * kl.std() / kl.size**0.5 + 2e-3
    gap = kl.mean() - grid.kl(posterior)
    assert 1e-2 < gap < np.log(3) + error


@pytest.mark.once
@pytest.mark.parametrize("name", BOUNDS)
def test_bound_is_tight_for_equal_components_and_log_k_off_for_distant_ones(float64, name):
    posterior = make_posterior(name, channels=1, prior_scale=5.0, initial_scale=0.5)
    loc = posterior.loc if name.startswith("Mixture") else posterior.base_loc
    for apart, expected in ((0.0, 0.0), (4.0, np.log(3))):
        loc.assign(apart * np.arange(3.0)[:, None])
        if name.startswith("Mixture"):
            posterior.raw_scale.assign(np.full((3, 1), -2.0))
        else:
            posterior.base_raw_scale.assign(np.full((3, 1), -2.0))
        kl = draw(posterior, 100_000)[1]
        close(kl.mean() - Grid(posterior, 20_001).kl(posterior), expected, 0.02)


@pytest.mark.parametrize("kl", ["bound", "averaged"])
def test_mixture_kl_against_its_formula(float64, kl):
    posterior = make_posterior(f"MixturePosterior-{kl}", channels=4, seed=1)
    m = numpy(posterior.loc.value)
    s = 1e-6 + np.log1p(np.exp(numpy(posterior.raw_scale.value)))
    entropy = np.mean(np.sum(np.log(s) + 0.5 * np.log(2 * np.pi * np.e), axis=1))
    close(float(posterior.entropy()), entropy, 1e-10)
    if kl == "averaged":  # the average of one draw from each component
        m, s = m.mean(axis=0, keepdims=True), np.sqrt(np.sum(s**2, axis=0, keepdims=True)) / 3
    each = np.sum(np.log(0.5 / s) + (s**2 + (m - 1) ** 2) / (2 * 0.5**2) - 0.5, axis=1)
    close(float(posterior.sample_and_kl((2,))[1]), each.mean(), 1e-10)


def test_shared_mixture_base_has_the_kl_given_the_component(float64):
    posterior = make_posterior("mixture-base-shared", channels=3, seed=1)
    noise = np.random.default_rng(2).normal(size=(6, 3))
    index = np.arange(6, dtype="int32") % 3
    found = posterior.transform(ops.convert_to_tensor(noise), index)
    loc = numpy(posterior.base_loc.value)[index]
    scale = 1e-6 + np.log1p(np.exp(numpy(posterior.base_raw_scale.value)))[index]
    log_q = np.sum(-0.5 * noise**2 - 0.5 * np.log(2 * np.pi) - np.log(scale), axis=-1)
    z = ops.convert_to_tensor(loc + scale * noise)
    for flow in (*posterior.flows, posterior.affine):
        z, log_det = flow.bijector().forward(z), flow.bijector().forward_log_det_jacobian(z, 1)
        log_q = log_q - numpy(log_det)
    close(numpy(found.z), numpy(z), 1e-10)
    close(numpy(found.entropy), -log_q, 1e-10)
    close(numpy(found.kl), log_q - log_density(posterior.prior(), z), 1e-10)


@pytest.mark.parametrize("order", ["last", "first"])
def test_affine_map_is_where_it_was_asked_for(float64, order):
    posterior = ibnn.FlowPosterior([ibnn.flows.Radial()], affine=order)
    posterior.build((3,))
    posterior.affine.shift.assign([3.0, -1.0, 0.5])
    radial = posterior.flows[0]
    radial.raw_beta.assign(1.5)
    noise = ops.convert_to_tensor(np.random.default_rng(2).normal(size=(4, 3)))
    first, then = (posterior.affine, radial) if order == "first" else (radial, posterior.affine)
    expected = then.bijector().forward(first.bijector().forward(noise))
    close(numpy(posterior.transform(noise).z), numpy(expected), 1e-12)


# ------------------------------------------------------------------------------------- the start


@pytest.mark.once
@pytest.mark.parametrize("name", FLOW_NAMES)
@pytest.mark.parametrize("channels", [7])
def test_kl_starts_at_zero_and_the_mean_at_prior_loc(name, channels):
    posterior = over(name)(prior_scale=0.3, prior_loc=1.5)
    posterior.build((None, channels))
    z, kl = draw(posterior, 2000)
    assert z.dtype == "float32"
    assert abs(kl.mean()) <= 1e-5 * channels
    np.testing.assert_allclose(numpy(posterior.mean()), 1.5, atol=1e-5)
    assert np.all(np.abs(z.mean(axis=0) - 1.5) < 5 * 0.3 / 2000**0.5)
    np.testing.assert_allclose(z.std(axis=0), 0.3, rtol=0.1)


@pytest.mark.once
@pytest.mark.parametrize("name", [n for n in RECIPES if n.startswith("Normal")])
def test_every_recipe_starts_at_kl_zero(name):
    arguments = {} if name in CLOSED_FORM else {"depth": 4}
    posterior = RECIPES[name](initial_scale=0.5, **arguments)
    posterior.build((None, 8))
    assert abs(draw(posterior, 2000)[1].mean()) <= 8e-5
    np.testing.assert_allclose(numpy(posterior.mean()), 1.0, atol=1e-5)


def test_batchnorm_starts_at_zero_up_to_its_sampling_error():
    posterior = over("batchnorm")()
    posterior.build((None, 4))
    noise = np.random.default_rng(0).normal(size=(4000, 4)).astype("float32")
    found = posterior.transform(ops.convert_to_tensor(noise), training=True)
    assert abs(numpy(found.kl).mean()) < 4 * 4 / 4000**0.5
    np.testing.assert_allclose(numpy(found.z).mean(axis=0), 1.0, atol=1e-4)


def test_initial_scale_is_that_of_z():
    posterior = ibnn.NormalPlanar1d(initial_scale=0.01, prior_scale=0.5)
    posterior.build((3,))
    z, kl = draw(posterior, 4000)
    np.testing.assert_allclose(z.std(axis=0), 0.01, rtol=0.1)
    expected = 3 * (np.log(0.5 / 0.01) + (0.01 / 0.5) ** 2 / 2 - 0.5)
    np.testing.assert_allclose(kl.mean(), expected, rtol=0.02)


@pytest.mark.once
@pytest.mark.parametrize("name", ["mixture-base", "mixture-base-planar"])
def test_mixture_base_starts_near_unit_variance(name):
    posterior = make_posterior(name, channels=500)
    z = draw(posterior, 300)[0]
    np.testing.assert_allclose(np.mean((z - 1) ** 2), 0.25, rtol=0.1)


def test_mixture_components_start_around_prior_loc():
    posterior = ibnn.MixturePosterior(
        8, mean_spread=0.75, initial_scale=0.05, scale_spread=0.02, prior_loc=2.0
    )
    posterior.build((None, 400))
    loc, scale = numpy(*posterior._loc_and_scale())
    np.testing.assert_allclose(loc.mean(axis=0), 2.0, atol=1e-5)
    np.testing.assert_allclose(loc.std(), 0.75 * (7 / 8) ** 0.5, rtol=0.05)
    np.testing.assert_allclose([scale.mean(), scale.std()], [0.05, 0.02], rtol=0.05)


# -------------------------------------------------------------------------------------- the mean


def _is_closed(posterior):
    """Whether the mean is a closed form: no flow, or linear ones only."""
    return all(isinstance(flow, LINEAR) for flow in getattr(posterior, "flows", ()))


@pytest.mark.once
@selected_posterior
def test_mean_of_an_untrained_posterior_is_exact(float64, name):
    posterior = make_posterior(name, channels=3)
    if "mixture-base" in name:
        posterior.base_loc.assign(np.zeros((3, 3)))
    close(numpy(posterior.mean()), np.ones(3), 1e-12)


@pytest.mark.parametrize(
    "name", [n for n in POSTERIORS if _is_closed(POSTERIORS[n]()) and n != "mixture-base-shared"]
)
def test_mean_of_linear_flows_is_exact(float64, name):
    posterior = make_posterior(name, channels=3, seed=1)
    z = (
        numpy(posterior.transform(*map(ops.convert_to_tensor, pairs(posterior))).z)
        if (posterior.components > 1)
        else numpy(posterior.transform(ops.convert_to_tensor(pairs(posterior)[0])).z)
    )
    close(numpy(posterior.mean()), z.reshape(-1, 3).mean(axis=0), 1e-10)


@pytest.mark.once
@selected_posterior
def test_mean_against_a_large_sample(float64, name):
    posterior = make_posterior(name, channels=3, seed=1)
    z = draw(posterior, 20_000)[0]
    pairs_in_mean = 1e9 if _is_closed(posterior) else 64
    error = z.std(axis=0) * (1 / len(z) + 1 / pairs_in_mean) ** 0.5
    assert np.all(np.abs(numpy(posterior.mean()) - z.mean(axis=0)) < 4 * error)
    assert np.any(np.abs(numpy(posterior.mean()) - 1) > 0.1)


@pytest.mark.once
@pytest.mark.parametrize("name", ["NormalPlanar1d", "mixture-base-planar"])
def test_mean_is_a_function_of_the_weights(float64, name):
    posterior = make_posterior(name, channels=3, seed=1)
    before = numpy(posterior.mean())
    posterior.sample_and_kl((3,))
    close(numpy(posterior.mean()), before, 0)


# --------------------------------------------------------------------------------- prior and loss


@pytest.mark.once
@pytest.mark.parametrize(
    "name", ["NormalAffine", "MixturePosterior-bound", "affine-first", "learned-prior-scale"]
)
def test_prior(float64, name):
    posterior = make_posterior(name, channels=3, prior_loc=0.7, prior_scale=0.2)
    z = np.random.default_rng(0).normal(size=(4, 3))
    expected = np.sum(
        -0.5 * ((z - 0.7) / 0.2) ** 2 - np.log(0.2) - 0.5 * np.log(2 * np.pi), axis=-1
    )
    # Keras rounds the constant from which a learned scale starts to float32.
    close(log_density(posterior.prior(), z), expected, 1e-6)


@selected_posterior
def test_loss_is_beta_kl_minus_gamma_entropy(float64, name):
    posterior = make_posterior(name, channels=3, seed=1, beta=0.3, gamma=0.7)
    found = posterior.summary()
    expected = 0.3 * numpy(found.kl) - 0.7 * numpy(found.entropy)
    close(numpy(posterior.loss(found)), expected, 1e-12)
    posterior.beta.assign(2.0)
    close(numpy(posterior.loss(found)), expected + 1.7 * numpy(found.kl), 1e-12)
    assert not posterior.beta.trainable


def test_learned_prior_scale_gets_its_gradient(float64):
    posterior = make_posterior("learned-prior-scale", channels=3, seed=1)
    raw = float(numpy(posterior.raw_prior_scale.value))
    z = np.random.default_rng(0).normal(size=(2, 3))
    scale = 1e-6 + np.log1p(np.exp(raw))
    expected = np.sum(
        -0.5 * ((z - 1) / scale) ** 2 - np.log(scale) - 0.5 * np.log(2 * np.pi), axis=-1
    )
    close(log_density(posterior.prior(), z), expected, 1e-9)
    assert posterior.raw_prior_scale.trainable

    def kl():
        return ops.sum(posterior.summary().kl) / 128

    (found,) = autodiff.weight_gradients(kl, [posterior.raw_prior_scale])
    close(found, slope_by_differences(kl, posterior.raw_prior_scale), 1e-5)
    assert abs(found) > 1e-3


@selected_posterior
def test_every_weight_gets_a_gradient(float64, name):
    posterior = make_posterior(name, channels=3, seed=1)
    variables = posterior.trainable_variables
    direction = np.random.default_rng(0).normal(size=(3,))

    def objective():
        found = posterior.summary()
        return ops.sum(posterior.loss(found)) + ops.sum(ops.square(found.z) * direction)

    for variable, found in zip(
        variables, autodiff.weight_gradients(objective, variables), strict=True
    ):
        assert np.all(np.isfinite(found)), variable.path
        assert np.any(np.abs(found) > 1e-8), variable.path


# ----------------------------------------------------------------------- copies, configs and seeds


@pytest.mark.once
@selected_posterior
def test_copy_is_unbuilt_and_independent(name):
    posterior = make_posterior(name, channels=3, seed=1)
    copy = posterior.copy(prior_scale=0.25)
    assert not copy.built
    assert copy.prior_scale == 0.25
    expected = {**posterior.get_config(), "prior_scale": 0.25}
    configs = [keras.saving.serialize_keras_object(x) for x in (copy.get_config(), expected)]
    assert configs[0] == configs[1]
    copy.build((None, 2))
    mine, theirs = posterior.weights, copy.weights
    assert len(mine) == len(theirs)
    assert not {id(w) for w in mine} & {id(w) for w in theirs}
    before = [numpy(w.value) for w in mine]
    for weight in theirs:
        weight.assign(numpy(weight.value) + 1)
    for weight, old in zip(mine, before, strict=True):
        np.testing.assert_array_equal(numpy(weight.value), old)


@pytest.mark.once
@selected_posterior
def test_template_gives_each_layer_its_own_weights(name):
    template = POSTERIORS[name]()
    layers = [ibnn.StochasticDense(2, posterior=template, train_size=10) for _ in range(2)]
    for layer, channels in zip(layers, (3, 5), strict=True):
        layer.build((None, channels))
    assert not template.built
    first, second = ({id(w) for w in layer.posterior.weights} for layer in layers)
    assert first
    assert not first & second
    assert [layer.posterior.channels for layer in layers] == [3, 5]


@pytest.mark.once
@selected_posterior
def test_config_round_trip(float64, name):
    posterior = make_posterior(name, 3, 1, prior_loc=0.5, beta=0.5, gamma=0.25)
    serialized = keras.saving.serialize_keras_object(posterior)
    restored = keras.saving.deserialize_keras_object(serialized)
    assert type(restored) is type(posterior)
    assert not restored.built
    assert keras.saving.serialize_keras_object(restored) == serialized
    restored.build((None, 3))
    assert [w.name for w in restored.weights] == [w.name for w in posterior.weights]
    restored.set_weights(posterior.get_weights())
    z = np.random.default_rng(0).normal(size=(4, 3))
    close(log_density(restored.distribution(), z), log_density(posterior.distribution(), z), 1e-12)


@pytest.mark.parametrize("name", ["NormalAffine", "NormalIAF", "mixture-base-planar"])
def test_seeds(name):
    def two_draws(seed):
        keras.utils.set_random_seed(1)
        posterior = POSTERIORS[name](seed=seed)
        posterior.build((None, 3))
        return draw(posterior, 4)[0], draw(posterior, 4)[0]

    (first, second), (again, _), (other, _) = two_draws(7), two_draws(7), two_draws(8)
    np.testing.assert_array_equal(first, again)
    assert np.all(first != second)
    assert np.all(first != other)


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", [n for n in FLOWS if min_channels(n) > 1])
def test_a_single_channel_is_told_which_recipe_can_serve(name):
    with pytest.raises(ValueError, match="at least 2 channels.*NormalPlanar1d"):
        over(name)().build((None, 1))


@pytest.mark.once
@pytest.mark.parametrize(
    ("make", "argument", "value"),
    [
        *[
            (make, argument, value)
            for make in (
                ibnn.NormalAffine,
                ibnn.NormalFull,
                ibnn.NormalIAF,
                ibnn.MixturePosterior,
            )
            for argument in ("prior_scale", "initial_scale")
            for value in (-0.5, 0.0, NAN, "a")
        ],
        (ibnn.NormalAffine, "prior_loc", NAN),
        (ibnn.NormalAffine, "beta", -1.0),
        (ibnn.NormalAffine, "gamma", NAN),
        (ibnn.NormalAffine, "affine", "middle"),
        (ibnn.NormalAffine, "components", 0),
        (ibnn.NormalAffine, "components", 1.5),
        (ibnn.MixturePosterior, "components", 0),
        (ibnn.MixturePosterior, "kl", "exact"),
        (ibnn.MixturePosterior, "mean_spread", -1.0),
        (ibnn.MixturePosterior, "scale_spread", NAN),
        *[
            (make, "depth", value)
            for make in (
                ibnn.NormalPlanar1d,
                ibnn.NormalInvConv,
                ibnn.NormalGlowStep,
                ibnn.NormalRadial,
                ibnn.NormalSylvester,
                ibnn.NormalIAF,
            )
            for value in (0, -1, 1.5)
        ],
        (ibnn.NormalInvConv, "planar", -1),
        (ibnn.NormalLowRank, "rank", 0),
        (ibnn.NormalSylvester, "units", 0),
        (ibnn.NormalIAF, "hidden", 0),
        (ibnn.NormalGlowStep, "hidden", -2),
    ],
)
def test_bad_arguments_are_refused_by_name_and_value(make, argument, value):
    with pytest.raises(ValueError, match=f"`{argument}`") as caught:
        make(**{argument: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("wrong", ["planar", ibnn.flows.Planar, keras.layers.Dense(2)])
def test_flows_must_be_flows(wrong):
    with pytest.raises(ValueError, match="`flows`") as caught:
        ibnn.FlowPosterior([ibnn.flows.Planar(), wrong])
    assert repr(wrong) in str(caught.value)


@pytest.mark.parametrize("depth", [0])
def test_depth_zero_is_told_of_the_recipe_without_a_flow(depth):
    with pytest.raises(ValueError, match=r"`depth`.*got 0.*NormalAffine\(\)"):
        ibnn.NormalPlanar1d(depth=depth)


@pytest.mark.parametrize("keyword", ["foo", "flows"])
def test_unknown_keywords_are_told_by_the_recipe(keyword):
    with pytest.raises(
        TypeError, match=rf"NormalPlanar1d does not take `{keyword}`\. It takes: "
    ) as e:
        ibnn.NormalPlanar1d(**{keyword: 1})
    assert "depth, initial_scale" in str(e.value)
    assert "flows" not in str(e.value).split("It takes")[1]


def by_keyword(function):
    """Return the defaults of the arguments that a function takes by name only."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


@pytest.mark.once
@pytest.mark.parametrize("name", [x for x in ibnn.__all__ if x.startswith("Normal")])
def test_recipes_show_every_argument_with_its_default(name):
    recipe = getattr(ibnn, name)
    expected = {**by_keyword(ibnn.Posterior.__init__), **by_keyword(Template.__init__)}
    if inspect.isfunction(recipe):
        shown = by_keyword(recipe)
        expected.update(by_keyword(ibnn.FlowPosterior.__init__))
    else:
        shown = by_keyword(recipe.__init__)
    assert expected.items() <= shown.items()


@every_posterior
def test_draws_before_build_are_refused(name):
    posterior = POSTERIORS[name]()
    with pytest.raises(ValueError, match=f"{type(posterior).__name__} is not built.*build"):
        posterior.sample_and_kl((2,))


@pytest.mark.parametrize("name", ["mixture-base", "MixturePosterior-bound"])
def test_components_must_be_chosen(name):
    posterior = make_posterior(name, channels=2)
    with pytest.raises(ValueError, match="`component`"):
        posterior.transform(ops.zeros((4, 2)))


class Doubled(ibnn.FlowPosterior):
    """A posterior whose mean is its own."""

    def mean(self):
        return 2 * super().mean()


class Bent(ibnn.FlowPosterior):
    """A posterior whose draws are its own."""

    def transform(self, noise, component=None, training=False):
        draw = super().transform(noise, component, training)
        return draw._replace(z=draw.z**3)


@pytest.mark.parametrize("flows", [[], [ibnn.flows.Planar()]], ids=["gaussian", "flow"])
@pytest.mark.parametrize("kind", [Doubled, Bent])
def test_a_subclass_is_its_own_mean_without_noise(kind, flows):
    posterior = kind(flows)
    posterior.build((None, 3))
    assert not posterior.is_centered
    draw = posterior.draw(noise.Pass(seed=0), 4, (), ops.convert_to_tensor(False))
    np.testing.assert_allclose(draw.z, np.broadcast_to(posterior.mean(), (4, 3)), rtol=1e-6)


class WideFirst(ibnn.FlowPosterior):
    """A posterior whose prior is wider in its first channel."""

    def prior(self):
        scale = ops.convert_to_tensor([2.0, 0.5, 0.5], dtype=self.dtype)
        normal = tfd.Normal(ops.ones_like(scale), scale)
        return tfd.Independent(normal, reinterpreted_batch_ndims=1)


@pytest.mark.parametrize("flows", [[], [ibnn.flows.Planar()]], ids=["gaussian", "flow"])
def test_a_prior_of_its_own_is_the_one_of_the_kl(flows):
    posterior = WideFirst(flows, dtype="float64")
    posterior.build((3,))
    noise = np.random.default_rng(0).normal(size=(5, 3))
    draw = posterior.transform(noise)
    if flows:
        expected = posterior.distribution().log_prob(draw.z) - posterior.prior().log_prob(draw.z)
    else:
        q = tfd.Independent(tfd.Normal(*posterior.loc_and_scale()), reinterpreted_batch_ndims=1)
        expected = tfd.kl_divergence(q, posterior.prior())
    np.testing.assert_allclose(draw.kl, expected, rtol=1e-9)


def test_defaults_learn_and_the_prior_is_wider_than_the_start():
    posterior = ibnn.NormalPlanar1d()
    posterior.build((None, 3))
    loc, scale = numpy(posterior.affine.shift.value), float(posterior.affine.bijector().scale[0])
    assert (posterior.prior_scale, posterior.prior_loc) == (0.3, 1.0)
    np.testing.assert_allclose([*loc, scale], [1.0, 1.0, 1.0, 0.1], rtol=1e-5)


def test_the_prior_scale_is_settled_by_the_depth_unless_it_is_given():
    assert [ibnn.NormalAffine().at_depth(depth).prior_scale for depth in (1, 10, 15, 60)] == (
        pytest.approx([0.3, 0.3, 0.2, 0.05])
    )
    template, given = ibnn.NormalAffine(seed=3), ibnn.NormalAffine(prior_scale=0.3)
    assert given.at_depth(60) is given
    settled = template.at_depth(15)
    assert settled.get_config() == {**template.get_config(), "prior_scale": 0.2}
    assert template.prior_scale == 0.3
    assert settled.at_depth(1).prior_scale == 0.2


def test_a_deep_model_does_not_start_wider_than_its_prior():
    assert [ibnn.NormalAffine().at_depth(depth).initial_scale for depth in (1, 15, 60)] == (
        pytest.approx([0.1, 0.1, 0.05])
    )
    assert ibnn.NormalAffine(initial_scale=None).at_depth(60).initial_scale is None
    assert ibnn.MixturePosterior().at_depth(100).initial_scale == pytest.approx(0.03)


@pytest.mark.parametrize(("train_size", "beta"), [(3, 1.0), (500, 1.0), (5000, 10.0)])
def test_a_layer_gives_beta_by_the_number_of_examples(train_size, beta):
    template = ibnn.NormalAffine()
    layer = ibnn.StochasticDense(2, posterior=template, train_size=train_size)
    layer.build((None, 3))
    assert float(layer.posterior.beta.value) == layer.posterior.initial_beta == beta
    assert layer.posterior.get_config()["beta"] == beta
    assert template.get_config()["beta"] is None
    assert (
        float(ibnn.NormalAffine(beta=2.0).copy_for_layer("float32", None, 5000).initial_beta) == 2
    )
    template.build((None, 3))
    assert float(template.beta.value) == 1.0
