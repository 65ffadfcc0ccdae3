"""A posterior as the prior of the next task: exact where Bayes' rule can be written down."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from scipy.optimize import minimize
from scipy.stats import multivariate_normal

import tfp_ibnn as ibnn
from tests.autodiff import gradients_by_call, quick
from tests.conversion.test_convert_any_model import MODELS, examples
from tests.layer_checklist import numpy, predict_without_noise, stir
from tfp_ibnn.layers.mean_field import Explicit

N = 20
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

POSTERIORS = {
    "mean field": lambda: ibnn.MeanField(bias="stochastic", estimator="shared"),
    "moped": lambda: ibnn.MeanField(moped=0.1),
    "scale mixture": lambda: ibnn.MeanField(prior=ibnn.priors.ScaleMixture()),
    "diagonal": lambda: ibnn.NormalAffine(beta=2.0),
    "full": lambda: ibnn.NormalFull(),
    "low rank": lambda: ibnn.NormalLowRank(2, prior=ibnn.priors.Laplace(0.3, loc=1.0)),
    "planar": lambda: ibnn.NormalPlanar1d(learn_prior_scale=True),
    "couplings": lambda: ibnn.FlowPosterior([ibnn.flows.AffineCoupling(hidden=3)], affine="first"),
    "batch norm": lambda: ibnn.FlowPosterior([ibnn.flows.BatchNorm()]),
    "mixture": lambda: ibnn.FlowPosterior([ibnn.flows.Radial()], components=3),
}
QUICK = ("mean field", "diagonal", "full", "planar")
NAMES = [pytest.param(x, marks=[] if x in QUICK else pytest.mark.slow) for x in POSTERIORS]
FLOWS = ("planar", "couplings", "batch norm", "mixture")


def learned(name, **options):
    """Return a stochastic model whose posteriors are far from their start."""
    keras.utils.set_random_seed(0)
    hidden = layers.Dense(3, "tanh", name="hidden")
    det = keras.Sequential([keras.Input((4,)), hidden, layers.Dense(2, name="logits")])
    sto = ibnn.to_stochastic(det, POSTERIORS[name](), N, seed=3, **options)
    stir(sto)
    return sto


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(N, 4)).astype("float32"), np.arange(N) % 2


def values(model):
    return {weight.path: numpy(weight).copy() for weight in model.variables}


def of_earlier(model):
    """Return the weights of the prior."""
    named = values(model).items()
    return {path: x for path, x in named if "earlier" in path or "_prior_" in path}


def fresh(x):
    """A tensor that TFP's cache does not know."""
    return ops.convert_to_tensor(np.array(numpy(x)))


@pytest.mark.parametrize("name", NAMES)
def test_it_starts_at_the_posterior_where_the_kl_is_0(name):
    sto = learned(name, train_samples=2)
    before, x = values(sto), data()[0]
    later = ibnn.posterior_as_prior(sto, train_size=7)
    assert type(later) is ibnn.StochasticModel
    assert later.train_samples == 2
    assert not {id(v) for v in sto.variables} & {id(v) for v in later.variables}
    assert all(np.array_equal(before[path], value) for path, value in values(sto).items())
    pairs = zip(ibnn.stochastic_layers(sto), ibnn.stochastic_layers(later), strict=True)
    for old, new in pairs:
        assert (new.name, new.train_size, old.train_size) == (old.name, 7, N)
        one, two = old.summary(), new.summary()
        np.testing.assert_array_equal(numpy(two.z), numpy(one.z))
        np.testing.assert_allclose(numpy(two.entropy), numpy(one.entropy), atol=1e-5)
        assert np.abs(numpy(two.kl)).max() < 1e-5
        assert np.abs(numpy(one.kl)).max() > 1e-2
        assert float(new.posterior.beta) == float(old.posterior.beta)
    np.testing.assert_array_equal(predict_without_noise(later, x), predict_without_noise(sto, x))
    if name != "scale mixture":  # whose KL took noise of its own
        np.testing.assert_array_equal(numpy(later(x)), numpy(sto(x)))


@pytest.mark.parametrize("name", NAMES)
def test_the_kl_is_to_the_earlier_posterior(name):
    """By the densities of SciPy, and those of TFP for flows."""
    sto = learned(name)
    later = ibnn.posterior_as_prior(sto)
    stir(later, seed=1, size=0.1)
    for old, new in zip(ibnn.stochastic_layers(sto), ibnn.stochastic_layers(later), strict=True):
        found = new.summary()
        assert np.mean(numpy(found.kl)) > 1e-2
        if name in FLOWS:
            log_p = numpy(old.posterior.distribution().log_prob(fresh(found.z)))
            np.testing.assert_allclose(numpy(found.kl), -numpy(found.entropy) - log_p, atol=1e-4)
            continue
        expected = sum(
            gaussian_kl(*of_new, *of_old)
            for of_new, of_old in zip(gaussians(new), gaussians(old), strict=True)
        )
        np.testing.assert_allclose(float(found.kl), expected, rtol=1e-4)


