"""Mean-field weight posteriors: estimators, gradients, and the exact answer of a linear model."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfp_ibnn as ibnn
from tests.autodiff import jit, weight_gradients
from tests.layer_checklist import check_layer, numpy, predict_without_noise
from tests.precision import after_products
from tests.whole.test_stranger import X, Y, compiled, network, use
from tfp_ibnn.layers.mean_field import Explicit, Flipped

RNG = np.random.default_rng(0)

# Each with the shape of an input without the batch.
LAYERS = {
    "dense": (lambda: layers.Dense(2), (3,)),
    "dense_positions": (lambda: layers.Dense(2), (2, 3)),
    "einsum": (lambda: layers.EinsumDense("abc,cde->abde", (2, 3, 2), bias_axes="de"), (2, 2)),
    "einsum_dots": (lambda: layers.EinsumDense("...c,cd->...d", 3, bias_axes="d"), (2, 2)),
    "conv1d": (lambda: layers.Conv1D(2, 2, padding="causal"), (3, 2)),
    "conv2d": (lambda: layers.Conv2D(2, 2, strides=2, padding="same"), (3, 3, 2)),
    "conv2d_groups": (lambda: layers.Conv2D(4, (1, 2), groups=2), (2, 2, 4)),
    "conv3d": (lambda: layers.Conv3D(2, (1, 2, 2)), (2, 3, 2, 1)),
    "depthwise1d": (lambda: layers.DepthwiseConv1D(2, depth_multiplier=2), (3, 2)),
    "depthwise2d": (lambda: layers.DepthwiseConv2D(2), (3, 2, 2)),
    "separable1d": (lambda: layers.SeparableConv1D(2, 2), (3, 2)),
    "separable2d": (lambda: layers.SeparableConv2D(2, (1, 2), depth_multiplier=2), (3, 2, 2)),
    "transpose1d": (lambda: layers.Conv1DTranspose(2, 2, strides=2), (2, 2)),
    "transpose2d": (lambda: layers.Conv2DTranspose(2, (1, 2)), (2, 2, 2)),
    "transpose3d": (lambda: layers.Conv3DTranspose(1, 2), (2, 1, 1, 2)),
}


def wrapped(layer, input_shape, **options):
    """Return a built mean-field layer, with scales and biases of different sizes."""
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(1)
    made = ibnn.MeanField(**options).wrap(layer, train_size=10)
    made.build((None, *input_shape))
    for raw in made.posterior.raw_scales:
        raw.assign(rng.normal(-1, 0.5, raw.shape).astype("float32"))
    if layer.bias is not None:
        layer.bias.assign(rng.normal(size=layer.bias.shape).astype("float32"))
    return made


def normal(*shape):
    return RNG.standard_normal(shape).astype("float32")


def weights_at(layer, noise):
    """Return the weights of the plain layer at a draw of noise: kernels, then the bias."""
    means = [numpy(weight) for weight in layer.layer.weights]
    scales = [*map(numpy, layer.posterior.scales())]
    moved = [x + s * n for x, s, n in zip(means, scales, noise, strict=False)]
    return moved + means[len(moved) :]


def outputs_at(layer, x, weights):
    """Return what Keras's own layer gives with these weights."""
    plain, before = layer.layer, layer.layer.get_weights()
    plain.set_weights(weights)
    outputs = numpy(plain(x))
    plain.set_weights(before)
    return outputs


def moments(layer, x):
    """Return mean (n,) and covariance (n, n) of all outputs for Gaussian weights, exactly."""
    shapes = [scale.shape for scale in layer.posterior.scales()]
    zero = [np.zeros(shape, "float32") for shape in shapes]
    mean, columns = outputs_at(layer, x, weights_at(layer, zero)), []
    for array in zero:
        for entry in np.ndindex(array.shape):
            array[entry] = 1
            columns.append((outputs_at(layer, x, weights_at(layer, zero)) - mean).ravel())
            array[entry] = 0
    return mean.ravel(), np.transpose(columns) @ columns


