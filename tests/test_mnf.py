"""Multiplicative normalizing flows: weights, the bound of the KL, and what it gains."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from scipy import stats

import tfp_ibnn as ibnn
from tests import test_mean_field as mean_field
from tests.layer_checklist import check_layer, numpy
from tests.registry import perturb
from tests.test_stranger import X, Y, compiled, network, use
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
    layer, x = wrapped("dense")
    with ibnn.noise.scope(seed=0, groups=4000):
        y = numpy(layer(np.repeat(x[:1], 4000, axis=0)))
    z = numpy(layer.posterior.z.sample_and_kl((4000,))[0])
    kernel, bias = layer.layer.get_weights()
    variance = np.cov((z * x[0]) @ kernel, rowvar=False).diagonal()
    variance = variance + x[0] ** 2 @ numpy(layer.posterior.scales()[0]) ** 2
    np.testing.assert_allclose(y.mean(axis=0), (z * x[0]).mean(axis=0) @ kernel + bias, atol=0.15)
    np.testing.assert_allclose(y.var(axis=0), variance, rtol=0.15)


class TestBound:
    """One weight, so that every integral is a sum over a grid."""

    mean, points = 0.8, 24

    def posterior(self):
        flows = [ibnn.flows.Planar()], [ibnn.flows.Planar()]
        posterior = ibnn.MNF(*flows, initial_scale=0.3, z_scale=0.6, dtype="float64")
        posterior.build({"kernel": (1, 1)})
        perturb(posterior, 3)
        return posterior

    def at(self, posterior, z_noise, noise):
        given = iter([np.array([[z_noise]]), np.array([[noise]])])
        kl, entropy = posterior.kl_and_entropy(
            [ops.full((1, 1), self.mean, dtype="float64")], lambda shape: next(given)
        )
        return float(kl), float(entropy)

    def auxiliary(self, posterior, weight):
        """Return r(z | W) as TensorFlow Probability has it."""
        summary = np.tanh(numpy(posterior.auxiliary_vector) * weight)
        loc = posterior.auxiliary_loc + posterior.auxiliary_loc_slope * summary
        log_scale = posterior.auxiliary_log_scale + posterior.auxiliary_log_scale_slope * summary
        inverse = tfb.Invert(posterior.auxiliary_flows[0].bijector())
        given = tfd.MultivariateNormalDiag(loc, ops.exp(log_scale))
        return tfd.TransformedDistribution(given, inverse)

    def test_it_is_what_the_densities_say(self):
        posterior = self.posterior()
        scale = float(numpy(posterior.scales()[0])[0, 0])
        for z_noise, noise in ((0.4, -1.1), (-1.3, 0.2)):
            z = numpy(posterior.z.transform(np.array([[z_noise]])).z)
            mean = self.mean * z[0, 0]
            weight = mean + scale * noise
            expected = (mean**2 + scale**2 - 1) / 2 - np.log(scale)
            expected += float(posterior.z.distribution().log_prob(z)[0])
            expected -= float(self.auxiliary(posterior, weight).log_prob(z)[0])
            assert self.at(posterior, z_noise, noise)[0] == pytest.approx(expected, abs=1e-4)

    def test_the_auxiliary_distribution_is_normalized(self):
        posterior, z = self.posterior(), np.linspace(-40, 40, 20_001)
        for weight in (-1.0, 2.0):
            density = np.exp(numpy(self.auxiliary(posterior, weight).log_prob(z[:, None])))
            assert np.trapezoid(density, z) == pytest.approx(1, abs=1e-3)

    def test_it_is_above_the_kl_and_the_entropy_below(self):
        posterior = self.posterior()
        scale = float(numpy(posterior.scales()[0])[0, 0])
        nodes, mass = np.polynomial.hermite_e.hermegauss(self.points)
        mass = mass / mass.sum()
        found = [[self.at(posterior, a, b) for b in nodes] for a in nodes]
        kl, entropy = np.einsum("i,j,ijk->k", mass, mass, found)
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


class TestLinearModel(mean_field.TestBayesianLinearRegression):
    """Inputs that are correlated, and so are the weights of the exact posterior."""

    units = 1

    def exact(self):
        rng = np.random.default_rng(3)
        x = rng.normal(size=(self.size, 2)) @ [[1.0, 0.97], [0.0, 0.25]]
        y = x @ [0.7, 0.9] + self.noise * rng.normal(size=self.size)
        precision = x.T @ x / self.noise**2 + np.eye(2)
        mean = np.linalg.solve(precision, x.T @ y / self.noise**2)
        return x, y, mean, 1 / np.diag(precision)

    def check(self, estimator, train_size):
        """Fit; the bound must lie between that of the best mean field and the evidence."""
        x, y, mean, variance = self.exact()
        keras.utils.set_random_seed(0)
        det = keras.Sequential([keras.Input((2,)), layers.Dense(1, use_bias=False)])
        template = ibnn.MNF(estimator=estimator, initial_scale=0.1, seed=0)
        model = ibnn.to_stochastic(det, template, train_size=train_size)
        rate = keras.optimizers.schedules.ExponentialDecay(0.02, 700, 0.5)
        model.compile(keras.optimizers.Adam(rate), self.nll)
        rows = np.tile(np.arange(self.size), 2000)
        options = {"batch_size": self.size, "shuffle": False, "verbose": 0}
        logs = model.fit(x[rows], y[rows, None], epochs=2, **options).history
        reported = -self.size * logs["loss"][-1]
        assert self.bound(x, y, mean, variance) + 0.2 < reported < self.evidence(x, y)

    @pytest.mark.parametrize("estimator", ["flipout"])
    def test_fit_reaches_the_exact_posterior(self, estimator):
        self.check(estimator, self.size)


@pytest.mark.parametrize("kind", ["dense", "conv2d"])
def test_checklist(kind, tmp_path):
    make, shape = LAYERS[kind]
    options = {"dense": {"flows": [ibnn.flows.Planar()], "auxiliary_flows": []}, "conv2d": {}}
    made = ibnn.MNF(**options[kind])
    counts = {"dense": (13, 3), "conv2d": (26, 3)}[kind]
    check_layer(
        lambda: made.wrap(make(), train_size=10),
        shape,
        output_shape=make().compute_output_shape((None, *shape))[1:],
        trainable=counts[0],
        non_trainable=counts[1],
        folder=tmp_path,
    )


def test_a_model_is_trained_saved_exported_and_folded(tmp_path):
    model = compiled(ibnn.to_stochastic(network(), ibnn.MNF(), train_size=64))
    model.optimizer.build(model.trainable_variables)  # else the first step is traced twice
    model.fit(X, Y, epochs=2, verbose=0)
    use(model, tmp_path)
    plain = ibnn.to_deterministic(model)
    with ibnn.noise_off(model):
        np.testing.assert_allclose(numpy(plain(X)), numpy(model(X)), atol=1e-5)


def test_pretrained_weights_carry_over():
    det = network()
    sto = ibnn.to_stochastic(det, ibnn.MNF(), train_size=64)
    with ibnn.noise_off(sto):  # z starts at a mean of 1
        np.testing.assert_allclose(numpy(sto(X)), numpy(det(X)), atol=1e-5)


def test_half_precision(policy):
    policy("mixed_bfloat16")
    model = compiled(ibnn.to_stochastic(network(), ibnn.MNF(), train_size=64))
    assert np.isfinite(model.fit(X, Y, epochs=1, verbose=0).history["loss"]).all()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ibnn.MNF().wrap(layers.DepthwiseConv2D(2), 10), "MNF needs one of Dense, Conv1D"),
        (lambda: ibnn.MNF().wrap(layers.EinsumDense("ab,bc->ac", 2), 10), "Use ibnn.MeanField"),
        (lambda: ibnn.MNF(estimator="local").wrap(layers.Conv2D(2, 2), 10), "'flipout'"),
        (lambda: ibnn.MNF([layers.Dense(2)]), "`flows` must be a list of flows"),
        (lambda: ibnn.MNF(auxiliary_flows=3), "`auxiliary_flows` must be a list of flows"),
        (lambda: ibnn.MNF(z_scale=-1), "`z_scale` must be"),
        (lambda: ibnn.MNF().wrap(layers.Dense(2), 10).build((None, 1)), "at least 2 channels"),
    ],
)
def test_errors_name_what_is_right(make, match):
    with pytest.raises(ValueError, match=match):
        make()