def gaussians(layer):
    """Return means and covariances of a layer's random weights or z, in groups."""
    if isinstance(layer.posterior, ibnn.MeanField):
        scales = [numpy(scale).ravel() for scale in layer.posterior.scales()]
        means = [numpy(weight).ravel() for weight in layer.layer.weights][: len(scales)]
        return [(m, np.diag(s**2.0)) for m, s in zip(means, scales, strict=True)]
    if layer.posterior.is_centered:
        loc, scale = map(numpy, layer.posterior.loc_and_scale())
        return [(loc, np.diag(scale**2.0))]
    distribution = layer.posterior.distribution()
    return [(numpy(distribution.mean()), numpy(distribution.covariance()))]


def gaussian_kl(mean, covariance, of_prior, covariance_of_prior):
    """By the mean log-ratio, which a quadratic form has at sigma points."""
    mean, of_prior = (x.astype("float64") for x in (mean, of_prior))
    size = len(mean)
    factor = np.linalg.cholesky(covariance.astype("float64"))
    points = mean + size**0.5 * np.concatenate([factor.T, -factor.T])
    options = {"allow_singular": True}
    log_q = multivariate_normal(mean, covariance, **options).logpdf(points)
    return np.mean(log_q - multivariate_normal(of_prior, covariance_of_prior).logpdf(points))


@pytest.mark.parametrize("name", NAMES)
def test_the_prior_is_saved_and_never_trains(name, eagerly, tmp_path):
    later, (x, y) = ibnn.posterior_as_prior(learned(name)), data()
    before = of_earlier(later)
    assert before
    assert not any(weight.path in before for weight in later.trainable_weights)
    trained = len(later.trainable_weights)
    for part in ("stochastic", "deterministic"):
        ibnn.freeze(later, part)
        ibnn.unfreeze(later, part)
    later.trainable = False
    later.trainable = True
    assert len(later.trainable_weights) == trained
    later.compile(keras.optimizers.Adam(0.01), LOGITS)
    history = later.fit(x, y, epochs=2, verbose=0).history
    if name != "batch norm":  # which normalizes by the draws of a step, and the prior does not
        assert history["kl"][-1] > history["kl"][0] > -1e-5
    assert all(np.array_equal(value, before[path]) for path, value in of_earlier(later).items())

    later.save(tmp_path / "later.keras")
    loaded = keras.models.load_model(tmp_path / "later.keras")
    assert len(loaded.trainable_weights) == trained
    np.testing.assert_array_equal(predict_without_noise(loaded, x), predict_without_noise(later, x))
    for old, new in zip(ibnn.stochastic_layers(later), ibnn.stochastic_layers(loaded), strict=True):
        np.testing.assert_allclose(numpy(new.summary().kl), numpy(old.summary().kl), rtol=1e-5)
    third = ibnn.posterior_as_prior(loaded)  # which keeps no prior of the prior
    assert len(third.weights) == len(later.weights)
    assert all(np.abs(numpy(x.summary().kl)).max() < 1e-5 for x in ibnn.stochastic_layers(third))
    assert len(ibnn.to_deterministic(third).weights) == 4


def test_a_frozen_model_stays_so_and_what_unfreezes_it_spares_the_prior(tmp_path):
    sto = learned("planar")
    trained = len(sto.trainable_weights) - 2  # learned scales of the prior
    ibnn.stochastic_layers(sto)[0].posterior.flows[0].trainable = False
    some = ibnn.posterior_as_prior(sto)
    assert len(some.trainable_weights) == trained - 3  # of a planar flow
    ibnn.freeze(sto, "stochastic")
    later = ibnn.posterior_as_prior(sto)
    assert [weight.name for weight in later.trainable_weights] == ["kernel", "bias"] * 2
    later.save(tmp_path / "later.keras")
    loaded = keras.models.load_model(tmp_path / "later.keras")
    ibnn.unfreeze(loaded, "stochastic")
    assert len(loaded.trainable_weights) == trained
    assert not any("earlier" in weight.path for weight in loaded.trainable_weights)


# Bayesian linear regression: y = x w + noise, with the prior N(MEAN, SCALE^2) of each weight.

NOISE, SCALE, MEAN = 0.5, 0.8, 0.4


