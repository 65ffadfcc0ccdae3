"""Multiplicative normalizing flows: weights, the bound of the KL, and what it gains."""

import itertools

import keras
import numpy as np
import pytest
from keras import layers, ops
from scipy import optimize, stats

import tfp_ibnn as ibnn
from tests.autodiff import jit, quick
from tests.layer_checklist import check_layer, numpy, predict_without_noise
from tests.layers import test_mean_field as mean_field
from tests.registry import perturb
from tests.whole.test_stranger import X, Y, compiled, network, use
from tfp_ibnn._core.backend import tfb, tfd
from tfp_ibnn.layers.mean_field import Explicit, Flipped, Local
from tfp_ibnn.layers.mnf import Multiplied

LAYERS, normal, outputs_at = mean_field.LAYERS, mean_field.normal, mean_field.outputs_at
KINDS = [
    name for name in LAYERS if name.startswith(("dense", "conv1d", "conv2d", "conv3d"))
]  # with groups, channels first, and positions


def wrapped(kind, **options):
    """Return a layer whose z and auxiliary distribution are no longer at their start."""
    make, shape = LAYERS[kind]
    keras.utils.set_random_seed(0)
    layer = ibnn.MNF(initial_scale=0.3, **options).wrap(make(), train_size=10)
    layer.build((None, *shape))
    perturb(layer.posterior, 1)
    layer.layer.bias.assign(normal(*layer.layer.bias.shape))
    return layer, normal(4, *shape)


def weights_at(layer, z, noise):
    """Return the weights of the plain layer: z times the mean, plus noise."""
    kernel, bias = layer.layer.get_weights()
    z = z[:, None] if isinstance(layer.layer, layers.Dense) else z
    scales = [numpy(scale) for scale in layer.posterior.scales()]
    moved = [x + s * n for x, s, n in zip((kernel * z, bias), scales, noise, strict=False)]
    return [*moved, bias][:2]


