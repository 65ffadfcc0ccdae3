"""SGLD and SGHMC sample what they should, step by step exactly, and resume exactly."""

import keras
import numpy as np
import pytest
from keras import ops

import tfp_ibnn as ibnn

RATE, CURVATURE, CENTRE, TRAIN_SIZE, PRIOR_SCALE = 0.5, 0.7, 0.3, 10, 0.5
COUNT = 40_000  # independent chains: the coordinates of one variable


def run(optimizer, steps=30, curvature=CURVATURE):
    """Return all chains after some steps on the mean loss curvature / 2 (w - CENTRE)^2."""
    weight = keras.Variable(np.zeros(COUNT, "float32"))
    optimizer.build([weight])
    for _ in range(steps):
        optimizer.apply([curvature * (ops.convert_to_tensor(weight.value) - CENTRE)])
    return ops.convert_to_numpy(weight)


def stationary(momentum, temperature=1.0, train_size=TRAIN_SIZE):
    """Return the exact mean and variance of the chain at a finite learning rate.

    (w, m) -> A (w, m) + noise has the covariance S = A S A^T + Q; in terms of its elements that
    is a linear system.
    """
    prior = 1 / (PRIOR_SCALE**2 * train_size)
    total = CURVATURE + prior
    a = np.array([[1 - RATE * total, momentum], [-RATE * total, momentum]])
    q = np.full((2, 2), 2 * (1 - momentum) * RATE * temperature / train_size)
    covariance = np.linalg.solve(np.eye(4) - np.kron(a, a), q.ravel())
    return CURVATURE * CENTRE / total, covariance[0]


def sampler(momentum, **options):
    options = {"train_size": TRAIN_SIZE, "prior_scale": PRIOR_SCALE, **options}
    if momentum:
        return ibnn.SGHMC(RATE, momentum=momentum, **options)
    return ibnn.SGLD(RATE, **options)


@pytest.fixture(scope="module", params=[(0.0, 1.0), (0.6, 0.3)], ids=["sgld", "sghmc"])
def chains(request):
    momentum, temperature = request.param
    return momentum, temperature, run(sampler(momentum, temperature=temperature))


def test_stationary_moments(chains):
    momentum, temperature, found = chains
    mean, variance = stationary(momentum, temperature)
    assert abs(found.mean() - mean) < 3 * np.sqrt(variance / COUNT)
    assert abs(found.var() - variance) < 3 * variance * np.sqrt(2 / COUNT)


def test_a_wrong_size_or_temperature_would_show(chains):
    momentum, temperature, found = chains
    error = 3 * found.var() * np.sqrt(2 / COUNT)
    for wrong in ({"train_size": TRAIN_SIZE + 1}, {"temperature": 1.1 * temperature}):
        options = {"momentum": momentum, "temperature": temperature, **wrong}
        assert abs(found.var() - stationary(**options)[1]) > 2 * error, wrong


def test_the_bias_of_a_finite_step_is_that_of_the_docstring():
    total = CURVATURE + 1 / (PRIOR_SCALE**2 * TRAIN_SIZE)
    expected = 1 / (TRAIN_SIZE * total) / (1 - total * RATE / 2)
    assert stationary(0.0)[1] == pytest.approx(expected)


@pytest.mark.once
def test_without_noise_it_is_plain_descent():
    found = run(sampler(0.6, temperature=0.0), steps=5)
    weight = momentum = 0.0
    for _ in range(5):
        slope = CURVATURE * (weight - CENTRE) + weight / (PRIOR_SCALE**2 * TRAIN_SIZE)
        momentum = 0.6 * momentum - RATE * slope
        weight += momentum
    np.testing.assert_allclose(found, weight, rtol=1e-5)


@pytest.mark.once
def test_a_flat_prior():
    options = {"train_size": TRAIN_SIZE, "prior_scale": None, "temperature": 0.0}
    found = run(ibnn.SGLD(RATE, **options), steps=1)
    np.testing.assert_allclose(found, RATE * CURVATURE * CENTRE, rtol=1e-5)


def test_the_preconditioner_scales_step_and_noise():
    """The first step divides by epsilon + |gradient|, which is the same for all."""
    options = {"train_size": TRAIN_SIZE, "prior_scale": None, "seed": 3}
    rms = {"preconditioner": "rmsprop", "epsilon": 0.1}
    divisor = 0.1 + CURVATURE * CENTRE
    plain = run(ibnn.SGLD(RATE, **options), steps=1)
    found = run(ibnn.SGLD(RATE, **options, **rms), steps=1)
    noise = plain - RATE * CURVATURE * CENTRE
    expected = RATE * CURVATURE * CENTRE / divisor + noise / np.sqrt(divisor)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    cold = {**options, **rms, "temperature": 0.0}
    first = run(ibnn.SGLD(RATE, **cold), steps=1)[0]
    second = run(ibnn.SGLD(RATE, **cold), steps=2)[0]
    slopes = CURVATURE * np.array([CENTRE, CENTRE - first])
    mean = (0.99 * 0.01 * slopes[0] ** 2 + 0.01 * slopes[1] ** 2) / (1 - 0.99**2)
    assert second - first == pytest.approx(RATE * slopes[1] / (0.1 + np.sqrt(mean)), rel=1e-4)


