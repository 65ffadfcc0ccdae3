"""One pass through the library, which `make test-versions` takes on every version it lists."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfp_ibnn as ibnn

pytestmark = pytest.mark.smoke

ON_JAX = keras.backend.backend() == "jax"
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def clusters(count):
    """Three clusters of points in the plane."""
    rng = np.random.default_rng(0)
    y = rng.integers(3, size=count)
    centers = np.array([(-2, 0), (2, 0), (0, 2)])
    return (centers[y] + rng.normal(size=(count, 2))).astype("float32"), y


X, Y = clusters(240)


def network(activation=None):
    parts = [layers.Dense(8, "tanh"), layers.Dense(3, activation)]
    return keras.Sequential([keras.Input((2,), name="points"), *parts])


def value(x):
    return np.asarray(ops.convert_to_numpy(x))


def close(actual, desired):
    np.testing.assert_allclose(value(actual), value(desired), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def trained():
    """A converted network, trained at two rates with all that acts on both of them together."""
    keras.utils.set_random_seed(0)
    model = ibnn.to_stochastic(network(), ibnn.NormalPlanar1d(), train_size=len(Y))
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 100)
    together = {"global_clipnorm": 1.0, "gradient_accumulation_steps": 2}
    optimizer = keras.optimizers.SGD(schedule, momentum=0.9, **together)
    model.compile(ibnn.two_speed(optimizer, stochastic_lr=0.02), LOSS, metrics=["accuracy"])
    before = [value(x) for x in model.trainable_variables]
    callbacks = [ibnn.KLAnnealing(epochs=2), ibnn.PosteriorLog()]
    fitted = model.fit(X, Y, batch_size=24, epochs=4, verbose=0, callbacks=callbacks)
    return model, before, fitted.history


def test_training(trained):
    model, before, history = trained
    assert history["loss"][-1] < history["loss"][0]
    assert history["accuracy"][-1] > 0.8
    assert all(np.isfinite(values).all() for values in history.values())
    after = [value(x) for x in model.trainable_variables]
    assert not any(np.array_equal(x, y) for x, y in zip(after, before, strict=True))
    fast, slow = model.optimizer.deterministic, model.optimizer.stochastic
    assert int(fast.iterations) == int(slow.iterations) == 20  # two batches each
    close(fast.learning_rate, 5 * slow.learning_rate)


def test_prediction(trained):
    mc = ibnn.MonteCarlo(trained[0], samples=4)
    prediction = mc.predict(X, verbose=0)
    close(prediction["mean"].sum(axis=-1), np.ones(len(Y)))
    close(prediction["entropy"], prediction["aleatoric"] + prediction["epistemic"])
    assert (prediction["mean"].argmax(axis=-1) == Y).mean() > 0.8
    close(mc(X[:5])["mean"], prediction["mean"][:5])


def test_files(trained, tmp_path):
    model, path = trained[0], tmp_path / "model.keras"
    model.save(path)
    loaded = keras.saving.load_model(path)
    for old, new in zip(model.weights, loaded.weights, strict=True):
        close(new, old)
    for old, new in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        close(new, old)
    first, second = (ibnn.MonteCarlo(x, samples=4, seed=0).at_mean(X) for x in (model, loaded))
    close(second["mean"], first["mean"])
    assert loaded.fit(X, Y, verbose=0).history["accuracy"][-1] > 0.8


@pytest.mark.skipif(ON_JAX, reason="TensorFlow writes SavedModels")
def test_export(trained, tmp_path):
    import tensorflow as tf

    mc = ibnn.MonteCarlo(trained[0], samples=4, seed=0)
    ibnn.export(mc, tmp_path / "model")
    serve = tf.saved_model.load(str(tmp_path / "model")).signatures["serve"]
    close(serve(points=tf.constant(X[:5]))["mean"], mc(X[:5])["mean"])


def test_calibration():
    model = network("softmax")
    model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(X, Y, verbose=0)
    data = {"validation": (X[160:], Y[160:])}
    report = ibnn.calibrate(model, (X[:160], Y[:160]), epochs=1, samples=4, verbose=False, **data)
    assert "as it is + temperature" in report.table().rows
    assert np.isfinite(report.evaluate((X, Y))[report.chosen.name]["NLL"])
    close(report.model.predict(X, verbose=0)["mean"].sum(axis=-1), np.ones(len(Y)))


def test_attention():
    inputs = keras.Input((4, 6))
    attended = layers.MultiHeadAttention(2, 3, name="attention")(inputs, inputs)
    pooled = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(attended))
    model = keras.Model(inputs, layers.Dense(3)(pooled))
    x = np.random.default_rng(0).normal(size=(48, 4, 6)).astype("float32")
    sto = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=48)
    paths = [layer.path for layer in ibnn.stochastic_layers(sto)]
    assert sum("attention" in path for path in paths) == 4
    with ibnn.noise_off(sto):
        close(sto(x), model(x))
    sto.compile("adam", LOSS)
    fitted = sto.fit(x, Y[:48], epochs=2, verbose=0)
    assert np.isfinite(fitted.history["loss"]).all()
    assert ibnn.MonteCarlo(sto, samples=4).predict(x, verbose=0)["epistemic"].max() > 0


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_laplace(subset):
    model = network("softmax")
    model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(X, Y, epochs=3, verbose=0)
    laplace = ibnn.Laplace(model, subset_of_weights=subset).fit(X, Y, verbose=0)
    prediction = ibnn.MonteCarlo(laplace, samples=4).predict(X, verbose=0)
    close(prediction["mean"].sum(axis=-1), np.ones(len(Y)))
    assert prediction["epistemic"].max() > 0