def halves(orthogonal):
    """Return two data sets; the columns of x are orthogonal in each, or far from it."""
    rng = np.random.default_rng(1)
    found = []
    for size in (9, 14):
        x = rng.normal(size=(size, 3)) @ np.array([[1, 0.8, 0], [0, 1, -0.7], [0, 0, 0.6]])
        if orthogonal:
            x = np.linalg.qr(x)[0] * [1.0, 2.0, 3.0]
        found.append((x, x @ [0.3, -1.0, 1.5] + NOISE * rng.normal(size=size)))
    return found


def exact(parts):
    """Return mean and covariance of the weights given all parts, by the normal equations."""
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    precision = np.eye(3) / SCALE**2 + x.T @ x / NOISE**2
    mean = np.linalg.solve(precision, MEAN / SCALE**2 + x.T @ y / NOISE**2)
    return mean, np.linalg.inv(precision)


def linear(posterior):
    """Return y = x w, or y = x (w * z) with a posterior over z, whose w is not trained."""
    det = keras.Sequential([keras.Input((3,)), layers.Dense(1, use_bias=False)])
    det.layers[-1].kernel.assign(np.full((3, 1), MEAN))
    sto = ibnn.to_stochastic(det, posterior, train_size=9)
    if posterior.latent == "z":
        ibnn.freeze(sto, "deterministic")
    return sto


def learn(model, x, y):
    """Maximise the ELBO, whose expectation sigma points give exactly: y is linear in the noise."""
    (layer,) = ibnn.stochastic_layers(model)
    points = 3**0.5 * np.concatenate([np.eye(3), -np.eye(3)])
    repeated = np.tile(x, (len(points), 1))

    def negative_elbo():
        if isinstance(layer.posterior, ibnn.MeanField):
            z, kl = Explicit([ops.convert_to_tensor(points[:, :, None])]), layer.summary().kl
        else:
            z, kl, _ = layer.posterior.transform(points)
        with ibnn.noise.scope(groups=len(points), losses=False, draws={layer: z}):
            outputs = ops.reshape(model(repeated), (len(points), -1))
        squares = ops.sum((outputs - y) ** 2) / len(points)
        return ops.mean(kl) + squares / (2 * NOISE**2)

    variables = model.trainable_variables
    by_call = quick(negative_elbo, variables), gradients_by_call(negative_elbo, variables)

    def at(w):
        assign(variables, w)
        value, gradients = (function() for function in by_call)
        return float(value), np.concatenate([gradient.ravel() for gradient in gradients])

    start = np.concatenate([numpy(variable).ravel() for variable in variables])
    best = minimize(at, start, jac=True, method="BFGS", options={"gtol": 1e-7}).x
    assert np.abs(at(best)[1]).max() < 1e-4


def assign(variables, w):
    ends = np.cumsum([np.prod(variable.shape, dtype=int) for variable in variables])
    for variable, part in zip(variables, np.split(w, ends[:-1]), strict=True):
        variable.assign(part.reshape(variable.shape))


def weights_of(model):
    """Return mean and covariance of the weights."""
    (layer,) = ibnn.stochastic_layers(model)
    ((mean, covariance),) = gaussians(layer)
    factor = 1.0 if isinstance(layer.posterior, ibnn.MeanField) else MEAN
    return factor * mean, factor**2 * covariance


Z_PRIOR = {"prior_scale": SCALE / MEAN, "beta": 1.0}
CONJUGATE = {
    "weights": (lambda: ibnn.MeanField(prior=ibnn.priors.Normal(SCALE, MEAN)), True),
    "diagonal": (lambda: ibnn.NormalAffine(**Z_PRIOR), True),
    "full": (lambda: ibnn.NormalFull(**Z_PRIOR), False),
}


@pytest.mark.parametrize("name", CONJUGATE)
def test_halves_one_after_the_other_teach_what_both_together_do(float64, name):
    template, orthogonal = CONJUGATE[name]
    first, second = halves(orthogonal)
    model = linear(template())
    learn(model, *first)
    for found, expected in zip(weights_of(model), exact([first]), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)
    later = ibnn.posterior_as_prior(model, train_size=14)
    learn(later, *second)
    for found, expected in zip(weights_of(later), exact([first, second]), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)
    apart = np.abs(exact([second])[0] - exact([first, second])[0]).max()
    assert apart > 0.02  # what the second half alone would teach


STRUCTURES = [pytest.param("block", marks=pytest.mark.slow), "lstm", "bare", "subclassed"]