@pytest.mark.parametrize("kind", KINDS)
def test_explicit_weights_are_a_draw_for_each_block(kind):
    layer, x = wrapped(kind, bias="stochastic")
    z = 1 + normal(2, layer.posterior.z.channels)
    noise = [normal(2, *scale.shape) for scale in layer.posterior.scales()]
    got = numpy(layer.apply(x, Multiplied(z, Explicit(noise)), 2))
    for block in range(2):
        rows = slice(2 * block, 2 * block + 2)
        weights = weights_at(layer, z[block], [n[block] for n in noise])
        np.testing.assert_allclose(got[rows], outputs_at(layer, x[rows], weights), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_in_training_every_example_has_a_z_and_flipped_noise_of_its_own(kind):
    layer, x = wrapped(kind)
    z = 1 + normal(4, layer.posterior.z.channels)
    (noise,) = (normal(1, *scale.shape) for scale in layer.posterior.scales())
    plus, minus = (
        [sign * np.ones((4, *s), "float32") for s in layer._sign_shapes] for sign in (1, -1)
    )
    # Signs of one kind leave the noise as it is, or turn all of it.
    for sign_in, sign_out, sign in ((plus[0], plus[1], 1), (minus[0], plus[1], -1)):
        got = numpy(layer.apply(x, Multiplied(z, Flipped([noise], sign_in, sign_out))))
        for row in range(4):
            expected = outputs_at(
                layer, x[row : row + 1], weights_at(layer, z[row], [sign * noise[0]])
            )
            np.testing.assert_allclose(got[row : row + 1], expected, atol=1e-5)


def test_local_reparameterization():
    layer, x = wrapped("dense", estimator="local")
    z, noise = 1 + normal(4, 3), normal(4, 2)
    got = numpy(layer.apply(x, Multiplied(z, Local(noise))))
    kernel, bias = layer.layer.get_weights()
    scale = numpy(layer.posterior.scales()[0])
    expected = (z * x) @ kernel + bias + np.sqrt(x**2 @ scale**2) * noise
    np.testing.assert_allclose(got, expected, atol=1e-5)
    twice = keras.Input((3,))
    with pytest.raises(ValueError, match="called twice"):
        ibnn.StochasticModel(twice, layer(layers.Dense(3)(layer(twice))))(x, training=True)


def test_draws_have_the_moments_of_z():
    layer, x = wrapped("dense", estimator="local")
    with ibnn.noise.scope(seed=0, groups=4000) as opened:
        z = numpy(layer.draw(opened, 4000).z.z)
    with ibnn.noise.scope(seed=0):
        y = numpy(layer(np.repeat(x[:1], 4000, axis=0), training=True))
    expected = numpy(layer.posterior.z.sample_and_kl((4000,))[0])
    np.testing.assert_allclose(z.mean(axis=0), expected.mean(axis=0), atol=0.1)
    np.testing.assert_allclose(np.cov(z.T), np.cov(expected.T), rtol=0.15, atol=1.0)
    kernel, bias = layer.layer.get_weights()
    variance = np.cov((z * x[0]) @ kernel, rowvar=False).diagonal()
    variance = variance + x[0] ** 2 @ numpy(layer.posterior.scales()[0]) ** 2
    np.testing.assert_allclose(y.mean(axis=0), (z * x[0]).mean(axis=0) @ kernel + bias, atol=0.15)
    np.testing.assert_allclose(y.var(axis=0), variance, rtol=0.15)


def auxiliary(posterior, weights):
    """Return r(z | W) of a layer with one output, for many W, as TensorFlow Probability has it."""
    summary = np.tanh(weights @ numpy(posterior.auxiliary_vector))[..., None]
    summary = ops.cast(summary, posterior.dtype)
    loc = posterior.auxiliary_loc + posterior.auxiliary_loc_slope * summary
    log_scale = posterior.auxiliary_log_scale + posterior.auxiliary_log_scale_slope * summary
    chain = tfb.Chain([flow.bijector() for flow in reversed(posterior.auxiliary_flows)])
    given = tfd.MultivariateNormalDiag(loc, ops.exp(log_scale))
    return tfd.TransformedDistribution(given, tfb.Invert(chain))


def log_weights(layer, log_likelihood, draws=20_000):
    """Return log[p(y | W) p(W) r(z | W) / q(z, W)] of a Dense layer with one output.

    It is an importance weight: its mean is the bound, and the log of its mean exponential the
    evidence.
    """
    posterior, rng = layer.posterior, np.random.default_rng(0)
    mean, scale = numpy(layer.layer.kernel)[:, 0], numpy(posterior.scales()[0])[:, 0]
    noise = rng.normal(size=(2, draws, len(mean)))
    z, _, entropy = map(numpy, posterior.z.transform(noise[0]))
    weights = z * mean + scale * noise[1]
    log_r = numpy(auxiliary(posterior, weights).log_prob(ops.cast(z, posterior.dtype)))
    log_ratio = stats.norm.logpdf(weights) - stats.norm.logpdf(weights, z * mean, scale)
    return log_likelihood(weights) + log_ratio.sum(axis=1) + entropy + log_r


def log_mean(log_values):
    return np.log(np.mean(np.exp(log_values - log_values.max()))) + log_values.max()


class TestBound:
    """One weight, so that every integral is a sum over a grid."""

    mean, points = 0.8, 16

    def posterior(self):
        flows = [ibnn.flows.Planar()], [ibnn.flows.Planar()]
        posterior = ibnn.MNF(*flows, initial_scale=0.3, z_scale=0.6, dtype="float64")
        posterior.build({"kernel": (1, 1)})
        perturb(posterior, 3)
        return posterior

    def at(self, posterior, noise, compiled=jit):
        """Return the bounds at rows of noise, of z and of the weight."""

        def one(z_noise, noise):
            given = iter([ops.reshape(z_noise, (1, 1)), ops.reshape(noise, (1, 1))])
            mean = ops.full((1, 1), self.mean, dtype="float64")
            return ops.stack(posterior.kl_and_entropy([mean], lambda shape: next(given)))

        one = compiled(one, posterior.variables)
        return np.array([numpy(one(*map(np.float64, row))) for row in noise])

    @pytest.mark.slow
    def test_it_is_what_the_densities_say(self):
        posterior = self.posterior()
        scale = float(numpy(posterior.scales()[0])[0, 0])
        rows = (0.4, -1.1), (-1.3, 0.2)
        found = self.at(posterior, rows, quick)[:, 0]
        for (z_noise, noise), bound in zip(rows, found, strict=True):
            z = numpy(posterior.z.transform(np.array([[z_noise]])).z)
            mean = self.mean * z[0, 0]
            weight = mean + scale * noise
            expected = (mean**2 + scale**2 - 1) / 2 - np.log(scale)
            expected += float(posterior.z.distribution().log_prob(z)[0])
            expected -= float(auxiliary(posterior, np.array([weight])).log_prob(z)[0])
            assert bound == pytest.approx(expected, abs=1e-4)

    def test_the_auxiliary_distribution_is_normalized(self):
        posterior, z = self.posterior(), np.linspace(-40, 40, 20_001)
        for weight in (-1.0, 2.0):
            log_r = auxiliary(posterior, np.array([weight])).log_prob(z[:, None])
            density = np.exp(numpy(log_r))
            assert np.trapezoid(density, z) == pytest.approx(1, abs=1e-3)

    def test_it_is_above_the_kl_and_the_entropy_below(self):
        posterior = self.posterior()
        scale = float(numpy(posterior.scales()[0])[0, 0])
        nodes, mass = np.polynomial.hermite_e.hermegauss(self.points)
        mass = mass / mass.sum()
        found = self.at(posterior, itertools.product(nodes, nodes))
        kl, entropy = np.outer(mass, mass).ravel() @ found
        # The density of the weight, its z integrated out on a fine grid.
        fine = np.linspace(-6, 6, 1201)
        z = numpy(posterior.z.transform(fine[:, None]).z)[:, 0]
        w = np.linspace(-30, 30, 6001)
        q = stats.norm.pdf(w[:, None], self.mean * z, scale) @ stats.norm.pdf(fine) * 0.01
        log_q = np.log(np.maximum(q, 1e-300))
        exact = np.trapezoid(q * (log_q - stats.norm.logpdf(w)), w)
        assert np.trapezoid(q, w) == pytest.approx(1, abs=1e-3)
        assert exact < kl < exact + 3
        assert entropy < -np.trapezoid(q * log_q, w)


def fitted(x, y, log_density, start, template, steps, rate, warm_up=None):
    """Return a Dense layer with one output, trained on copies of the data."""
    keras.utils.set_random_seed(0)
    dense = layers.Dense(1, use_bias=False, kernel_initializer=keras.initializers.Constant(start))
    det = keras.Sequential([keras.Input(x.shape[1:]), dense])
    model = ibnn.to_stochastic(det, template, train_size=len(x))
    rate = keras.optimizers.schedules.ExponentialDecay(rate, steps // 3, 0.5)
    loss = lambda y, f: -ops.sum(log_density(y, f), axis=-1)  # noqa: E731
    model.compile(keras.optimizers.Adam(rate), loss, steps_per_execution=50)
    model.optimizer.build(model.trainable_variables)
    rows = np.tile(np.arange(len(x)), 16 * steps // 10)
    options = {"batch_size": 16 * len(x), "shuffle": False, "verbose": 0}
    callbacks = [] if warm_up is None else [ibnn.KLAnnealing(warm_up)]
    model.fit(x[rows], y[rows, None], epochs=10, callbacks=callbacks, **options)
    return model.layers[-1]


class TestTwoModes:
    """y = (w x)^2 + N(0, 0.4^2): the data do not show the sign of w, and the modes are narrow."""

    noise = 0.4

    def data(self):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(8, 1))
        return x, x[:, 0] ** 2 + self.noise * rng.normal(size=8)

    def log_density(self, y, f):
        return -((y - f * f) ** 2) / (2 * self.noise**2) - np.log(2 * np.pi * self.noise**2) / 2

    def log_likelihood(self, weights):
        x, y = self.data()
        return self.log_density(y[:, None], x @ weights.T).sum(axis=0)

    def evidence(self):
        w = np.linspace(-6, 6, 20_001)
        return np.log(
            np.trapezoid(np.exp(self.log_likelihood(w[:, None]) + stats.norm.logpdf(w)), w)
        )

    def mean_field(self):
        """Return the bound of the best Gaussian."""
        nodes, mass = np.polynomial.hermite_e.hermegauss(60)

        def loss(parameters):
            mean, scale = parameters[0], np.exp(parameters[1])
            likelihood = mass @ self.log_likelihood((mean + scale * nodes)[:, None]) / mass.sum()
            return (mean**2 + scale**2 - 1) / 2 - parameters[1] - likelihood

        starts = [(mean, log_scale) for mean in (0, 1) for log_scale in (-2, -1, 0)]
        return -min(optimize.minimize(loss, x, method="Nelder-Mead").fun for x in starts)

    def check(self, layer, gain):
        found = log_weights(layer, self.log_likelihood)
        assert self.mean_field() + gain < found.mean() < self.evidence()
        assert log_mean(found) == pytest.approx(self.evidence(), abs=0.05)

    def test_the_best_gaussian_loses_what_the_sign_tells(self):
        assert self.evidence() - self.mean_field() == pytest.approx(np.log(2), abs=0.05)

    def test_a_flow_has_room_for_both(self):
        layer = ibnn.MNF([ibnn.flows.Planar()], [], initial_scale=0.13, z_scale=0.04).wrap(
            layers.Dense(1, use_bias=False, kernel_initializer="ones"), train_size=8
        )
        layer.build((None, 1))
        posterior = layer.posterior
        posterior.z.affine.shift.assign([0.0])
        # z is 0.71 * sign(z_0), and half a Gaussian around it; r knows the sign from W.
        for weight, value in (
            (posterior.z.flows[0].u, 0.71),
            (posterior.z.flows[0].w, 1e5),
            (posterior.auxiliary_vector, 5.0),
            (posterior.auxiliary_loc, 0.0),
            (posterior.auxiliary_loc_slope, 0.75),
            (posterior.auxiliary_log_scale, -3.7),
        ):
            weight.assign([value])
        # Draws never come between the modes, so importance sampling misses what r has there.
        found = log_weights(layer, self.log_likelihood).mean()
        assert self.mean_field() + 0.4 < found < self.evidence()

    def test_importance_sampling_gives_the_evidence(self):
        flows = [ibnn.flows.Planar()], [ibnn.flows.Planar()]
        layer = ibnn.MNF(*flows, initial_scale=0.7, z_scale=0.6).wrap(
            layers.Dense(1, use_bias=False, kernel_initializer="ones"), train_size=8
        )
        layer.build((None, 1))
        keras.utils.set_random_seed(0)
        perturb(layer.posterior.z.flows[0], 1, size=0.5)
        perturb(layer.posterior.auxiliary_flows[0], 2, size=0.5)
        layer.posterior.auxiliary_loc_slope.assign([0.5])
        found = log_weights(layer, self.log_likelihood, draws=200_000)
        assert found.mean() < self.evidence()
        assert log_mean(found) == pytest.approx(self.evidence(), abs=0.05)

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:`train_size` is 8")
    def test_fit_finds_both(self):
        planar = [ibnn.flows.Planar() for _ in range(4)]
        # The weight starts as wide as the prior, and its noise given z narrow.
        template = ibnn.MNF(planar, planar, z_scale=9.0, initial_scale=0.1, seed=0)
        options = {"start": 0.1, "steps": 2000, "rate": 0.03, "warm_up": 5}
        self.check(fitted(*self.data(), self.log_density, template=template, **options), gain=0.2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`train_size` is 16")
def test_fit_learns_correlations():
    """The inputs are correlated, and so are the weights of the exact posterior."""
    rng, exact = np.random.default_rng(3), mean_field.TestBayesianLinearRegression()
    x = rng.normal(size=(exact.size, 2)) @ [[1.0, 0.97], [0.0, 0.25]]
    y = x @ [0.7, 0.9] + exact.noise * rng.normal(size=exact.size)
    precision = x.T @ x / exact.noise**2 + np.eye(2)
    mean = np.linalg.solve(precision, x.T @ y / exact.noise**2)
    best = exact.bound(x, y, mean, 1 / np.diag(precision))

    def log_density(y, f):
        return -((y - f) ** 2) / (2 * exact.noise**2) - np.log(2 * np.pi * exact.noise**2) / 2

    template = ibnn.MNF(initial_scale=0.1, seed=0)
    layer = fitted(x, y, log_density, 1.0, template, steps=4000, rate=0.01)
    found = log_weights(layer, lambda w: log_density(y[:, None], x @ w.T).sum(axis=0))
    assert best + 0.3 < found.mean() < exact.evidence(x, y)
    assert log_mean(found) == pytest.approx(exact.evidence(x, y), abs=0.1)


@pytest.mark.parametrize("kind", ["dense", pytest.param("conv2d", marks=pytest.mark.slow)])
def test_checklist(kind, tmp_path):
    make, shape = LAYERS[kind]
    options = {"dense": {"flows": [ibnn.flows.Planar()], "auxiliary_flows": []}, "conv2d": {}}
    made = ibnn.MNF(**options[kind])
    counts = {"dense": (13, 2), "conv2d": (26, 2)}[kind]
    check_layer(
        lambda: made.wrap(make(), train_size=10),
        shape,
        output_shape=make().compute_output_shape((None, *shape))[1:],
        trainable=counts[0],
        non_trainable=counts[1],
        folder=tmp_path,
    )


@pytest.mark.slow
def test_a_model_is_trained_saved_exported_and_folded(tmp_path):
    few = ibnn.MNF([], [ibnn.flows.Planar()], estimator="shared")
    templates = {"hidden": few, "logits": ibnn.MNF(beta=0.5)}
    model = compiled(ibnn.to_stochastic(network(), templates, train_size=64))
    model.optimizer.build(model.trainable_variables)  # else the first step is traced twice
    log = keras.callbacks.History()
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[ibnn.KLAnnealing(2), ibnn.PosteriorLog(), log])
    assert log.history["beta"] == pytest.approx([0.0, 0.5])
    betas = [weight.path for weight in model.weights if weight.name == "beta"]
    assert betas == ["hidden/posterior/beta", "logits/posterior/beta"]
    use(model, tmp_path)
    plain = ibnn.to_deterministic(model)
    with ibnn.noise_off(model):
        np.testing.assert_allclose(numpy(plain(X)), numpy(model(X)), atol=1e-5)


def test_the_log_has_the_spread_of_the_weights():
    layer, x = wrapped("dense")
    kernel, scale = layer.layer.get_weights()[0], numpy(layer.posterior.scales()[0])
    z_std = numpy(layer.posterior.z.summary().z).std(axis=0)
    expected = np.sqrt(scale**2 + (z_std[:, None] * kernel) ** 2)
    found = ibnn.training.callbacks.posterior_statistics(layer)["z_std"]
    assert found == pytest.approx(expected.mean(), rel=1e-4)


def test_pretrained_weights_carry_over():
    det = network()
    sto = ibnn.to_stochastic(det, ibnn.MNF(), train_size=64)
    with ibnn.noise_off(sto):  # z starts at a mean of 1
        np.testing.assert_allclose(numpy(sto(X)), numpy(det(X)), atol=1e-5)


@pytest.mark.parametrize("shape", [(1,), (4, 4, 1)])
def test_z_of_one_channel_has_no_couplings(shape, tmp_path):
    keras.utils.set_random_seed(0)
    body = [layers.Dense(3, "tanh")] if len(shape) == 1 else [layers.Conv2D(1, 2), layers.Flatten()]
    det = keras.Sequential([keras.Input(shape), *body, layers.Dense(1)])
    sto = ibnn.to_stochastic(det, ibnn.MNF(z_scale=0.5, seed=0), train_size=8)
    first, last = (layer.posterior for layer in ibnn.stochastic_layers(sto))
    assert (len(first.flows), len(first.auxiliary_flows)) == (0, 0)
    assert (len(last.flows), len(last.auxiliary_flows)) == (2, 2)
    z, kl = first.z.sample_and_kl((4000,))
    assert np.std(numpy(z)) == pytest.approx(0.5, rel=0.1)

    perturb(first, 1)
    x = normal(8, *shape)
    sto.compile("sgd", "mse")
    sto.fit(x, np.ones((8, 1)), epochs=1, verbose=0)
    sto.save(tmp_path / "sto.keras")
    again = keras.saving.load_model(tmp_path / "sto.keras")
    expected = predict_without_noise(sto, x)
    np.testing.assert_allclose(predict_without_noise(again, x), expected, atol=1e-6)
    np.testing.assert_allclose(numpy(ibnn.to_deterministic(sto)(x)), expected, atol=1e-5)


def test_half_precision(policy):
    policy("mixed_bfloat16")
    model = compiled(ibnn.to_stochastic(network(), ibnn.MNF(), train_size=64))
    # TensorFlow traces for longer than the one step takes; JAX compiles every operation by itself.
    model.run_eagerly = keras.backend.backend() == "tensorflow"
    assert np.isfinite(model.fit(X, Y, batch_size=64, epochs=1, verbose=0).history["loss"]).all()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ibnn.MNF().wrap(layers.DepthwiseConv2D(2), 10), "MNF needs one of Dense, Conv1D"),
        (lambda: ibnn.MNF().wrap(layers.EinsumDense("ab,bc->ac", 2), 10), "Use ibnn.MeanField"),
        (lambda: ibnn.MNF(estimator="local").wrap(layers.Conv2D(2, 2), 10), "'flipout'"),
        (lambda: ibnn.MNF([layers.Dense(2)]), "`flows` must be a list of flows"),
        (lambda: ibnn.MNF(auxiliary_flows=3), "`auxiliary_flows` must be a list of flows"),
        (lambda: ibnn.MNF(z_scale=-1), "`z_scale` must be"),
        (lambda: ibnn.Stochastic(layers.Dense(2), ibnn.MNF(), 10), r"MNF\(...\).wrap\(layer, tr"),
        (lambda: ibnn.flows.AffineCoupling(mask=[0.5, 1, 0]), "`mask` must be 'halves'"),
        (lambda: ibnn.flows.AffineCoupling(mask=[[1, 0]]), "`mask` must be 'halves'"),
        (lambda: ibnn.MeanField(prior=tfd.Bernoulli(0.5)), "over real numbers"),
        (
            lambda: (
                ibnn.MNF([ibnn.flows.AffineCoupling()]).wrap(layers.Dense(2), 10).build((None, 1))
            ),
            r"at least 2 channels; got 1. For one, use flows.Planar\(\) among the flows",
        ),
    ],
)
def test_errors_name_what_is_right(make, match):
    with pytest.raises(ValueError, match=match):
        make()
