"""IVON takes the paper's steps, finds the best diagonal Gaussian, and survives interruptions."""

import keras
import numpy as np
import pytest
from keras import ops

import tfp_ibnn as ibnn
from tests.weights.members import JAX
from tfp_ibnn.weights import ivon

X = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
Y = (X[:, 0] > 0).astype("int32")
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def optimizer(**options):
    options = {"train_size": 16, "prior_scale": 1.0, "beta_2": 0.98, **options}
    return ibnn.IVON(options.pop("learning_rate", 0.1), **options)


def network(chosen, loss=LOSS):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(chosen, loss)
    return model


def fit(model, *callbacks, **options):
    options = {"epochs": 2, "batch_size": 4, "shuffle": False, "verbose": 0, **options}
    return model.fit(X, Y, callbacks=list(callbacks), **options).history


def moments(chosen, model):
    distribution = chosen.posterior(model).distribution()
    return [ops.convert_to_numpy(x) for x in (distribution.mean(), distribution.stddev())]


def assert_same(one, other, rtol=1e-5):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)


# The algorithm


def slope(w):
    """Return the gradient of a loss that is not quadratic, so that h depends on the draw."""
    return 0.3 * np.array([1.0, 4.0, 0.5]) * w + np.sin(2 * w) + 0.1


def papers_steps(noise, start, rate, settings):
    """Return draws, mean and sigma of algorithm 1 of arXiv 2402.17641, without its first draw."""
    n, s, h_0 = settings["train_size"], settings["prior_scale"], settings["initial_hessian"]
    delta = 0.0 if s is None else 1 / (n * s**2)
    ess = n / settings["temperature"]
    b_1, b_2, radius = settings["beta_1"], settings["beta_2"], settings["clip_radius"] or np.inf
    m, h, g = start, np.full(3, h_0), np.zeros(3)
    sigma = 1 / np.sqrt(ess * (h + delta))
    theta, draws = m, []
    for t in range(1, len(noise) + 1):
        g_hat = slope(theta)
        if t > 1:
            h_hat = g_hat * (theta - m) / sigma**2
            correction = 0.5 * (1 - b_2) ** 2 * (h - h_hat) ** 2 / (h + delta)
            h = b_2 * h + (1 - b_2) * h_hat + correction
        g = b_1 * g + (1 - b_1) * g_hat
        g_bar = g / (1 - b_1**t)
        alpha = rate * (h_0 + delta)
        m = m - alpha * np.clip((g_bar + delta * m) / (h + delta), -radius, radius)
        sigma = 1 / np.sqrt(ess * (h + delta))
        theta = m + sigma * noise[t - 1]
        draws.append(theta)
    return draws, m, sigma


@pytest.mark.parametrize(
    "changes",
    [{}, {"clip_radius": 0.5, "temperature": 0.3}, {"prior_scale": None, "beta_1": 0.0}],
)
def test_twenty_steps_of_the_paper(changes, float64, monkeypatch):
    settings = {
        "train_size": 12,
        "prior_scale": 0.4,
        "initial_hessian": 0.7,
        "beta_1": 0.9,
        "beta_2": 0.9,
        "clip_radius": None,
        "temperature": 1.0,
        **changes,
    }
    noise = np.random.default_rng(1).normal(size=(20, 3))
    monkeypatch.setattr(ivon, "noise_of_step", lambda seed, step, *_: noise[int(step) - 1])
    start = np.array([0.5, -1.0, 2.0])
    weight = keras.Variable(start, dtype="float64")
    found = ibnn.IVON(0.2, **settings)
    found.build([weight])
    draws, mean, sigma = papers_steps(noise, start, 0.2, settings)
    for draw in draws:
        found.apply([ops.convert_to_tensor(slope(ops.convert_to_numpy(weight)))])
        np.testing.assert_allclose(ops.convert_to_numpy(weight), draw, rtol=1e-6, atol=1e-8)
    assert np.ptp(sigma) > 0.01
    found.finalize_variable_values([weight])
    np.testing.assert_allclose(ops.convert_to_numpy(weight), mean, rtol=1e-6, atol=1e-8)
    scale = found._scale(found._precisions[0])
    np.testing.assert_allclose(ops.convert_to_numpy(scale), sigma, rtol=1e-6)