@pytest.mark.parametrize("name", STRUCTURES)
def test_layers_inside_of_others_go_on_too(name):
    keras.utils.set_random_seed(0)
    model = MODELS[name][0]()
    x = examples(model)
    sto = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=100)
    stir(sto)
    later = ibnn.posterior_as_prior(sto)
    assert type(later) is type(sto)
    assert len(ibnn.stochastic_layers(later)) == len(ibnn.stochastic_layers(sto))
    np.testing.assert_allclose(
        predict_without_noise(later, x), predict_without_noise(sto, x), atol=1e-6
    )
    assert all(float(layer.summary().kl) == 0 for layer in ibnn.stochastic_layers(later))
    later(x)
    assert len(later.losses) == len(ibnn.stochastic_layers(sto))


@pytest.mark.once
def test_a_plain_graph_becomes_a_stochastic_model_and_a_switch_stays_off():
    inputs = keras.Input((4,))
    plain = keras.Model(inputs, ibnn.StochasticDense(2, train_size=N)(inputs), name="plain")
    ibnn.set_noise(plain, on=False)
    later = ibnn.posterior_as_prior(plain)
    assert type(later) is ibnn.StochasticModel
    assert later.name == "plain"
    assert float(later.layers[-1].noise_switch) == 0


@keras.saving.register_keras_serializable(package="tests.continual")
class Doubled(keras.Model):
    """Trains by a loss of its own."""

    def compute_loss(self, *args, **kwargs):
        return 2 * super().compute_loss(*args, **kwargs)


@pytest.mark.once
def test_a_class_of_the_users_own_goes_along():
    inputs = keras.Input((4,))
    det = Doubled(inputs, layers.Dense(2)(inputs))
    sto = ibnn.to_stochastic(det, ibnn.NormalAffine(), train_size=N)
    later = ibnn.posterior_as_prior(sto)
    assert type(later) is type(sto) is not ibnn.StochasticModel
    x, y = data()
    for model in (sto, later):
        ibnn.set_noise(model, on=False)
        model.compile("adam", LOGITS)
    first, second = (model.evaluate(x, y, verbose=0) for model in (sto, later))
    assert first == pytest.approx(second)
    plain = keras.Model(inputs, det.outputs)
    plain.compile("adam", LOGITS)
    assert first[0] == pytest.approx(2 * plain.evaluate(x, y, verbose=0), rel=1e-5)


class OneWay(ibnn.Flow):
    """A flow without an inverse."""

    def build(self, input_shape):
        super().build(input_shape)
        self.add_parameter("shift", (self.channels,), "zeros")

    def bijector_of(self, shift):
        return OneWayBijector(shift=shift)


class OneWayBijector(ibnn.flows.FlowBijector):
    parameter_ndims = {"shift": 1}

    def forward_and_log_det(self, x):
        return x + self.shift, ops.zeros(ops.shape(x)[:-1], dtype=x.dtype)


class OwnPrior(ibnn.FlowPosterior):
    def prior(self, channels=None):
        return ibnn.tfd.Normal(ops.zeros(4), 1.0)


@pytest.mark.once
@pytest.mark.parametrize(
    ("posterior", "message"),
    [
        (ibnn.MNF, "'hidden': The posterior MNF cannot be a prior: it has no density"),
        (ibnn.MixturePosterior, "MixturePosterior cannot be a prior"),
        (lambda: ibnn.JointPosterior(ibnn.NormalFull()), "JointPosterior cannot be a prior"),
        (
            lambda: ibnn.FlowPosterior(components=2, shared_components=True),
            "FlowPosterior cannot be a prior",
        ),
        (OwnPrior, "OwnPrior cannot be a prior"),
        (lambda: ibnn.FlowPosterior([OneWay()]), "a flow of it has no inverse"),
    ],
)
def test_what_has_no_density_is_refused(posterior, message):
    det = keras.Sequential([keras.Input((4,)), layers.Dense(2, name="hidden")])
    sto = ibnn.to_stochastic(det, posterior(), train_size=N)
    with pytest.raises(ValueError, match=message):
        ibnn.posterior_as_prior(sto)


@pytest.mark.once
def test_other_arguments_are_refused():
    det = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    with pytest.raises(ValueError, match="has no stochastic layer"):
        ibnn.posterior_as_prior(det)
    sto = ibnn.to_stochastic(det, ibnn.NormalAffine(), train_size=N)
    with pytest.raises(ValueError, match="`train_size`"):
        ibnn.posterior_as_prior(sto, train_size=0)
    template = ibnn.stochastic_layers(ibnn.posterior_as_prior(sto))[0].posterior
    with pytest.raises(ValueError, match=r"set by ibnn.posterior_as_prior"):
        ibnn.to_stochastic(det, ibnn.MeanField(prior=template._given_prior), train_size=N)
