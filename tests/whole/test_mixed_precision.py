"""Half precision in the network, full precision in what the posterior and the scores need."""

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

import tfp_ibnn as ibnn
from tests import precision
from tests.likelihoods.tools import X, Y
from tfp_ibnn._core import backend

HALVES = ("mixed_bfloat16", "mixed_float16")


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32").reshape(-1, 8, 8, 1)
    # Many, blurred by noise: of a few hundred, one that changes its bin moves the ECE by 1e-3.
    many = np.tile(x[1000:], (12, 1, 1, 1))
    noise = np.random.default_rng(0).normal(scale=0.2, size=many.shape).astype("float32")
    return (x[:1000], y[:1000]), (many + noise, np.tile(y[1000:], 12))


def make():
    det = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, activation="relu", name="first"),
            keras.layers.Conv2D(12, 3, strides=2, activation="relu", name="second"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, name="third"),
        ]
    )
    templates = {
        "first": ibnn.NormalAffine(),
        "second": ibnn.NormalInvConv(depth=1, planar=1),
        "third": ibnn.MixturePosterior(),
    }
    model = ibnn.to_stochastic(det, templates, train_size=1000, seed=1)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)
    model.compile(
        ibnn.two_speed(optimizer, stochastic_lr=0.02),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=backend.jit_pays(),
    )
    return model


def scores(model, data):
    mc = ibnn.MonteCarlo(model, samples=32, seed=0)
    return mc.evaluate(*data, batch_size=400, verbose=0, return_dict=True)


def train(model, data, **options):
    model.fit(*data, batch_size=50, epochs=8, verbose=0, **options)


@pytest.fixture(scope="module")
def full(digits):
    """Weights before and after training in full precision, and the scores."""
    keras.utils.set_random_seed(0)
    model = make()
    start = model.get_weights()
    train(model, digits[0])
    return start, model.get_weights(), scores(model, digits[1])


# On JAX, bfloat16 is what GPUs and TPUs are given.
@pytest.mark.slow
@pytest.mark.parametrize("half", [HALVES[0], pytest.param(HALVES[1], marks=pytest.mark.once)])
def test_agrees_with_full_precision_and_trains_without_nan(half, policy, full, digits):
    start, trained, known = full
    assert known["accuracy"] > 0.8
    policy(half)
    model = make()
    model.set_weights(trained)
    found = scores(model, digits[1])
    for name in ("accuracy", "nll", "brier", "ece"):  # bfloat16 rounds by 4e-3
        assert abs(found[name] - known[name]) <= precision.at_least(4e-3), (name, found, known)

    model.set_weights(start)
    train(model, digits[0], callbacks=[ibnn.TerminateOnNonFinite(every=10, raises=True)])
    found = scores(model, digits[1])
    assert found["accuracy"] > known["accuracy"] - 0.03
    assert found["nll"] < known["nll"] + 0.1


@pytest.mark.parametrize("half", HALVES[:1])
def test_steps_change_all_weights_and_lower_the_loss(eagerly, half, policy, digits):
    policy(half)
    model, ((x, y), _) = make(), digits
    before = [keras.ops.convert_to_numpy(w).copy() for w in model.trainable_weights]
    losses = [model.train_on_batch(x[:50], y[:50], return_dict=True)["nll"] for _ in range(4)]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    for old, weight in zip(before, model.trainable_weights, strict=True):
        new = keras.ops.convert_to_numpy(weight)
        assert new.dtype == "float32"
        assert np.isfinite(new).all(), weight.path
        assert np.any(new != old), weight.path


@pytest.mark.once
@pytest.mark.parametrize("half", HALVES)
def test_what_the_posterior_computes_is_in_full_precision(half, policy):
    policy(half)
    model = make()
    y = model(np.ones((2, 8, 8, 1), "float32"), training=True)
    assert keras.backend.standardize_dtype(y.dtype) == half.removeprefix("mixed_")
    for loss in model.losses:
        assert keras.backend.standardize_dtype(loss.dtype) == "float32"
    for layer in ibnn.stochastic_layers(model):
        draw = layer.posterior.summary()
        assert {keras.backend.standardize_dtype(part.dtype) for part in draw} == {"float32"}
    mc = ibnn.MonteCarlo(model, samples=2)
    for value in mc(np.ones((2, 8, 8, 1), "float32")).values():
        assert keras.backend.standardize_dtype(value.dtype) == "float32"


@pytest.mark.parametrize("posterior", [ibnn.NormalAffine, ibnn.MeanField])
def test_layers_of_two_precisions_train(eagerly, posterior):
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(3, dtype="float64")(inputs)
    plain = keras.Model(inputs, keras.layers.Dense(3, "softmax", dtype="float32")(hidden))
    model = ibnn.to_stochastic(plain, posterior(), train_size=20)
    model.compile("sgd", "sparse_categorical_crossentropy")
    history = model.fit(X, Y["kind"], verbose=0).history
    assert np.isfinite(history["loss"]).all()
