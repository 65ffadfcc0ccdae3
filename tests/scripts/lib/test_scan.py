"""Epochs in one compiled loop, and what else makes long runs on a GPU cheap and safe."""

import csv
import dataclasses
import importlib

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from lib import Settings, devices
from lib.devices import Devices
from lib.folder import RunFolder
from lib.scan import LARGEST, can_scan, scan
from tests.layer_checklist import numpy
from tfp_ibnn.data import ShuffledBatches

# The package exports a function of the module's name.
run_module = importlib.import_module("lib.run")

ON_JAX = keras.backend.backend() == "jax"
SMALL = Settings(
    posterior="gaussian",
    batch_size=5,
    epochs=4,
    kl_warmup=2,
    warmup_epochs=1,
    learning_rate=0.05,
    stochastic_learning_rate=0.02,
)
X = np.random.default_rng(0).normal(size=(22, 3)).astype("float32")
Y = (X[:, 0] > 0).astype("int32")


def fitted(path, settings, log):
    """Train a small network in a folder, from the checkpoint there; return it and its history."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    hidden = keras.layers.Dropout(0.2, seed=1)(keras.layers.Dense(4, "relu", name="one")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(2, name="two")(hidden))
    if settings.is_stochastic:
        model = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=22, seed=2)
    folder = RunFolder(path, {}, check=False)
    folder.claim()
    try:
        stage = settings.stages()[-1]
        run_module._fit(model, settings, stage, (X, Y), (X, Y), folder, log, Devices())
    finally:
        folder.release()
    with (folder / "training.csv").open(encoding="utf-8") as file:
        return model, list(csv.DictReader(file))


# Epochs are scanned on JAX only; there it is shown for both kinds of model.
@pytest.mark.parametrize(
    "posterior",
    ["none", "gaussian"] if ON_JAX else [pytest.param("gaussian", marks=pytest.mark.slow)],
)
def test_a_broken_run_with_rare_checkpoints_ends_like_an_unbroken_one(
    tmp_path, monkeypatch, posterior
):
    """Broken off after epoch 3, it goes on after epoch 2: on JAX in scanned epochs."""
    settings = dataclasses.replace(SMALL, posterior=posterior)
    rare = dataclasses.replace(settings, log_every=2)
    said = []
    unbroken, expected = fitted(tmp_path / "unbroken", settings, said.append)

    def stop(line):
        if "epoch 3/4" in line:
            raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "can_scan", lambda batches: ON_JAX)
    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path / "broken", rare, stop)
    model, found = fitted(tmp_path / "broken", rare, said.append)
    assert any("going on after epoch 2 of 4" in line for line in said)
    logged = [name for name in expected[0] if name.endswith("/kl")]
    assert bool(logged) == settings.is_stochastic
    for number, (row, other) in enumerate(zip(found, expected, strict=True), start=1):
        for name in {"loss", "nll", "kl", "accuracy"} & set(other):
            assert float(row[name]) == pytest.approx(float(other[name]), rel=1e-4), name
        assert all(bool(row[name]) == (number % 2 == 0) for name in logged)
    for variable, same in zip(model.variables, unbroken.variables, strict=True):
        np.testing.assert_allclose(numpy(variable.value), numpy(same.value), atol=1e-5)
    # Nothing of it stays with the model: it trains on other batches as before.
    assert model.steps_per_execution == 1
    assert model.optimizer.iterations == 16


@pytest.mark.skipif(not ON_JAX, reason="epochs are scanned on JAX only")
def test_epochs_are_scanned_where_it_pays_and_fits(monkeypatch):
    x = np.zeros((7, 2), "float32")
    whole, rest = (ShuffledBatches(x, x, 3, drop_remainder=drop) for drop in (True, False))
    monkeypatch.setattr(devices, "accelerators", list)
    assert not can_scan(whole)
    monkeypatch.setattr(devices, "accelerators", lambda: ["GPU"])
    assert can_scan(whole)
    assert not can_scan(rest)
    whole.x = np.broadcast_to(np.uint8(0), (LARGEST + 1,))
    assert not can_scan(whole)


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_both_rates_warm_up_and_then_follow_the_schedule(schedule):
    settings = dataclasses.replace(SMALL, schedule=schedule, epochs=10, warmup_epochs=2)
    model = ibnn.StochasticModel(
        inputs := keras.Input((2,)), ibnn.StochasticDense(1, train_size=1)(inputs)
    )
    optimizer = run_module._optimizer(model, settings, settings.stages()[-1], steps=100)
    for part, peak in ((optimizer.deterministic, 0.05), (optimizer.stochastic, 0.02)):
        found = [float(part._learning_rate(step)) for step in (0, 10, 20, 60, 100)]
        after = [1, 0.5, 0] if schedule == "cosine" else [1, 1, 1]
        assert found == pytest.approx([peak * share for share in (0, 0.5, *after)], abs=1e-6)


@pytest.mark.skipif(ON_JAX, reason="JAX scans")
def test_tensorflow_says_what_to_do_instead():
    x = np.zeros((6, 2), "float32")
    batches = ShuffledBatches(x, x, 3, drop_remainder=True)
    assert not can_scan(batches)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    with pytest.raises(RuntimeError, match="steps_per_execution"), scan(model, batches):
        pass