@pytest.mark.parametrize("kind", LAYERS)
def test_explicit_weights_are_a_draw_for_each_block(kind):
    make, shape = LAYERS[kind]
    layer = wrapped(make(), shape, bias="stochastic", estimator="shared")
    x, noise = normal(4, *shape), [normal(2, *x.shape) for x in layer.posterior.scales()]
    got = numpy(layer.apply(x, Explicit(noise), 2))
    for block in range(2):
        rows = slice(2 * block, 2 * block + 2)
        expected = outputs_at(layer, x[rows], weights_at(layer, [n[block] for n in noise]))
        np.testing.assert_allclose(got[rows], expected, atol=2e-6)
    with ibnn.noise_off(layer):
        expected = outputs_at(layer, x, layer.layer.get_weights())
        np.testing.assert_allclose(numpy(layer(x)), expected, atol=1e-6)
        np.testing.assert_allclose(numpy(layer(x, training=True)), expected, atol=1e-6)


@pytest.mark.parametrize("kind", LAYERS)
def test_flipout_is_a_weight_draw_of_its_own_for_each_example(kind):
    """Its output is Keras's at weights whose noise has other signs, the same at all positions.

    Signs do not change the distribution of the noise, so each example has an exact draw, jointly
    over positions and channels.
    """
    make, shape = LAYERS[kind]
    layer = wrapped(make(), shape, bias="stochastic")
    x = normal(2, *shape)
    signs = [RNG.choice([-1.0, 1.0], (2, *s)).astype("float32") for s in layer._sign_shapes]
    zero = [np.zeros(scale.shape, "float32") for scale in layer.posterior.scales()]
    mean = outputs_at(layer, x, weights_at(layer, zero))
    atol = after_products(2e-6, 4, np.abs(mean).max())
    found = [np.ones((2, *array.shape), "float32") for array in zero]
    for part, array in enumerate(zero):
        for entry in np.ndindex(array.shape):
            array[entry] = 1  # the noise of this weight alone
            moved = numpy(layer.apply(x, Flipped([n[None] for n in zero], *signs))) - mean
            plain = outputs_at(layer, x, weights_at(layer, zero)) - mean
            for row in range(2):
                sign = np.sign(np.sum(moved[row] * plain[row])) or 1
                np.testing.assert_allclose(moved[row], sign * plain[row], atol=atol)
                found[part][row][entry] = sign
            array[entry] = 0
    assert {-1, 1} == set(np.concatenate([part.ravel() for part in found]))
    noise = [normal(*array.shape) for array in zero]
    got = numpy(layer.apply(x, Flipped([n[None] for n in noise], *signs)))
    for row in range(2):
        own = [n * sign[row] for n, sign in zip(noise, found, strict=True)]
        expected = outputs_at(layer, x[row : row + 1], weights_at(layer, own))
        atol = after_products(5e-6, 4, np.abs(expected).max())
        np.testing.assert_allclose(got[row : row + 1], expected, atol=atol)


@pytest.mark.slow
def test_joint_moments_over_examples_and_positions():
    x, kinds = normal(2, 3, 1), [("flipout", True), ("shared", True), ("flipout", False)]
    made = [
        wrapped(layers.Conv1D(1, 2), (3, 1), estimator=estimator, bias="stochastic")
        for estimator, _ in kinds
    ]

    def run(key):
        with ibnn.noise.scope(seed=key):
            return [layer(x, training=kind[1]) for layer, kind in zip(made, kinds, strict=True)]

    run = jit(run, [variable for layer in made for variable in layer.variables])
    draws = [run(np.array([7, number], "int32")) for number in range(1500)]
    draws = np.array([[numpy(y).ravel() for y in row] for row in draws])
    for number, (layer, kind) in enumerate(zip(made, kinds, strict=True)):
        mean, covariance = moments(layer, x)
        if kind == ("flipout", True):  # examples are uncorrelated
            covariance = covariance * np.kron(np.eye(2), np.ones((2, 2)))
        deviation = np.sqrt(np.diag(covariance))
        found = draws[:, number]
        np.testing.assert_allclose(np.mean(found, axis=0), mean, atol=0.13 * deviation.max())
        error = (np.cov(found, rowvar=False) - covariance) / np.outer(deviation, deviation)
        assert np.abs(error).max() < 0.16  # some four standard errors


def test_moments_of_local_reparameterization():
    layer = wrapped(layers.Dense(2), (3,), estimator="local", bias="stochastic")
    x = np.repeat(normal(1, 3), 20_000, axis=0)
    draws = numpy(layer(x, training=True))
    mean, covariance = moments(layer, x[:1])
    np.testing.assert_allclose(np.mean(draws, axis=0), mean, atol=0.02)
    np.testing.assert_allclose(np.cov(draws, rowvar=False), covariance, atol=0.04)
    # Elsewhere it is explicit weights: all examples have the same.
    assert np.ptp(numpy(layer(x[:5]))[:, 0]) < 1e-6


