"""What a user does on a GPU: train, predict and export, at Keras's defaults."""

import itertools
import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import ops

import tfp_ibnn as ibnn
from lib.devices import accelerators
from tests.precision import NO_GPU

ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
pytestmark = pytest.mark.skipif(not accelerators(), reason=NO_GPU)

X = np.random.default_rng(0).normal(size=(64, 16, 16, 3)).astype("float32")
Y = (X.mean(axis=(1, 2)).argmax(axis=-1)).astype("int32")
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network(posterior=None, **options):
    layers = keras.layers
    det = keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            *ibnn.data.preprocessing(X, augment=True, padding=1, seed=0),
            layers.Conv2D(8, 3, strides=2, activation="relu", name="conv1"),
            layers.BatchNormalization(),
            layers.Conv2D(8, 3, strides=2, activation="relu", name="conv2"),
            layers.Dropout(0.1),
            layers.Flatten(),
            layers.Dense(3, dtype="float32", name="logits"),
        ]
    )
    return ibnn.to_stochastic(det, posterior or ibnn.NormalAffine(), len(X), seed=0, **options)


def assert_learns(history):
    """Of the epochs, the last half must be better than the first: each has noise of its own."""
    first, last = np.split(np.array(history["nll"]), 2)
    assert np.isfinite(history["loss"]).all()
    assert last.mean() < first.mean()


def train(model, epochs=8, **options):
    optimizer = ibnn.two_speed(keras.optimizers.Adam(0.01), stochastic_lr=0.02)
    model.compile(optimizer, LOGITS, metrics=["accuracy"], **options)
    return model.fit(X, Y, batch_size=32, epochs=epochs, verbose=0).history


@pytest.fixture(scope="module")
def trained():
    keras.utils.set_random_seed(0)
    model = network()
    train(model)
    return model


POSTERIORS = {
    "gaussian": ibnn.NormalAffine,
    "flow": lambda: ibnn.NormalInvConv(1, planar=1),
    "mixture": lambda: ibnn.MixturePosterior(2),
}


@pytest.mark.parametrize(
    ("name", "precision", "jit_compile"),
    [
        *itertools.product(("gaussian", "flow"), ("float32", "mixed_bfloat16"), ("auto", False)),
        ("mixture", "float32", "auto"),
    ],
)
def test_training(policy, name, precision, jit_compile):
    policy(precision)
    model = network(POSTERIORS[name]())
    assert_learns(train(model, jit_compile=jit_compile))
    if jit_compile == "auto":
        assert model.jit_compile


def test_all_numbers_are_on_the_gpu(trained):
    """TensorFlow would keep int32 ones on the CPU."""
    variables = [*trained.variables, *trained.optimizer.variables]
    if ON_TENSORFLOW:
        assert {v.value.device.split(":")[-2] for v in variables} == {"GPU"}
    else:
        assert {d.platform for v in variables for d in v.value.devices()} == {"gpu"}


WAYS = {
    "shared": {},
    "antithetic": {"sampling": "antithetic"},
    "quasi-random": {"sampling": "qmc"},
    "own draws": {"independent": True},
    "dropout": {"dropout": True},
    "all kept": {"return_samples": True, "interval": 0.9, "standard_error": True},
    "chunks": {"chunk_size": 3},
}


@pytest.mark.parametrize("way", WAYS)
def test_prediction_is_that_of_the_cpu(trained, way, tmp_path):
    mc = ibnn.MonteCarlo(trained, samples=8, seed=1, **WAYS[way])
    found = mc.predict(X[:16], verbose=0)
    np.testing.assert_allclose(found["mean"].sum(axis=-1), 1, rtol=1e-5)
    np.testing.assert_allclose(found["entropy"], found["aleatoric"] + found["epistemic"], atol=1e-5)
    mc.save(tmp_path / "mc.keras")
    with keras.device("cpu:0"):
        copy = keras.saving.load_model(tmp_path / "mc.keras")
        there = {key: ops.convert_to_numpy(value) for key, value in copy.average(X[:16]).items()}
    for key, value in there.items():
        np.testing.assert_allclose(found[key], value, atol=1e-4, err_msg=key)


def test_evaluation(trained):
    scores = ibnn.MonteCarlo(trained, samples=8).evaluate(X, Y, verbose=0, return_dict=True)
    assert np.isfinite(list(scores.values())).all()
    assert {"accuracy", "nll", "brier", "ece"} <= scores.keys()


def test_fresh_draws_differ(trained):
    mc = ibnn.MonteCarlo(trained, samples=4, independent=True)
    first, second = (mc.predict(X[:4], verbose=0)["mean"] for _ in range(2))
    assert np.any(first != second)


@pytest.mark.skipif(not ON_TENSORFLOW, reason="of TensorFlow's strategies")
def test_mirrored_strategy_on_one_gpu():
    import tensorflow as tf

    with tf.distribute.MirroredStrategy(["GPU:0"]).scope():
        model = network()
        optimizer = ibnn.two_speed(keras.optimizers.Adam(0.01), stochastic_lr=0.02)
        model.compile(optimizer, LOGITS)
        history = model.fit(X, Y, batch_size=32, epochs=8, verbose=0).history
    assert_learns(history)


def test_a_checkpoint_resumes(tmp_path):
    def run(epochs):
        keras.utils.set_random_seed(0)
        model = network(ibnn.NormalPlanar1d())
        model.compile(ibnn.two_speed(keras.optimizers.SGD(0.01), stochastic_lr=0.02), LOGITS)
        batches = ibnn.data.ShuffledBatches(X, Y, 32, seed=0)
        checkpoint = ibnn.Checkpoint(tmp_path / "run.npz")
        done = checkpoint.restore(model)
        callbacks = [batches.follow(), checkpoint]
        options = {"shuffle": False, "initial_epoch": done, "callbacks": callbacks, "verbose": 0}
        model.fit(batches, epochs=epochs, **options)
        return [logs["loss"] for logs in checkpoint.logs]

    whole = run(4)
    (tmp_path / "run.npz").unlink()
    run(2)
    np.testing.assert_allclose(run(4), whole, rtol=1e-4)


LOAD = """
import json, sys, numpy as np, tensorflow as tf
assert not tf.config.list_physical_devices("GPU")
serve = tf.saved_model.load(sys.argv[1]).signatures["serve"]
x = tf.constant(np.load(sys.argv[2]))
(name,) = serve.structured_input_signature[1]
print(json.dumps(serve(**{name: x})["mean"].numpy().tolist()))
"""


@pytest.mark.skipif(not ON_TENSORFLOW, reason="of TensorFlow's own form of a model")
def test_a_model_exported_on_a_gpu_runs_on_a_cpu(trained, tmp_path):
    mc = ibnn.MonteCarlo(trained, samples=8, seed=1)
    ibnn.export(mc, tmp_path / "model")
    np.save(tmp_path / "x.npy", X[:5])
    done = subprocess.run(
        [sys.executable, "-c", LOAD, tmp_path / "model", tmp_path / "x.npy"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        check=True,
    )
    there = json.loads(done.stdout.splitlines()[-1])
    here = ops.convert_to_numpy(mc(X[:5])["mean"])
    np.testing.assert_allclose(there, here, atol=1e-4)