def nothing(y_true, y_pred):
    """A loss without a gradient."""
    return 0.0 * ops.sum(y_pred, axis=-1)


@pytest.mark.parametrize("policy_name", ["float32", "mixed_float16"])
def test_draws_never_repeat_and_have_the_scale_of_the_posterior(policy, policy_name):
    policy(policy_name)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(50), keras.layers.Dense(40)])
    settings = {"train_size": 100, "prior_scale": None, "initial_hessian": 0.5}
    model.compile(ibnn.IVON(1e-9, beta_1=0.0, beta_2=1 - 1e-9, **settings), nothing)
    start = [np.array(w) for w in model.get_weights()]
    snapshots = ibnn.Snapshots(unit="step")
    zeros = np.zeros((8, 40), "float32")
    model.fit(zeros, zeros, batch_size=4, epochs=3, verbose=0, callbacks=[snapshots])
    found = []
    for values in snapshots.read():
        for place in (0, 2):
            found.append((values[place] - start[place]).ravel())
    found = np.array(found)
    assert len(found) == 12
    correlations = np.corrcoef(found)[np.triu_indices(12, 1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(2000)
    assert found.var() == pytest.approx(1 / (100 * 0.5), rel=4 * np.sqrt(2 / found.size))
    assert_same(model.get_weights(), start)


# What it finds


def test_it_finds_the_best_diagonal_gaussian_of_a_linear_regression():
    """The posterior is Gaussian, N(mean, A^-1): the best diagonal one has the variances 1 / A_ii.

    Each unit is a regression of its own on the same targets.
    """
    count, scale, steps = 500, 0.7, 3000
    x = np.array([[1, 0.7], [-1, -0.2], [0.3, 0.9], [0.8, 0.1], [1.5, 1]], "float32")
    y = np.repeat(x @ [[0.6], [-0.2]] + 0.1, count, axis=1).astype("float32")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(count, use_bias=False)])

    def loss(y_true, y_pred):
        return 0.5 * ops.sum(ops.square(y_true - y_pred), axis=-1)

    schedule = keras.optimizers.schedules.CosineDecay(0.3, steps)
    chosen = ibnn.IVON(schedule, 5, scale, beta_2=0.998, initial_hessian=2.0)
    model.compile(chosen, loss)
    data = np.tile(x, (steps, 1)), np.tile(y, (steps, 1))
    model.fit(*data, batch_size=5, shuffle=False, verbose=0)
    mean, deviation = (found.reshape(2, count) for found in moments(chosen, model))
    precision = x.T.astype("float64") @ x + np.eye(2) / scale**2
    expected = np.linalg.solve(precision, x.T @ y[:, 0])
    np.testing.assert_allclose(mean.mean(axis=1), expected, atol=0.003)
    assert (mean.std(axis=1) < 0.1 * deviation.mean(axis=1)).all()
    best = 1 / np.sqrt(np.diag(precision))
    np.testing.assert_allclose(deviation.mean(axis=1), best, rtol=0.015)
    wrong = np.sqrt(np.diag(np.linalg.inv(precision)))
    assert (wrong / best > 1.1).all()