def test_local_reparameterization_has_gradients_at_inputs_of_zero():
    layer = wrapped(layers.Dense(2), (3,), estimator="local")
    x = np.zeros((4, 3), "float32")
    found = weight_gradients(
        lambda: ops.sum(ops.square(layer(x, training=True))), layer.trainable_variables
    )
    assert all(np.all(np.isfinite(gradient)) for gradient in found)


def test_flipout_and_local_have_gradients_of_less_variance():
    x, y = normal(64, 5), normal(64, 3)
    variance = {}
    for estimator in ("shared", "flipout", "local"):
        layer = wrapped(layers.Dense(3), (5,), estimator=estimator)
        model = keras.Sequential([keras.Input((5,)), layer])
        model.compile(keras.optimizers.SGD(1.0), "mse")
        start, steps = model.get_weights(), []
        for _ in range(30):
            model.train_on_batch(x, y)
            steps.append(np.concatenate([w.ravel() for w in model.get_weights()]))
            model.set_weights(start)
        variance[estimator] = np.var(steps, axis=0).sum()
    assert variance["flipout"] < 0.4 * variance["shared"]
    assert variance["local"] < 0.4 * variance["shared"]


class TestBayesianLinearRegression:
    """y = x w + N(0, 0.5^2), w ~ N(0, 1): the best mean-field posterior is known.

    The layer has many units, which all learn the same: their average shows less of the noise of
    single steps.
    """

    noise, size, units = 0.5, 16, 1024

    def exact(self):
        """Return the data, and means and variances of the best mean-field posterior."""
        rng = np.random.default_rng(3)
        x = rng.normal(size=(self.size, 2)) @ [[1.0, 0.6], [0.0, 0.8]]
        y = x @ [0.7, -1.2] + self.noise * rng.normal(size=self.size)
        precision = x.T @ x / self.noise**2 + np.eye(2)
        mean = np.linalg.solve(precision, x.T @ y / self.noise**2)
        return x, y, mean, 1 / np.diag(precision)

    def bound(self, x, y, mean, variance):
        """Return the ELBO of a Gaussian posterior."""
        error = np.sum((y - x @ mean) ** 2) + np.sum(x**2 @ variance)
        likelihood = -error / (2 * self.noise**2)
        likelihood -= self.size * np.log(2 * np.pi * self.noise**2) / 2
        return likelihood - np.sum(mean**2 + variance - 1 - np.log(variance)) / 2

    def evidence(self, x, y):
        """Return the log of the density of y, w integrated out."""
        covariance = x @ x.T + self.noise**2 * np.eye(self.size)
        distance = y @ np.linalg.solve(covariance, y)
        return -(distance + np.linalg.slogdet(2 * np.pi * covariance)[1]) / 2

    def nll(self, y, f):
        """Return the negative log-likelihood of all units."""
        constant = np.log(2 * np.pi * self.noise**2) / 2
        return ops.sum(ops.square(y - f) / (2 * self.noise**2) + constant, axis=-1)

    def check(self, estimator, train_size):
        """Fit, and compare with the exact answer."""
        x, y, mean, variance = self.exact()
        keras.utils.set_random_seed(0)
        det = keras.Sequential([keras.Input((2,)), layers.Dense(self.units, use_bias=False)])
        template = ibnn.MeanField(estimator=estimator, initial_scale=0.1, seed=0)
        model = ibnn.to_stochastic(det, template, train_size=train_size)
        rate = keras.optimizers.schedules.ExponentialDecay(0.05, 100, 0.5)
        model.compile(keras.optimizers.Adam(rate), self.nll)
        rows = np.tile(np.arange(self.size), 400)
        targets = np.repeat(y[rows, None], self.units, axis=1)
        options = {"batch_size": self.size, "steps_per_epoch": 400, "shuffle": False}
        logs = model.fit(x[rows], targets, epochs=2, verbose=0, **options).history
        layer = model.layers[-1]
        found = numpy(layer.layer.kernel), numpy(layer.posterior.scales()[0]) ** 2
        np.testing.assert_allclose(np.mean(found[0], axis=1), mean, atol=1e-2)
        np.testing.assert_allclose(np.mean(found[1], axis=1), variance, rtol=1e-2)
        best = self.bound(x, y, mean, variance)
        units = zip(*(part.T for part in found), strict=True)
        assert np.mean([self.bound(x, y, *q) for q in units]) == pytest.approx(best, abs=1e-2)
        reported = -self.size * logs["loss"][-1] / self.units
        assert reported == pytest.approx(best, rel=1e-2)
        assert best < self.evidence(x, y)

    @pytest.mark.parametrize(
        "estimator",
        ["flipout", *(pytest.param(x, marks=pytest.mark.slow) for x in ("shared", "local"))],
    )
    def test_fit_reaches_the_exact_posterior(self, estimator):
        self.check(estimator, self.size)

    @pytest.mark.slow
    def test_a_wrong_train_size_does_not(self):
        with pytest.raises(AssertionError):
            self.check("local", 4 * self.size)