def test_a_preconditioner_that_stays_leaves_the_target_as_it_is():
    """From the first step on the rate is divided by 0.1 + the gradient at 0."""
    divisor = 0.1 + CURVATURE * CENTRE
    options = {"preconditioner": "rmsprop", "epsilon": 0.1, "adaptation": 1}
    optimizer = ibnn.SGLD(RATE * divisor, TRAIN_SIZE, PRIOR_SCALE, **options)
    mean, variance = stationary(0.0)
    found = run(optimizer)
    assert abs(found.mean() - mean) < 3 * np.sqrt(variance / COUNT)
    assert abs(found.var() - variance) < 3 * variance * np.sqrt(2 / COUNT)


def test_cycles():
    cycles = ibnn.CosineCycles(0.4, cycle=10, exploration=0.5)
    rates = np.array([float(cycles(step)) for step in range(20)])
    place = np.arange(20) % 10 / 10
    np.testing.assert_allclose(rates, 0.2 * (np.cos(np.pi * place) + 1), rtol=1e-5)
    optimizer = ibnn.SGLD(cycles, train_size=TRAIN_SIZE, prior_scale=None)
    spread, weight = [], keras.Variable(np.zeros(1000, "float32"))
    optimizer.build([weight])
    for _ in range(20):
        before = ops.convert_to_numpy(weight)
        optimizer.apply([ops.zeros(1000)])
        spread.append((ops.convert_to_numpy(weight) - before).var())
    np.testing.assert_allclose(
        spread, np.where(place >= 0.5, 2 * rates / TRAIN_SIZE, 0), rtol=0.2, atol=1e-9
    )


X = np.random.default_rng(0).normal(size=(8, 40)).astype("float32")
Y = np.zeros((8, 50), "float32")


def nothing(y_true, y_pred):
    """A loss without a gradient: what moves the weights is noise."""
    return 0.0 * ops.sum(y_pred, axis=-1)


def network(optimizer, loss=nothing, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(50), keras.layers.Dense(50)])
    model.compile(optimizer, loss, **options)
    return model


def increments(model, epochs=6, **options):
    """Return the changes of the two kernels in each step, (steps, 2, 2000)."""
    snapshots = ibnn.Snapshots(unit="step")
    start = [np.array(w) for w in model.get_weights()]
    options = {"batch_size": 8, "epochs": epochs, "verbose": 0, **options}
    model.fit(X, Y, callbacks=[snapshots], **options)
    path = [start, *snapshots.read()]
    kernels = np.array([[x[0].ravel()[:2000], x[2].ravel()[:2000]] for x in path])
    return np.diff(kernels, axis=0)


@pytest.mark.parametrize("policy_name", ["float32", "mixed_float16"])
def test_noise_never_repeats_and_has_its_variance(policy, policy_name):
    policy(policy_name)
    model = network(ibnn.SGLD(0.01, train_size=100, prior_scale=None))
    found = increments(model).reshape(-1, 2000)
    assert len(found) == 12
    correlations = np.corrcoef(found)[np.triu_indices(12, 1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(2000)
    assert found.var() == pytest.approx(2 * 0.01 / 100, rel=3 * np.sqrt(2 / found.size))


def test_fit_samples_the_posterior_of_a_linear_model():
    """Each unit is a chain of its own over two weights; the posterior's covariance is known."""
    count, rate, scale = 4000, 0.4, 0.7
    x = np.array([[1, 0.5], [-1, 1], [0.3, -1.2], [0.8, 0.1], [1.5, 1]], "float32")
    y = np.repeat(x @ [[0.6], [-0.2]] + 0.1, count, axis=1).astype("float32")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(count, use_bias=False)])

    def loss(y_true, y_pred):
        return 0.5 * ops.sum(ops.square(y_true - y_pred), axis=-1)

    model.compile(ibnn.SGLD(rate, train_size=5, prior_scale=scale), loss)
    model.fit(x, y, epochs=30, batch_size=5, verbose=0)
    (found,) = model.get_weights()
    precision = x.T.astype("float64") @ x + np.eye(2) / scale**2
    values, vectors = np.linalg.eigh(precision)
    # Along its axes the posterior has the variance 1 / value, and this at a finite rate.
    variances = 1 / values / (1 - rate * values / 5 / 2)
    along = vectors.T @ found
    mean = vectors.T @ np.linalg.solve(precision, x.T @ y[:, 0])
    assert (np.abs(along.mean(axis=1) - mean) < 3 * np.sqrt(variances / count)).all()
    errors = 3 * variances * np.sqrt(2 / count)
    assert (np.abs(along.var(axis=1) - variances) < errors).all()
    assert abs(np.corrcoef(along)[0, 1]) < 3 / np.sqrt(count)