def elbo(loc, scale, x, y, prior_scale):
    """Return the ELBO of logistic regression: each logit is Gaussian, and so an integral."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    features = np.concatenate([x, np.ones((len(x), 1))], axis=1).astype("float64")
    mean, deviation = features @ loc, np.sqrt(features**2 @ scale**2)
    logits = mean[:, None] + deviation[:, None] * nodes
    values = -np.logaddexp(0, np.where(y[:, None], -logits, logits))
    likelihood = (values @ weights).sum() / np.sqrt(2 * np.pi)
    ratio = scale / prior_scale
    kl = np.sum((ratio**2 + (loc / prior_scale) ** 2 - 1) / 2 - np.log(ratio))
    return likelihood - kl


def test_its_elbo_on_a_logistic_regression_is_that_of_gaussian_vi():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(100, 3)).astype("float32")
    y = (x @ [1.5, -1.0, 0.0] + rng.logistic(size=100) > 0).astype("float32")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    steps = 4000
    schedule = keras.optimizers.schedules.CosineDecay(0.2, steps)
    chosen = ibnn.IVON(schedule, 100, 1.0, beta_2=0.998, initial_hessian=0.2)
    model.compile(chosen, keras.losses.BinaryCrossentropy(from_logits=True))
    data = np.tile(x, (steps // 4, 1)), np.tile(y[:, None], (steps // 4, 1))
    model.fit(*data, batch_size=25, verbose=0)
    vi = ibnn.GaussianVI(model, covariance="diag", prior_scale=1.0).fit(x, y[:, None], verbose=0)
    best = [ops.convert_to_numpy(v) for v in (vi.loc, vi.scale)]
    reached = elbo(*best, x, y, 1.0)
    assert reached == pytest.approx(vi.elbo, abs=0.5)
    found = moments(chosen, model)
    assert elbo(*found, x, y, 1.0) == pytest.approx(reached, abs=0.03)
    # One tenth of a deviation in the mean, or 7% in the scales, would cost as much.
    np.testing.assert_allclose(found[1], best[1], rtol=0.12)


# Training


def test_weights_are_the_mean_after_fit_and_a_draw_before():
    chosen = optimizer()
    model = network(chosen)
    seen = []
    spy = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: seen.append(moments(chosen, spy.model)[0])
    )
    draws = ibnn.Snapshots()
    fit(model, spy, draws)
    posterior = chosen.posterior(model)
    last = np.concatenate([value.ravel() for value in list(draws.read())[-1]])
    after = np.concatenate([value.ravel() for value in model.get_weights()])
    np.testing.assert_allclose(after, seen[-1], rtol=1e-6)
    assert np.abs(last - after).max() > 0.1
    mean = [ops.convert_to_numpy(x) for x in posterior.mean()]
    assert_same(mean, model.get_weights())


@pytest.mark.once
def test_weights_that_are_set_are_the_new_mean(eagerly):
    chosen = optimizer(learning_rate=1e-6)
    model = network(chosen)
    fit(model)
    values = [value + 3 for value in model.get_weights()]
    model.set_weights(values)
    flat = np.concatenate([value.ravel() for value in values])
    for epochs in (0, 1):  # before the next `fit`, and after it
        fit(model, epochs=epochs)
        np.testing.assert_allclose(moments(chosen, model)[0], flat, atol=1e-3)


def test_validation_is_of_the_mean_and_leaves_training_as_it_is(eagerly):
    plain, shown = optimizer(), optimizer()
    model = network(shown)
    history = fit(model, ibnn.IVONMean(), epochs=3, validation_data=(X, Y))
    assert history["val_loss"][-1] == pytest.approx(model.evaluate(X, Y, verbose=0), rel=1e-5)
    other = network(plain)
    plain.build(other.trainable_variables)
    plain.draw(other.trainable_variables)
    for _ in range(3):
        for start in range(0, 16, 4):
            other.train_on_batch(X[start : start + 4], Y[start : start + 4])
    assert_same(moments(shown, model), moments(plain, other), rtol=1e-4)
    one_draw = network(optimizer())
    history = fit(one_draw, validation_data=(X, Y), epochs=1)
    assert abs(history["val_loss"][0] / one_draw.evaluate(X, Y, verbose=0) - 1) > 1e-3


@pytest.mark.once
def test_the_mean_of_the_best_epoch_can_be_restored(eagerly):
    chosen = optimizer(learning_rate=3.0)  # at which it gets worse
    model = network(chosen)
    stopping = keras.callbacks.EarlyStopping(restore_best_weights=True)
    history = fit(model, ibnn.IVONMean(), stopping, epochs=6, validation_data=(X, Y))
    best = min(history["val_loss"])
    assert best < history["val_loss"][-1]
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(best, rel=1e-5)
    assert_same([chosen.posterior(model).mean()[0]], model.get_weights()[:1])


@pytest.mark.once
def test_single_steps(eagerly):
    """The first step of a `fit` is at the mean, unless the callback draws before it."""
    chosen = optimizer()
    model = network(chosen)
    fit(model, epochs=1, batch_size=16)
    with pytest.raises(ValueError, match="No step has been taken at a draw.*IVONMean"):
        chosen.posterior(model)
    fit(model, ibnn.IVONMean(), epochs=1, batch_size=16)
    assert np.ptp(moments(chosen, model)[1]) > 0


def test_accumulated_gradients_are_of_one_draw(eagerly):
    found = []
    for batch_size, steps in ((8, None), (4, 2)):
        chosen = optimizer(gradient_accumulation_steps=steps)
        model = network(chosen)
        fit(model, batch_size=batch_size, epochs=3)
        found.append(moments(chosen, model))
    assert_same(*found, rtol=1e-4)


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="of Keras 3.15")
def test_one_of_several_optimizers(eagerly):
    chosen = optimizer()
    parts = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
    parts[".*dense_last.*"] = chosen
    keras.utils.set_random_seed(0)
    last = keras.layers.Dense(2, name="dense_last")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), last])
    model.compile(keras.optimizers.MultiOptimizer(parts), LOSS)
    fit(model, ibnn.IVONMean())
    posterior = chosen.posterior(model)
    assert [v.path for v in posterior.sampled] == [v.path for v in last.weights]
    assert_same(map(ops.convert_to_numpy, posterior.mean()), last.get_weights())


@pytest.mark.once
def test_beside_the_noise_of_stochastic_layers(eagerly):
    """It may train the plain weights, which are the mean at the end as well."""
    layers = [keras.layers.Dense(4, name="a"), keras.layers.Dense(2, name="b")]
    det = keras.Sequential([keras.Input((3,)), *layers])
    model = ibnn.to_stochastic(det, {"b": ibnn.NormalAffine()}, train_size=16)
    chosen = optimizer()
    model.compile(ibnn.TwoSpeed(chosen, keras.optimizers.Adam(1e-3)), LOSS)
    fit(model)
    weight = next(v for v in model.trainable_variables if chosen.own([v]))
    found = chosen._means[0]
    np.testing.assert_array_equal(ops.convert_to_numpy(weight), ops.convert_to_numpy(found))
    model.compile(optimizer(), LOSS)
    with pytest.raises(ValueError, match="belongs to a stochastic layer"):
        fit(model)


@pytest.mark.skipif(not JAX, reason="on JAX alone networks are trained side by side")
def test_members_side_by_side_have_their_means():
    def build(seed):
        return network(optimizer())

    options = {"epochs": 2, "batch_size": 4, "verbose": 0, "shuffle": False}
    found = []
    for side_by_side in (True, False):
        ensemble = ibnn.DeepEnsemble.train(build, 2, X, Y, side_by_side=side_by_side, **options)
        found.append([w for number in range(2) for w in ensemble.sample(None, number)])
    assert_same(*found, rtol=1e-4)


def test_rows_that_are_not_looked_up(eagerly):
    """Their gradient is 0: the mean goes to that of the prior, and h decays."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((1,), dtype="int32"), keras.layers.Embedding(9, 2)])
    chosen = ibnn.IVON(0.5, 4, 1.0, beta_2=0.5)
    model.compile(chosen, "mse")
    start = model.get_weights()[0]
    model.fit(np.ones((8, 1), "int32"), np.ones((8, 1, 2)), batch_size=4, verbose=0)
    mean, deviation = (found.reshape(9, 2) for found in moments(chosen, model))
    assert (np.abs(mean[2:]) < np.abs(start[2:])).all()
    np.testing.assert_allclose(deviation[2:], deviation[2, 0])
    assert deviation[2, 0] > (4 * 1.25) ** -0.5  # where it starts
    assert (np.abs(deviation[1] - deviation[2]) > 1e-3).all()


