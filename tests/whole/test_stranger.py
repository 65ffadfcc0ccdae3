"""A new flow, posterior, weight posterior or likelihood is one new file; verbs work with it."""

import keras
import numpy as np
import pytest
from keras import ops
from scipy.stats import poisson

import tfp_ibnn as ibnn
from tests.autodiff import jacobian
from tests.stranger.toy_flow import Sinh
from tests.stranger.toy_likelihood import Counts
from tests.stranger.toy_posterior import BiasNoise, NoisyBias
from tests.stranger.toy_weights import Jitter

JAX = keras.backend.backend() == "jax"
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 4)).astype("float32")
Y = (X[:, 0] > 0).astype("int32")


def network():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, name="hidden"),
            keras.layers.ReLU(),
            keras.layers.Dense(2, name="logits"),
        ]
    )
    return compiled(model)


def compiled(model):
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def use(model, tmp_path, y=Y, **options):
    """Predict, evaluate, save, load and export; return the prediction."""
    mc = ibnn.MonteCarlo(model, samples=4, seed=0, **options)
    prediction = mc.predict(X, verbose=0)
    assert prediction["epistemic"].mean() > 0
    assert np.isfinite(mc.evaluate(X, y, verbose=0)).all()
    mc.save(tmp_path / "mc.keras")
    again = ops.convert_to_numpy(keras.models.load_model(tmp_path / "mc.keras")(X)["mean"])
    np.testing.assert_allclose(again, prediction["mean"], atol=1e-5)
    if not JAX:
        import tensorflow as tf

        ibnn.export(mc, tmp_path / "1")
        served = tf.saved_model.load(str(tmp_path / "1")).signatures["serve"]
        np.testing.assert_allclose(
            served(inputs=tf.constant(X))["mean"], prediction["mean"], atol=1e-5
        )
    return prediction


def test_a_flow(tmp_path):
    flow = Sinh(dtype="float64")
    flow.build((None, 3))
    flow.shift.assign([0.3, -0.2, 0.1])
    x = RNG.normal(size=(5, 3))
    bijector = flow.bijector()
    log_det = ops.convert_to_numpy(bijector.forward_log_det_jacobian(ops.convert_to_tensor(x), 1))
    expected = np.linalg.slogdet(jacobian(bijector.forward, x))[1]
    np.testing.assert_allclose(log_det, expected, rtol=1e-6)

    model = compiled(ibnn.to_stochastic(network(), ibnn.FlowPosterior([Sinh()]), train_size=64))
    model.run_eagerly = not JAX  # for a few steps
    model.fit(X, Y, epochs=2, verbose=0)
    use(model, tmp_path)


@pytest.mark.slow
def test_a_posterior_with_a_layer_of_its_own(tmp_path):
    template = BiasNoise(start=0.5)
    model = compiled(ibnn.to_stochastic(network(), template, train_size=64))
    layers = ibnn.stochastic_layers(model)
    assert [type(layer) for layer in layers] == [NoisyBias, NoisyBias]
    assert [layer.posterior.bound_to for layer in layers] == [["hidden", "logits"]] * 2
    log = keras.callbacks.History()
    optimizer = ibnn.two_speed("adam", stochastic_lr=0.1)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.optimizer.build(model.trainable_variables)
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[ibnn.KLAnnealing(4), ibnn.PosteriorLog(), log])
    assert log.history["beta"] == pytest.approx([0.0, 0.25])
    assert log.history["hidden/kl"][-1] == pytest.approx(
        float(ops.convert_to_numpy(layers[0].posterior.loc)[0]) ** 2 / 2, rel=1e-4
    )
    use(model, tmp_path)

    with ibnn.noise_off(model):
        expected = model.predict(X, verbose=0)
    plain = ibnn.to_deterministic(model)
    assert {type(layer).__name__ for layer in plain.layers} == {"InputLayer", "Dense", "ReLU"}
    np.testing.assert_allclose(plain.predict(X, verbose=0), expected, atol=1e-5)
    ibnn.freeze(model, "stochastic")
    assert not any("loc" in weight.path for weight in model.trainable_weights)


@pytest.mark.slow
def test_a_posterior_over_weights(tmp_path):
    model = network()
    wide = use(Jitter(model, 0.2), tmp_path)["epistemic"].mean()
    mc = ibnn.MonteCarlo(Jitter(model, 0.02), samples=4, seed=0)
    narrow = ops.convert_to_numpy(mc(X)["epistemic"]).mean()
    assert wide > 10 * narrow
    expected = ops.convert_to_numpy(ops.softmax(model(X)))
    np.testing.assert_allclose(
        ops.convert_to_numpy(mc.at_mean(X)["mean"]), expected, rtol=1e-5, atol=1e-6
    )


def test_a_likelihood(tmp_path):
    """Of counts, on a network of one layer, whose Laplace approximation is known."""
    y = np.random.default_rng(1).poisson(np.exp(X[:, :1]))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="log_rate")])
    model.set_weights([np.array([[0.9], [0.1], [0.0], [-0.1]]), np.array([0.1])])
    posterior = ibnn.Laplace(model, "all", "full", prior_precision=2.0, head=Counts())
    posterior.fit(X, y, verbose=0)
    rate = np.exp(model.predict(X, verbose=0))
    inputs = np.concatenate([X, np.ones((64, 1))], axis=1)
    expected = np.linalg.inv(inputs.T @ (rate * inputs) + 2.0 * np.eye(5))
    found = ops.convert_to_numpy(posterior.distribution().covariance())
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
    with pytest.raises(ValueError, match="`y` must be counts"):
        posterior.fit(X, y - 1, verbose=0)

    stochastic = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=64)
    prediction = use(stochastic, tmp_path, y, head=Counts())
    np.testing.assert_allclose(prediction["aleatoric"], prediction["mean"], rtol=1e-5)
    mc = ibnn.MonteCarlo(stochastic, samples=4, seed=0, head=Counts())
    scores = mc.evaluate(X, y, verbose=0, return_dict=True)
    nll = -poisson(mc.predict(X, verbose=0)["mean"]).logpmf(y).mean()
    assert scores["nll"] == pytest.approx(nll, rel=1e-4)
    assert ibnn.Conformal(mc, coverage=0.8).fit(X, y).evaluate(X, y)["coverage"] >= 0.8
