"""Refined posteriors against quadrature, known densities, and the whole network."""

import functools

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfp_ibnn as ibnn
from tests.autodiff import weight_gradients
from tests.flows.tools import numpy
from tests.registry import perturb
from tests.weights.last_layers import LOGITS, PRIOR, Quadrature, X, Y, logistic
from tfp_ibnn import flows
from tfp_ibnn.weights.objectives import elbo as elbo_of
from tfp_ibnn.weights.refinement import RefinedPosterior
from tfp_ibnn.weights.target import Target

JAX = keras.backend.backend() == "jax"
CHAIN = [flows.Spline(bins=4), flows.AffineCoupling(8), flows.AffineCoupling(8, swap=True)]


@pytest.fixture(scope="module")
def gaussian():
    return ibnn.GaussianVI(logistic(2), prior_scale=PRIOR).fit(X, Y, steps=60, verbose=0)


@pytest.fixture(scope="module")
def refined(gaussian):
    keras.utils.set_random_seed(0)
    options = {"steps": 120, "learning_rate": 0.03, "verbose": 0}
    return ibnn.refine(gaussian, CHAIN, X, Y, **options)


@pytest.mark.slow
def test_two_weights_come_within_a_hundredth_of_a_nat(gaussian, refined):
    exact = Quadrature(2)
    assert exact.kl_of(gaussian) > 0.03
    found = exact.kl_of(refined)
    assert -1e-3 < found < 0.01
    # The scores on the way are the ELBO: below the evidence by the KL, up to their noise.
    assert abs(exact.evidence - refined.history[-1] - found) < 0.02
    assert len(refined.history) == 21
    assert refined.history[0] < refined.history[-1]


@pytest.mark.slow
def test_the_distribution_has_a_mean(refined):
    q = refined.distribution()
    assert isinstance(q, ibnn.tfd.TransformedDistribution)
    np.testing.assert_allclose(numpy(q.mean()), numpy(refined.center()), atol=0.1)


def test_one_weight_comes_within_a_hundredth_of_a_nat():
    exact = Quadrature(1)
    gaussian = ibnn.GaussianVI(logistic(1), prior_scale=PRIOR).fit(X, Y, steps=60, verbose=0)
    assert exact.kl_of(gaussian) > 0.02
    options = {"steps": 150, "learning_rate": 0.05, "verbose": 0}
    refined = ibnn.refine(gaussian, [flows.Spline(bins=6)], X, Y, **options)
    assert -1e-3 < exact.kl_of(refined) < 0.01
    draws = numpy(refined.transform(ops.convert_to_tensor(NOISE[:, :1]))[0])
    assert abs(draws.mean() - exact.mean[0]) < 0.1
    assert abs(draws.std() - exact.covariance[0, 0] ** 0.5) < 0.1


NOISE = np.random.default_rng(3).standard_normal((4000, 2)).astype("float32")


@pytest.mark.slow
def test_density_draws_and_mean_agree(refined):
    w, log_q = refined.transform(ops.convert_to_tensor(NOISE[:50]))
    w = ops.convert_to_tensor(numpy(w).copy())
    np.testing.assert_allclose(numpy(refined.log_prob(w)), numpy(log_q), atol=1e-3)
    np.testing.assert_allclose(numpy(refined.distribution().log_prob(w)), numpy(log_q), atol=1e-3)
    one, two = (numpy(refined.sample(ops.convert_to_tensor([4, 5]), n)[0]) for n in (0, 1))
    assert one.shape == (1, 1)
    assert one != two
    center = np.concatenate([numpy(part).ravel() for part in refined.mean()])
    many = numpy(refined.transform(ops.convert_to_tensor(NOISE))[0])
    assert np.all(np.abs(center - many.mean(axis=0)) < 4 * many.std(axis=0) / 64**0.5)


@pytest.mark.once
def test_prediction_file_and_export(gaussian, tmp_path):
    coupled = RefinedPosterior(gaussian.network, [flows.AffineCoupling(4)], gaussian.places)
    coupled.set_base(*(numpy(v.value) for v in (gaussian.loc, gaussian.scale)))
    perturb(coupled.flows[0], seed=1)
    mc = ibnn.MonteCarlo(coupled, samples=4, seed=0)
    found = numpy(mc(X)["mean"])
    mc.save(tmp_path / "refined.keras")
    loaded = keras.models.load_model(tmp_path / "refined.keras")
    np.testing.assert_allclose(numpy(loaded(X)["mean"]), found, atol=1e-6)
    if JAX:
        return
    import tensorflow as tf

    ibnn.export(mc, tmp_path / "1")
    served = tf.saved_model.load(str(tmp_path / "1")).signatures["serve"]
    np.testing.assert_allclose(served(inputs=X)["mean"].numpy(), found, atol=1e-6)


