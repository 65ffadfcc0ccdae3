"""Posteriors: z, KL and entropy against TFP's densities, quadrature and closed forms."""

import keras
import numpy as np
import pytest
from keras import ops

import tfp_ibnn as ibnn
from tests import autodiff
from tests.flows.tools import close, numpy
from tests.posteriors.tools import (
    CLOSED_FORM,
    GIVEN_THE_COMPONENT,
    Grid,
    draw,
    log_density,
    quadrature_cases,
)
from tests.registry import LINEAR, POSTERIORS, VARIANTS, make_posterior, tolerance

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
ESTIMATED = [
    name for name in POSTERIORS if name not in CLOSED_FORM | GIVEN_THE_COMPONENT | SETTINGS
]


def pairs(posterior, count=32, seed=3):
    """Mirrored noise under every component: z has the exact mean of a linear posterior."""
    half = np.random.default_rng(seed).normal(size=(count, posterior.channels))
    noise = np.concatenate([half, -half]).astype(posterior.dtype)
    if posterior.components == 1:
        return noise, None
    every = np.arange(posterior.components, dtype="int32")
    return noise[:, None, :], every


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