def test_a_layer_called_twice_has_one_weight_draw_and_one_kl():
    layer = wrapped(layers.Dense(3), (3,), prior=ibnn.priors.Laplace())
    x = normal(4, 3)
    for training in (True, False):
        with ibnn.noise.scope() as opened:
            got = layer(layer(x, training=training), training=training)
        latent = opened.recall(layer)
        expected = layer.apply(layer.apply(x, latent), latent)
        np.testing.assert_allclose(numpy(got), numpy(expected), atol=1e-5)
        assert len(opened.kl_by_layer) == 1

    inputs = keras.Input((3,))
    model = ibnn.StochasticModel(inputs, layer(layer(inputs)))
    model.compile("sgd", "mse", kl_scale=1.0)
    model.optimizer.build(model.trainable_variables)
    logs = model.evaluate(x, x, return_dict=True, verbose=0)
    assert logs["kl"] / 10 == pytest.approx(logs["loss"] - logs["nll"], rel=1e-4)

    local = wrapped(layers.Dense(3), (3,), estimator="local")
    with pytest.raises(ValueError, match=r"called twice.*estimator='flipout'"):
        ibnn.StochasticModel(inputs, local(local(inputs)))(x, training=True)


@pytest.mark.slow
def test_pretrained_weights_carry_over_and_back(tmp_path):
    det = network()
    template = {"hidden": ibnn.MeanField(estimator="local", seed=1), ".*": ibnn.NormalAffine()}
    model = compiled(ibnn.to_stochastic(det, template, train_size=64))
    hidden, logits = ibnn.stochastic_layers(model)
    np.testing.assert_array_equal(hidden.layer.get_weights()[0], det.layers[0].get_weights()[0])
    assert type(logits) is ibnn.Stochastic
    log = keras.callbacks.History()
    optimizer = ibnn.two_speed("adam", stochastic_lr=0.1)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.optimizer.build(model.trainable_variables)
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[ibnn.KLAnnealing(4), ibnn.PosteriorLog(), log])
    assert log.history["beta"] == pytest.approx([0.0, 0.25])
    # z_std is the mean scale, which `stochastic_lr` moves.
    scale = numpy(hidden.posterior.scales()[0])
    assert log.history["hidden/z_std"][-1] == pytest.approx(scale.mean(), rel=1e-3)
    assert abs(scale.mean() - 0.01) > 1e-3
    use(model, tmp_path)

    with ibnn.noise_off(model):
        expected = model.predict(X, verbose=0)
    plain = ibnn.to_deterministic(model)
    assert type(plain.layers[1]) is layers.Dense
    np.testing.assert_allclose(plain.predict(X, verbose=0), expected, atol=1e-5)
    ibnn.freeze(model, "stochastic")
    trained = {weight.path for weight in model.trainable_weights}
    assert hidden.layer.kernel.path in trained
    assert not any("raw_scale" in path for path in trained)


def test_moped_starts_at_the_pretrained_weights():
    det = network()
    template = ibnn.MeanField(moped=0.2, prior_scale=0.5)
    model = ibnn.to_stochastic(det, template, train_size=64)
    for layer, plain in zip(ibnn.stochastic_layers(model), det.layers[::2], strict=True):
        kernel = plain.get_weights()[0]
        np.testing.assert_allclose(
            numpy(layer.posterior.scales()[0]), np.maximum(0.2 * np.abs(kernel), 1e-5), atol=2e-6
        )
        ratio = np.maximum(0.2 * np.abs(kernel), 1e-5) / 0.5
        expected = np.sum((ratio**2 - 1) / 2 - np.log(ratio))
        assert float(layer.summary().kl) == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_monte_carlo_draws_one_set_of_weights_for_all_examples():
    template = ibnn.MeanField(initial_scale=0.3)
    model = compiled(ibnn.to_stochastic(network(), template, train_size=64))
    mc = ibnn.MonteCarlo(model, samples=6, seed=0, chunk_size=2)
    together = mc.predict(X, batch_size=64, verbose=0)["mean"]
    apart = mc.predict(X, batch_size=10, verbose=0)["mean"]
    np.testing.assert_allclose(together, apart, atol=1e-5)
    own = ibnn.MonteCarlo(model, samples=3, seed=0, independent=True)
    same = numpy(own(np.repeat(X[:1], 4, axis=0))["mean"])
    assert np.ptp(same[:, 0]) > 1e-3
    with pytest.raises(ValueError, match="antithetic"):
        ibnn.MonteCarlo(model, samples=4, sampling="qmc")(X)