# Files


def test_a_loaded_model_continues(tmp_path, eagerly):
    model = network(optimizer(clip_radius=2.0, temperature=0.5, seed=3))
    between = keras.callbacks.ModelCheckpoint(tmp_path / "draw.keras")
    fit(model, between)
    model.save(tmp_path / "mean.keras")
    for name in ("mean", "draw"):
        loaded = keras.saving.load_model(tmp_path / f"{name}.keras")
        assert loaded.optimizer.get_config() == model.optimizer.get_config()
        assert_same(moments(loaded.optimizer, loaded), moments(model.optimizer, model))
    loaded = keras.saving.load_model(tmp_path / "mean.keras")
    for one in (model, loaded):
        fit(one)
    assert_same(moments(loaded.optimizer, loaded), moments(model.optimizer, model))


@pytest.mark.parametrize("shown", [False, True])
def test_a_resumed_run_is_the_same(tmp_path, eagerly, shown):
    def run(path, epochs):
        chosen = optimizer()
        model = network(chosen)
        checkpoint = ibnn.Checkpoint(path)
        done = checkpoint.restore(model)
        callbacks = [checkpoint, ibnn.IVONMean()] if shown else [checkpoint]
        fit(model, *callbacks, initial_epoch=done, epochs=epochs)
        return moments(chosen, model)

    whole = run(tmp_path / "whole.npz", 3)
    run(tmp_path / "parts.npz", 1)
    assert_same(run(tmp_path / "parts.npz", 3), whole)