@pytest.mark.once
def test_samples_of_a_known_density():
    rng = np.random.default_rng(0)
    eps = rng.standard_normal((4000, 2))
    bent = 0.5 * eps[:, 0] ** 2 + 0.3 * eps[:, 1]
    w = np.stack([eps[:, 0], bent], axis=1)
    log_p = -np.sum(eps**2, axis=1) / 2 - np.log(2 * np.pi) - np.log(0.3)
    posterior = ibnn.GaussianVI(logistic(2), prior_scale=PRIOR)
    options = {"steps": 300, "learning_rate": 0.03, "draws": 256, "verbose": 0}
    refined = ibnn.refine(posterior, [flows.AffineCoupling(16)], samples=w[:3000], **options)
    fresh = ops.convert_to_tensor(w[3000:].astype("float32"))
    gap = log_p[3000:].mean() - numpy(refined.log_prob(fresh)).mean()
    gaussian = (np.linalg.slogdet(np.cov(w.T))[1] + 2 * np.log(2 * np.pi) + 2) / 2
    lack = gaussian + log_p.mean()  # of the best Gaussian
    assert lack > 0.5
    assert abs(gap) < 0.05 * lack
    # What was held out has decided, and says the same.
    assert abs(max(refined.history) - log_p.mean()) < 0.15


@pytest.mark.once
def test_path_gradients_vanish_where_the_posterior_is_exact():
    """A linear model of known noise has a Gaussian posterior: the base, under an identity flow."""
    x = np.random.default_rng(0).normal(size=(8, 1)).astype("float32")
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    exact = ibnn.GaussianVI(model, noise_scale=0.5).fit(x, 2 * x[:, 0], steps=60, verbose=0)
    target = exact.target(x, 2 * x[:, 0], verbose=0)
    made = RefinedPosterior(model, [flows.AffineCoupling(4)], exact.places)
    made.set_base(*(numpy(v.value) for v in (exact.loc, exact.scale)))
    sizes = {}
    for path in (True, False):
        elbo = functools.partial(elbo_of, made, target, path)
        slopes = weight_gradients(lambda e=elbo: e(NOISE[:2], 1.0, *target.data), made.trained)
        sizes[path] = max(np.abs(slope).max() for slope in slopes)
    assert sizes[True] < 1e-3
    assert sizes[False] > 0.05


def network():
    keras.utils.set_random_seed(0)
    inside = [layers.Dense(3, activation="tanh"), layers.Dense(1, activation="sigmoid")]
    model = keras.Sequential([keras.Input((1,)), *inside])
    model.compile("sgd", "binary_crossentropy")
    return model


def test_the_whole_network_and_the_cached_features_say_the_same():
    model = network()
    last = Target(model, None, X, Y, PRIOR, verbose=0)
    every = Target(model, model.weights, X, Y, PRIOR, verbose=0)
    assert (last.size, every.size) == (4, 10)
    w = np.random.default_rng(0).normal(size=(3, 4))
    both = np.concatenate([np.tile(every.start[:6], (3, 1)), w], axis=1)
    prior = numpy(every.log_prior(ops.convert_to_tensor(both.astype("float32"))))
    prior = prior - numpy(last.log_prior(ops.convert_to_tensor(w.astype("float32"))))
    np.testing.assert_allclose(every.values(both) - prior, last.values(w), rtol=1e-4)
    slopes = every.gradients(both)[:, 6:]
    np.testing.assert_allclose(slopes, last.gradients(w), rtol=1e-3, atol=1e-4)


@pytest.mark.once
@pytest.mark.slow
def test_all_weights_of_a_laplace_approximation():
    model = network()
    laplace = ibnn.Laplace(model, subset_of_weights="all", hessian_structure="diag", pred_type="nn")
    laplace.fit(X, Y, verbose=0)
    options = {"steps": 20, "draws": 4, "verbose": 0, "batch_size": 6, "learning_rate": 0.02}
    refined = ibnn.refine(laplace, [flows.AffineCoupling(4)], X, Y, **options)
    assert refined.diagonal
    assert refined.size == 10
    assert max(refined.history) > refined.history[0] + 0.1
    found = numpy(ibnn.MonteCarlo(refined, samples=4, seed=0)(X)["mean"])
    assert np.isfinite(found).all()


def swag(seed):
    """Return the posterior of a network of 10 weights, trained for a moment."""
    model, found = network(), ibnn.SWAG(unit="step", rank=4)
    keras.utils.set_random_seed(seed)
    for variable in model.trainable_variables:
        variable.assign(np.random.default_rng(seed).normal(size=variable.shape))
    model.compile(keras.optimizers.SGD(0.3), "binary_crossentropy")
    model.fit(X, Y, epochs=4, batch_size=4, verbose=0, callbacks=[found])
    return found.posterior()


@pytest.mark.once
@pytest.mark.slow
def test_swag_is_refined():
    posterior, options = swag(1), {"steps": 20, "draws": 4, "verbose": 0, "learning_rate": 0.05}
    chain = [flows.AffineCoupling(4), flows.AffineCoupling(4, swap=True)]
    with pytest.raises(ValueError, match="`prior_scale` must be given: a GaussianWeights"):
        ibnn.refine(posterior, chain, X, Y)
    refined = ibnn.refine(posterior, chain, X, Y, prior_scale=PRIOR, **options)
    assert not refined.diagonal
    np.testing.assert_array_equal(numpy(refined.loc), numpy(posterior.loc))
    factor = numpy(refined.matrix)
    covariance = numpy(posterior.distribution().covariance())
    np.testing.assert_allclose(factor @ factor.T, covariance, rtol=1e-3, atol=1e-6)
    assert max(refined.history) > refined.history[0] + 0.1