def test_large_weights_are_drawn_for_few_networks_at_once():
    inputs = keras.Input((512,))
    det = keras.Model(inputs, layers.Dense(2048)(inputs))
    model = ibnn.to_stochastic(det, ibnn.MeanField(), train_size=64)
    sampler = ibnn.MonteCarlo(model, samples=64, seed=0, head="point")._sampler
    chunks = sampler.chunks(np.zeros((1, 512), "float32"), ops.convert_to_tensor([0, 0]))
    assert int(chunks.size) <= 4


@pytest.mark.parametrize("kind", ["dense", "conv2d"])
def test_checklist(kind, tmp_path):
    make, shape = LAYERS[kind]
    options = {"dense": {}, "conv2d": {"prior": ibnn.priors.ScaleMixture(), "bias": "stochastic"}}
    made = ibnn.MeanField(**options[kind])
    check_layer(
        lambda: made.wrap(make(), train_size=10),
        shape,
        output_shape=make().compute_output_shape((None, *shape))[1:],
        trainable=4 if options[kind] else 3,
        non_trainable=2,
        folder=tmp_path,
    )


def test_noise_is_not_lost_in_half_precision():
    layer = layers.Dense(64, use_bias=False, dtype="mixed_bfloat16")
    made = ibnn.MeanField(initial_scale=1e-3).wrap(layer, train_size=10)
    made.build((None, 256))
    # Weights of 1 with noise of 0.001, which bfloat16 cannot add; the outputs are near 0.
    layer.kernel.assign(np.tile([[1.0], [-1.0]], (128, 64)))
    x = np.ones((1, 256), "float32")
    for training in (False, True):
        y = ops.cast(made(x, training=training), "float32")
        assert float(np.std(numpy(y))) == pytest.approx(16e-3, rel=0.35)


@pytest.mark.parametrize("posterior", [ibnn.MeanField, ibnn.MNF])
def test_float64_is_kept(posterior):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,), dtype="float64")
    hidden = layers.Dense(4, "tanh", dtype="float64")(inputs)
    det = keras.Model(inputs, layers.Dense(2, dtype="float64")(hidden), dtype="float64")
    sto = ibnn.to_stochastic(det, posterior(seed=0), train_size=10)
    x = RNG.standard_normal((5, 3))
    np.testing.assert_allclose(predict_without_noise(sto, x), numpy(det(x)), atol=1e-14)
    np.testing.assert_allclose(numpy(ibnn.to_deterministic(sto)(x)), numpy(det(x)), atol=1e-14)
    sto.compile("sgd", "mse")
    assert np.isfinite(sto.fit(x, np.ones((5, 2)), verbose=0).history["loss"]).all()


@pytest.mark.parametrize("posterior", [ibnn.MeanField(moped=0.1), ibnn.MNF()])
@pytest.mark.parametrize(("outer", "inner"), [("float64", "float32"), ("float32", "float64")])
def test_a_layer_inside_of_another_precision(posterior, outer, inner):
    layer = posterior.wrap(layers.Dense(2, "relu", dtype=inner), train_size=10, dtype=outer)
    x = RNG.standard_normal((4, 3)).astype(outer)
    for training in (False, True):
        assert keras.backend.standardize_dtype(layer(x, training=training).dtype) == inner
    assert layer.posterior.dtype == "float64"
    with ibnn.noise_off(layer):
        expected = numpy(layer.layer(x.astype(inner)))
        rounding = float(np.finfo("float32" if "float32" in (outer, inner) else inner).eps)
        np.testing.assert_allclose(numpy(layer(x)), expected, atol=4 * rounding)


