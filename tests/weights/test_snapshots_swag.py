"""SWAG's moments are those of the snapshots; its draws have them; batch norm is recomputed."""

import warnings

import keras
import numpy as np
import pytest
from keras import ops

import tfp_ibnn as ibnn
from tests.autodiff import quick
from tests.weights.swag import JAX, LOSS, X, Y, network, trained


@pytest.fixture(scope="module")
def normed():
    return trained()


def arrays(tensors):
    return [ops.convert_to_numpy(x) for x in tensors]


def moments(path, rank=4):
    mean = path.mean(axis=0)
    rows = path[-rank:] - mean
    covariance = 0.5 * (np.diag(path.var(axis=0)) + rows.T @ rows / (rank - 1))
    return mean, covariance


def test_moments_are_those_of_the_snapshots(plain):
    swag, path = plain
    assert path.std(axis=0).max() > 0.01
    mean, covariance = moments(path)
    posterior = swag.posterior()
    assert posterior.rank == 4
    distribution = posterior.distribution()
    np.testing.assert_allclose(distribution.mean(), mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(distribution.covariance(), covariance, rtol=1e-4, atol=1e-7)
    flat = np.concatenate([np.ravel(x) for x in posterior.mean()])
    np.testing.assert_allclose(flat, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.once
def test_density(plain):
    swag, path = plain
    mean, covariance = moments(path)
    point = path[-1].astype("float32")
    gap = point - mean
    quadratic = gap @ np.linalg.solve(covariance, gap) + np.linalg.slogdet(covariance)[1]
    expected = -0.5 * (quadratic + len(gap) * np.log(2 * np.pi))
    np.testing.assert_allclose(swag.posterior().distribution().log_prob(point), expected, rtol=1e-3)


@pytest.mark.once
def test_draws_have_the_moments(plain):
    swag, path = plain
    posterior, (mean, covariance) = swag.posterior(), moments(path)
    key, count = ops.convert_to_tensor([5, 6], "int32"), 3000
    numbers = ops.arange(count, dtype="int32")
    values = ops.vectorized_map(lambda s: posterior.sample(key, s), numbers)
    draws = np.concatenate([np.reshape(x, (count, -1)) for x in values], axis=1).astype("float64")
    scale = np.sqrt(np.diag(covariance))
    assert (np.abs(draws.mean(axis=0) - mean) < 4 * scale / np.sqrt(count) + 1e-6).all()
    # The standard error of a covariance, for Gaussians.
    error = np.sqrt((covariance**2 + np.outer(scale, scale) ** 2) / count)
    assert (np.abs(np.cov(draws.T) - covariance) < 4.5 * error + 1e-12).all()
    assert [tuple(x.shape[1:]) for x in values] == [tuple(w.shape) for w in posterior.sampled]


@pytest.mark.once
def test_fewer_snapshots_than_the_rank_and_too_few(eagerly):
    model, swag = network(norm=False), ibnn.SWAG(rank=20)
    with pytest.raises(ValueError, match="there are 0; 2 are needed"):
        swag.posterior(model)
    model.fit(X, Y, epochs=1, verbose=0, callbacks=[swag])
    with pytest.raises(ValueError, match="2 are needed"):
        swag.posterior()
    model.fit(X, Y, epochs=2, initial_epoch=1, verbose=0, callbacks=[swag])
    assert swag.posterior().rank == 2
    model.compile("sgd", LOSS)
    model.fit(X, Y, epochs=1, verbose=0, callbacks=[swag])  # a new training
    with pytest.raises(ValueError, match="2 are needed"):
        swag.posterior()


def statistics_by_hand(values):
    """Return mean and variance of the hidden units over all examples."""
    hidden = X.astype("float64") @ values[0] + values[1]
    return hidden.mean(axis=0), hidden.var(axis=0)


def test_materialize(normed):
    swag, _ = normed
    posterior = swag.posterior()
    before = posterior.network.get_weights()
    momentum = posterior.network.layers[1].momentum
    sets = posterior.materialize(2, (X, Y), batch_size=20, seed=2)
    assert sets.count == 2
    assert sets.materialize() is sets
    for old, new in zip(before, posterior.network.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert posterior.network.layers[1].momentum == momentum
    key = ibnn.noise.counter.key_from_seed(2)
    draw = quick(posterior.sample, posterior.variables)
    names = [w.name for w in posterior.network.weights]
    for number in range(2):
        values = arrays(sets.sample(None, number))
        drawn = arrays(draw(ops.convert_to_tensor(key), ops.convert_to_tensor(number)))
        trainable = [x for x, name in zip(values, names, strict=True) if "moving" not in name]
        for a, b in zip(trainable, drawn, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
        mean, variance = statistics_by_hand(values)
        np.testing.assert_allclose(values[names.index("moving_mean")], mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(values[names.index("moving_variance")], variance, rtol=1e-4)


@pytest.mark.once
def test_data_of_all_kinds(normed):
    posterior = normed[0].posterior()
    sets = posterior.materialize(2, X, batch_size=20)
    batches = ((X[i : i + 20], Y[i : i + 20]) for i in (0, 20))
    for data in (ibnn.data.ShuffledBatches(X, Y, 20), batches):
        other = posterior.materialize(2, data)
        for a, b in zip(sets.weights, other.weights, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.once
def test_batch_norm_is_warned_of(normed, plain):
    posterior = normed[0].posterior()
    with pytest.warns(UserWarning, match="use posterior.materialize"):
        ibnn.MonteCarlo(posterior)
    with pytest.raises(ValueError, match="Give the training inputs"):
        posterior.materialize(2)
    with pytest.raises(ValueError, match="no example"):
        posterior.materialize(2, X[:0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ibnn.MonteCarlo(posterior.materialize(2, X))
        ibnn.MonteCarlo(plain[0].posterior())
    assert plain[0].posterior().materialize(2).count == 2


@pytest.mark.parametrize("kind", ["swag", pytest.param("mixture", marks=pytest.mark.slow)])
def test_files_and_export(plain, mixture, kind, tmp_path):
    posterior = mixture if kind == "mixture" else plain[0].posterior()
    mc = ibnn.MonteCarlo(posterior, samples=4, seed=0)
    expected = ops.convert_to_numpy(mc(X)["mean"])
    mc.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(ops.convert_to_numpy(loaded(X)["mean"]), expected, atol=1e-6)
    if not JAX:
        import tensorflow as tf

        draws = [ops.convert_to_numpy(mc.draw(X, number)["mean"]) for number in range(4)]
        np.testing.assert_allclose(expected, np.mean(draws, axis=0), atol=1e-6)
        ibnn.export(mc, tmp_path / "1")
        served = tf.saved_model.load(str(tmp_path / "1")).signatures["serve"]
        np.testing.assert_allclose(served(inputs=tf.constant(X))["mean"], expected, atol=1e-5)


@pytest.mark.once
def test_frozen_weights_stay_after_loading(eagerly, tmp_path):
    model, swag = network(norm=False), ibnn.SWAG()
    model.layers[0].trainable = False
    model.compile("sgd", LOSS)
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[swag])
    posterior = swag.posterior()
    assert [w.shape for w in posterior.sampled] == [(4, 2), (2,)]
    ibnn.MonteCarlo(posterior).save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").inner
    loaded.network.trainable = True
    assert [w.shape for w in loaded.sampled] == [(4, 2), (2,)]


@pytest.mark.once
def test_weights_that_are_not_finite(eagerly):
    model, swag = network(norm=False), ibnn.SWAG()
    model.compile(keras.optimizers.SGD(1e38), LOSS)
    model.fit(1e3 * X, Y, epochs=3, verbose=0, callbacks=[swag])
    with pytest.raises(ArithmeticError, match="is not finite: the training diverged"):
        swag.posterior()


@pytest.mark.once
def test_bad_arguments(plain):
    with pytest.raises(ValueError, match="`rank` must be a whole number of at least 2"):
        ibnn.SWAG(rank=1)
    with pytest.raises(ValueError, match="`unit` must be one of"):
        ibnn.SWAG(unit="batch")
    with pytest.raises(ValueError, match="`every`"):
        ibnn.Snapshots(every=0)
    stochastic = ibnn.to_stochastic(network(), ibnn.NormalAffine(), train_size=4)
    with pytest.raises(ValueError, match="has stochastic layers"):
        plain[0].posterior(stochastic)
    with pytest.raises(ValueError, match="`sampling` must be"):
        ibnn.MonteCarlo(plain[0].posterior(), sampling="qmc")
    with pytest.raises(ValueError, match="`members` must be"):
        ibnn.WeightMixture([])
    wide = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5)])
    with pytest.raises(ValueError, match="of one shape"):
        ibnn.WeightMixture([network(), wide])
    with pytest.raises(NotImplementedError, match="WeightSets has no density"):
        ibnn.weights.WeightSets([wide]).distribution()