@pytest.mark.slow
def test_a_mixture_of_refined_modes(tmp_path):
    """Around two trained networks: draws in turn, the mean, a file, a SavedModel."""
    options = {"prior_scale": PRIOR, "steps": 10, "draws": 4, "verbose": 0}
    modes = [ibnn.refine(swag(s), [flows.AffineCoupling(4)], X, Y, **options) for s in (1, 2)]
    mixture = ibnn.WeightMixture(modes)
    mc = ibnn.MonteCarlo(mixture, samples=6, seed=3, return_samples=True)
    found = {key: numpy(value) for key, value in mc(X).items()}
    assert found["samples"].shape == (12, 6, 1)
    np.testing.assert_allclose(found["mean"], found["samples"].mean(axis=1), atol=1e-6)
    # Each draw is a network with weights of its mode, whose key has the member's number in it.
    key = ops.cast(mc._key, "int32")
    for number in range(4):
        own = ops.stack([key[0] ^ (number % 2), key[1]])
        member = modes[number % 2]
        values = member.sample(own, ops.convert_to_tensor(number // 2))
        member.network.set_weights([numpy(value) for value in values])
        one = numpy(member.network(X))
        np.testing.assert_allclose(found["samples"][:, number], one, atol=1e-5)
    modes[0].network.set_weights([numpy(value) for value in modes[0].mean()])
    at_mean = numpy(mc.at_mean(X)["mean"])
    np.testing.assert_allclose(at_mean, numpy(modes[0].network(X)), atol=1e-5)
    finite = mixture.materialize(3)
    assert [member.count for member in finite.members] == [3, 3]
    mc.save(tmp_path / "modes.keras")
    loaded = keras.models.load_model(tmp_path / "modes.keras")
    np.testing.assert_allclose(numpy(loaded(X)["mean"]), found["mean"], atol=1e-6)
    if JAX:
        return
    import tensorflow as tf

    ibnn.export(mc, tmp_path / "1")
    served = tf.saved_model.load(str(tmp_path / "1")).signatures["serve"]
    np.testing.assert_allclose(served(inputs=X)["mean"].numpy(), found["mean"], atol=1e-5)


@pytest.mark.slow
def test_validation_data_decide_and_end_training(gaussian):
    rng = np.random.default_rng(0)
    wrong = 1 - Y  # against which every step makes it worse, in the end
    options = {"steps": 100, "learning_rate": 0.2, "verbose": 0, "path_gradients": False}
    found = ibnn.refine(
        gaussian, [flows.Affine()], X, Y, validation=(X + rng.normal(), wrong), **options
    )
    assert len(found.history) < 21 or np.argmax(found.history) > 15
    best = ibnn.refine(gaussian, [flows.Affine()], X, Y, validation=(X, Y), seed=1, **options)
    again = ibnn.refine(gaussian, [flows.Affine()], X, Y, validation=(X, Y), seed=1, **options)
    for one, other in zip(best.weights, again.weights, strict=True):
        np.testing.assert_array_equal(numpy(one.value), numpy(other.value))


def wide():
    model = keras.Sequential([keras.Input((10_000,)), layers.Dense(2)])
    model.compile("sgd", LOGITS)
    return model


class Wide(ibnn.GaussianVI):
    def distribution(self):
        from tfp_ibnn._core.backend import tfd

        scale = ops.ones((self.size,))
        return tfd.MultivariateNormalDiagPlusLowRankCovariance(0 * scale, scale, scale[:, None])


@pytest.mark.once
def test_refusals(gaussian):
    spline, many = [flows.Spline()], np.zeros((19, 2))
    cases = [
        (lambda: ibnn.refine(logistic(2), spline, X, Y), "`posterior` must be one over weights"),
        (lambda: ibnn.refine(gaussian, [], X, Y), "`flows` must hold at least one"),
        (lambda: ibnn.refine(gaussian, spline), "`x` and `y` must be given"),
        (lambda: ibnn.refine(ibnn.GaussianVI(logistic(2)), spline, X, Y), "call its `fit` first"),
        (lambda: ibnn.refine(gaussian, spline, X * np.nan, Y), "NaN or infinity"),
        (lambda: ibnn.refine(gaussian, spline, samples=many), "at least 20 are needed.*got 19"),
        (lambda: ibnn.refine(gaussian, spline, samples=many[:, :1]), r"\(N, 2\)"),
        (lambda: ibnn.refine(gaussian, spline, X, Y, steps=0), "`steps`"),
        (
            lambda: ibnn.refine(Wide(wide(), covariance="diag"), spline, X, Y),
            "over 20002 weights, whose covariance takes 1.6 GB",
        ),
        (
            lambda: ibnn.refine(ibnn.DeepEnsemble([logistic(2)]), spline, X, Y),
            "DeepEnsemble has no",
        ),
    ]
    for make, words in cases:
        with pytest.raises((ValueError, NotImplementedError), match=words):
            make()