def test_compiled():
    layer = wrapped(layers.Conv1D(2, 2, activation="relu"), (3, 2))
    x = normal(4, 3, 2)

    def run(x):
        with ibnn.noise.scope(seed=1):
            first = layer(x, training=True)
        with ibnn.noise.scope(seed=1, groups=2):
            return first, layer(x)

    expected = run(ops.convert_to_tensor(x))
    got = jit(run, layer.variables)(x)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(numpy(one), numpy(other), atol=1e-5)


def test_masks_and_regularisers():
    layer = ibnn.MeanField().wrap(layers.Dense(2, activity_regularizer="l2"), train_size=10)
    assert type(layer).from_config(layer.get_config()).activity_regularizer is not None
    inputs = keras.Input((3, 4))
    outputs = layer(layers.Masking()(inputs))
    model = keras.Model(inputs, layers.GlobalAveragePooling1D()(outputs))
    x = np.ones((1, 3, 4), "float32")
    x[:, 1:] = 0
    with ibnn.noise_off(layer):
        got, loss = numpy(model(x)), float(sum(model.losses))
        expected = numpy(layer.layer(x))
        np.testing.assert_allclose(got[0], expected[0, 0], atol=1e-6)
        assert loss == pytest.approx(0.01 * np.sum(expected**2), rel=1e-4)

    template = ibnn.MeanField()
    with pytest.warns(UserWarning, match=r"kernel_regularizer.*prior twice"):
        template.wrap(layers.Dense(2, kernel_regularizer="l2"), train_size=10)
    with pytest.warns(UserWarning, match=r"depthwise_regularizer.*prior twice"):
        template.wrap(layers.SeparableConv1D(2, 2, depthwise_regularizer="l2"), train_size=10)


def test_weight_decay_counts_the_prior_twice():
    model = ibnn.to_stochastic(network(), ibnn.MeanField(), train_size=64)
    adamw = keras.optimizers.AdamW(weight_decay=0.1)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(weight_decay=0.1))
    for optimizer in (adamw, ibnn.two_speed(adamw, stochastic_lr=0.1), scaled):
        with pytest.warns(UserWarning, match=r"weight_decay.*'hidden'.*prior"):
            model.compile(optimizer, "mse")


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_tied_prior_leaves_weight_decay_to_the_regulariser():
    template = ibnn.MeanField(prior=ibnn.priors.Tied(0.1))
    template.wrap(layers.Dense(2, kernel_regularizer="l2"), train_size=10)
    model = ibnn.to_stochastic(network(), template, train_size=64)
    model.compile(keras.optimizers.AdamW(weight_decay=0.1), "mse", noise_scale=1.0)
    model = ibnn.to_stochastic(network(), ibnn.MeanField(), train_size=64)
    model.compile(keras.optimizers.Adam(), "mse", noise_scale=1.0)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ibnn.MeanField(estimator="lrt"), "'flipout', 'shared', 'local'"),
        (lambda: ibnn.MeanField(bias="random"), "'deterministic', 'stochastic'"),
        (lambda: ibnn.MeanField(initial_scale=0.0), "`initial_scale` must be above 0"),
        (lambda: ibnn.MeanField(prior=ibnn.priors.Laplace(), prior_scale=1.0), "leave `prior_s"),
        (lambda: ibnn.MeanField(prior=3.0), "method `log_prob`"),
        (lambda: ibnn.MeanField(prior=ibnn.priors.Laplace), "method `log_prob`"),
        (lambda: ibnn.MeanField().wrap(layers.LSTM(2), 10), "Dense, EinsumDense, Conv1D"),
        (
            lambda: ibnn.MeanField(estimator="local").wrap(layers.Conv2D(2, 2), 10),
            r"it is Conv2D.*'flipout'",
        ),
        (
            lambda: ibnn.MeanField(estimator="local").wrap(layers.Dense(2), 10).build((None, 3, 4)),
            r"\(None, 3, 4\).*'flipout'",
        ),
        (
            lambda: (
                ibnn.MeanField()
                .wrap(layers.EinsumDense("abc,cd->bad", (2, 3)), 10)
                .build((2, 2, 4))
            ),
            "Use estimator='shared'",
        ),
        (
            lambda: ibnn.MeanField().wrap(layers.Dense(2, lora_rank=2), 10).build((None, 3)),
            "without quantization or LoRA",
        ),
    ],
)
def test_errors_name_what_is_right(make, match):
    with pytest.raises(ValueError, match=match):
        make()