@pytest.mark.once
def test_another_seed_gives_other_noise_and_the_same_the_same():
    one, again, other = (run(sampler(0.0, seed=seed), steps=2) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert abs(np.corrcoef(one, other)[0, 1]) < 5 / np.sqrt(COUNT)


def test_accumulated_gradients_are_one_step(eagerly):
    options = {"train_size": 100, "prior_scale": None, "gradient_accumulation_steps": 2}
    found = increments(network(ibnn.SGLD(0.01, **options)), epochs=4, batch_size=4)
    assert len(found) == 4
    assert found.var() == pytest.approx(2 * 0.01 / 100, rel=3 * np.sqrt(2 / found.size))


def test_rows_that_are_not_looked_up_move_too(eagerly):
    model = keras.Sequential([keras.Input((1,), dtype="int32"), keras.layers.Embedding(100, 20)])
    model.compile(ibnn.SGHMC(0.01, 100, 1e3, preconditioner="rmsprop", epsilon=1.0), nothing)
    before = model.get_weights()[0]
    model.train_on_batch(np.ones((2, 1), "int32"), np.zeros((2, 1)))
    moved = model.get_weights()[0] - before
    assert moved[2:].var() == pytest.approx(2 * 0.1 * 0.01 / 100, rel=0.2)


def test_resumed_it_draws_the_same_samples(tmp_path, eagerly):
    def chain(folder, epochs):
        options = {"train_size": 8, "prior_scale": 0.1, "seed": 5}
        model = network(ibnn.SGHMC(0.01, **options), "mse")
        checkpoint = ibnn.Checkpoint(folder / "run.npz")
        samples = ibnn.Snapshots(every=3, start=2, unit="step", folder=folder / "samples")
        options = {"batch_size": 4, "shuffle": False, "verbose": 0, "epochs": epochs}
        done = checkpoint.restore(model)
        model.fit(X, Y, initial_epoch=done, callbacks=[samples, checkpoint], **options)
        return samples, model

    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole, model = chain(tmp_path / "whole", 4)
    chain(tmp_path / "parts", 2)
    parts, _ = chain(tmp_path / "parts", 4)
    assert whole.steps == parts.steps == [5, 8]
    one, other = whole.posterior(), ibnn.Snapshots(folder=tmp_path / "parts/samples")
    for a, b in zip(one.weights, other.posterior(model).weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=0)  # equal; on a GPU nearly
    with pytest.raises(ValueError, match="another run's snapshots"):
        network(ibnn.SGLD(0.01, 8, None)).fit(X, Y, verbose=0, callbacks=[parts])


@pytest.mark.once
def test_files_and_configs(tmp_path, eagerly):
    cycles = ibnn.CosineCycles(0.01, cycle=4, exploration=0.25)
    options = {"temperature": 0.5, "preconditioner": "rmsprop", "adaptation": 3, "seed": 7}
    model = network(ibnn.SGHMC(cycles, 100, 0.3, momentum=0.8, **options), "mse")
    model.fit(X, Y, verbose=0, batch_size=4)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    for one in (model, loaded):
        one.fit(X, Y, verbose=0, batch_size=4, shuffle=False)
    for a, b in zip(model.weights, loaded.weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=0)  # equal; on a GPU nearly
    sgld = ibnn.SGLD(0.1, 10, None, temperature=0.2)
    assert ibnn.SGLD.from_config(sgld.get_config()).get_config() == sgld.get_config()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clipnorm": 1.0}, "`clipnorm` changes"),
        ({"weight_decay": 1e-4}, "see `prior_scale`"),
        ({"use_ema": True}, "`use_ema` changes"),
        ({"train_size": 0}, "`train_size`"),
        ({"prior_scale": 0.0}, "`prior_scale`"),
        ({"temperature": -1.0}, "`temperature`"),
        ({"preconditioner": "adam"}, "`preconditioner`"),
        ({"adaptation": 0}, "`adaptation`"),
        ({"momentum": 1.0}, "`momentum`"),
    ],
)
@pytest.mark.once
def test_bad_arguments(options, words):
    with pytest.raises(ValueError, match=words):
        ibnn.SGHMC(0.1, **{"train_size": 10, "prior_scale": 1.0, **options})


@pytest.mark.once
def test_required_arguments_and_half_precision():
    with pytest.raises(TypeError, match="train_size"):
        ibnn.SGLD(0.1, prior_scale=1.0)
    with pytest.raises(TypeError, match="prior_scale"):
        ibnn.SGLD(0.1, train_size=10)
    with pytest.raises(ValueError, match="half precision"):
        ibnn.SGLD(0.1, 10, 1.0).build([keras.Variable(np.ones(3), dtype="bfloat16")])


@pytest.mark.once
@pytest.mark.parametrize("kind", [ibnn.SGLD, ibnn.SGHMC])
def test_a_regularizer_is_a_second_prior(kind, recwarn):
    layer = keras.layers.Dense(1, bias_regularizer="l2", name="last")
    model = keras.Sequential([keras.Input((3,)), layer])
    kind(0.1, 10, prior_scale=None).build(model.trainable_variables)
    assert not recwarn
    model.compile(kind(0.1, 10, prior_scale=1.0), "mse", run_eagerly=True)
    with pytest.warns(UserWarning, match="'.*last' has a `bias_regularizer`.*the prior twice"):
        model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