@pytest.mark.once
def test_the_posterior_works_as_others_do(tmp_path, eagerly):
    found = []
    for seed in range(2):
        chosen = optimizer(seed=seed)
        model = network(chosen)
        fit(model, epochs=5)
        found.append(chosen.posterior(model))
    mc = ibnn.MonteCarlo(ibnn.WeightMixture(found), samples=8, seed=1)
    mc.save(tmp_path / "mc.keras")
    loaded = keras.saving.load_model(tmp_path / "mc.keras")
    expected = mc.predict(X, verbose=0)
    for name, value in loaded.predict(X, verbose=0).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6)


# Errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clipnorm": 1.0}, "`clipnorm` changes.*`clip_radius`"),
        ({"weight_decay": 1e-4}, "`weight_decay` changes.*`prior_scale`"),
        ({"use_ema": True}, "`use_ema` changes"),
        ({"train_size": 0}, "`train_size`"),
        ({"prior_scale": 0.0}, "`prior_scale`"),
        ({"temperature": 0.0}, "`temperature`"),
        ({"initial_hessian": 0.0}, "`initial_hessian`"),
        ({"beta_1": 1.0}, "`beta_1`"),
        ({"beta_2": -0.1}, "`beta_2`"),
        ({"clip_radius": 0.0}, "`clip_radius`"),
        ({"seed": -1}, "`seed`"),
    ],
)
@pytest.mark.once
def test_bad_arguments(options, words):
    with pytest.raises(ValueError, match=words):
        optimizer(**options)


@pytest.mark.once
def test_weights_that_have_no_gaussian(eagerly):
    with pytest.raises(ValueError, match="half precision"):
        optimizer().build([keras.Variable(np.ones(3), dtype="bfloat16")])
    model = keras.Sequential([keras.Input((3,))])
    model.add(keras.layers.Dense(2, kernel_constraint="non_neg", name="last"))
    with pytest.raises(ValueError, match="last/kernel has a constraint"):
        optimizer().build(model.trainable_variables)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, bias_regularizer="l2")])
    with pytest.warns(UserWarning, match="`bias_regularizer`.*the prior twice"):
        optimizer().build(model.trainable_variables)


@pytest.mark.once
def test_models_that_it_has_not_trained(eagerly):
    chosen = optimizer()
    model = network(chosen)
    with pytest.raises(ValueError, match="has not trained .*call `fit`"):
        chosen.posterior(model)
    fit(model)
    with pytest.raises(ValueError, match="has not trained"):
        chosen.posterior(network("sgd"))
    with pytest.raises(ValueError, match=r"IVONMean needs .*ibnn\.IVON\(\.\.\.\); got SGD"):
        fit(network("sgd"), ibnn.IVONMean())
