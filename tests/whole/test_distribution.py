"""Training on several devices, and in several processes, by Keras's own engines."""

import csv
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import lib
from lib import RunError, Settings, data, devices_for
from tests.layer_checklist import numpy
from tfp_ibnn._core import backend

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "train_cifar.py"
JAX = keras.backend.backend() == "jax"
on_jax = pytest.mark.skipif(not JAX, reason="JAX's engine")
on_tensorflow = pytest.mark.skipif(JAX, reason="TensorFlow's engine")
VARIABLES = ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID")


def start(*arguments, **environment):
    # The tests run with 64 bits, which changes what JAX draws. Devices are made before it starts.
    # Compilation is most of the time.
    quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    common = {"JAX_ENABLE_X64": "1", "XLA_FLAGS": quick, "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            **common,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "CUDA_VISIBLE_DEVICES": "-1",
            **environment,
        },
    )


def start_two(*arguments, outputs=((), ())):
    """Start two processes that train together, on a port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    names = [f"KERAS_DISTRIBUTION_{name}" for name in VARIABLES]
    return [
        start(*arguments, *outputs[i], **dict(zip(names, (address, "2", str(i)), strict=True)))
        for i in range(2)
    ]


def output_of(process):
    try:
        output, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-3000:]
    return output


def result_of(process):
    return json.loads(output_of(process).splitlines()[-1])


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def close_weights(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        close(one, other)


# A small network; its KL is a closed form, and not 0 from the start.
NETWORK = """
import json, sys, tempfile
import keras, numpy as np
from keras import ops
import tfp_ibnn as ibnn

N = 32
x = np.random.default_rng(0).normal(size=(N, 4)).astype("float32")
y = np.arange(N) % 3

def network():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    posterior = ibnn.NormalAffine(initial_scale=0.2)
    hidden = ibnn.StochasticDense(
        6, activation="tanh", posterior=posterior, train_size=N, seed=1, name="hidden"
    )(inputs)
    outputs = ibnn.StochasticDense(
        3, posterior=posterior, train_size=N, seed=2, name="outputs"
    )(hidden)
    model = ibnn.StochasticModel(inputs, outputs, train_samples=2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(ibnn.two_speed(keras.optimizers.SGD(0.1, 0.9), 0.05), loss, jit_compile=JIT)
    model.optimizer.build(model.trainable_variables)
    return model

def fit(model, shard=(0, 1), size=16, **options):
    batches = ibnn.data.ShuffledBatches(x, y, size, seed=3, shard=shard)
    callbacks = [batches.follow(), *options.pop("callbacks", ())]
    history = model.fit(batches, shuffle=False, verbose=0, callbacks=callbacks, **options).history
    return {name: values[0] for name, values in history.items()}

def weights(model):
    return [ops.convert_to_numpy(v.value).tolist() for v in model.trainable_variables]
"""


# TensorFlow: replicas.

MIRRORED = f"""
JIT = False
{NETWORK}
import tensorflow as tf
from lib import devices_for
from tfp_ibnn._core.backend import SeedGenerator

# Tracing is most of the time: leave the graphs as they are.
tf.config.optimizer.set_experimental_options({{"disable_meta_optimizer": True}})
devices = devices_for(2)
found = {{"replicas": devices._strategy.num_replicas_in_sync}}

def off_and_on(model):
    start = model.get_weights()
    ibnn.set_noise(model, False)
    off = fit(model)
    after = weights(model)
    # Through these weights z has no effect: what moves the posteriors is the KL alone.
    model.set_weights(start)
    for layer in ibnn.layers.stochastic_layers(model):
        layer.layer.kernel.assign(ops.zeros_like(layer.layer.kernel))
    on = fit(model, steps_per_epoch=1)
    moved = [
        ops.convert_to_numpy(v.value).tolist() for v in model.trainable_variables
        if "posterior" in v.path
    ]
    model.set_weights(start)
    same = np.repeat(x[:1], 4096, axis=0)
    scores = model.evaluate(same, np.zeros(4096), 4096, verbose=0, return_dict=True)
    return {{"off": off, "after": after, "on": on, "moved": moved, "scores": scores}}

plain_model = network()
found["plain"] = off_and_on(plain_model)
draws = plain_model(np.repeat(x[:1], 400, axis=0))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
found["spread"] = float(np.std(ops.convert_to_numpy(loss(np.zeros(400), draws))))

with devices.building():
    model = network()
found["mirrored"] = off_and_on(model)

# What eight equal examples give, four of them in each replica.
equal = np.ones((8, 4), "float32")
found["outputs"] = model.predict(equal, verbose=0).tolist()
with devices.building():
    mc = ibnn.MonteCarlo(model, 2, seed=0, independent=True)
found["independent"] = mc.predict(equal, verbose=0)["mean"].tolist()

# Going on from a checkpoint, as if there had been no end.
with tempfile.TemporaryDirectory() as folder:
    checkpoint = ibnn.Checkpoint(folder + "/checkpoint.npz")
    fit(model, callbacks=[checkpoint])
    fit(model, initial_epoch=1, epochs=2)
    found["unbroken"] = weights(model)
    found["seen"] = float(ops.convert_to_numpy(model._nll_tracker.count))
    fit(model, initial_epoch=2, epochs=3)
    with devices.building():
        assert checkpoint.restore(model) == 1
    fit(model, initial_epoch=1, epochs=2)
    found["resumed"] = weights(model)

# Layers and generators by themselves.
with devices.building():
    generators = SeedGenerator(3), keras.random.SeedGenerator(3)
    shift, mirror = ibnn.data.RandomShift(2, seed=0), ibnn.data.RandomMirror(seed=0)
    norm = ibnn.flows.BatchNorm()
    norm.build((None, 2))
images = np.arange(16 * 3 * 3.0, dtype="float32").reshape(16, 3, 3, 1)

def step():
    number = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, "float32")
    draws = number + ops.reshape(ops.arange(8, dtype="float32"), (4, 2))
    norm.forward_and_log_det(draws, training=True)
    seeds = [generator.next() for generator in generators]
    return [*seeds, shift(images, training=True), mirror(images, training=True)]

both = tf.function(lambda: devices._strategy.run(step))
for _ in range(2):
    values = both()
names = ("own", "keras", "shift", "mirror")
found["layers"] = {{
    name: [part.numpy().tolist() for part in value.values] for name, value in zip(names, values)
}}
found["norm"] = [part.numpy().tolist() for part in norm.mean.value.values]
found["state"] = [generator.state.numpy().tolist() for generator in generators]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def mirrored():
    return result_of(start("-c", MIRRORED))


@on_tensorflow
@pytest.mark.slow
def test_replicas_without_noise_are_one_device(mirrored):
    assert mirrored["replicas"] == 2
    one, two = mirrored["plain"], mirrored["mirrored"]
    assert set(two["off"]) == {"loss", "nll", "kl"}
    assert one["off"]["kl"] == two["off"]["kl"] == 0
    assert two["off"]["loss"] == pytest.approx(one["off"]["loss"], rel=1e-6)
    assert two["off"]["nll"] == pytest.approx(one["off"]["loss"], rel=1e-6)
    close_weights(two["after"], one["after"])


@on_tensorflow
@pytest.mark.slow
def test_replicas_count_the_kl_once(mirrored):
    one, two = mirrored["plain"], mirrored["mirrored"]
    assert one["on"]["kl"] > 1
    for logs in (one["on"], two["on"]):
        # The outputs are 0 whatever the noise is.
        assert logs["nll"] == pytest.approx(np.log(3), rel=1e-6)
        assert logs["loss"] - logs["nll"] == pytest.approx(logs["kl"] / 32, rel=1e-4)
    assert two["on"] == pytest.approx(one["on"], rel=1e-5)
    close_weights(two["moved"], one["moved"])


@on_tensorflow
@pytest.mark.slow
def test_replicas_count_the_examples_of_all(mirrored):
    """By this count `fit` checks `train_size`."""
    assert mirrored["seen"] == 2 * 32  # two samples of each


@on_tensorflow
@pytest.mark.slow
def test_replicas_have_the_same_loss_in_expectation(mirrored):
    one, two = mirrored["plain"]["scores"], mirrored["mirrored"]["scores"]
    error = mirrored["spread"] / 4096**0.5
    assert error > 1e-3  # else the test shows nothing
    assert abs(two["nll"] - one["nll"]) < 5 * 2**0.5 * error
    assert two["kl"] == pytest.approx(one["kl"], rel=1e-5)
    assert two["loss"] == pytest.approx(two["nll"] + two["kl"] / 32, rel=1e-5)


@on_tensorflow
@pytest.mark.slow
def test_replicas_draw_their_own_noise(mirrored):
    for name in ("outputs", "independent"):
        rows = np.array(mirrored[name])
        assert len(np.unique(rows, axis=0)) == 8, name
    layers = mirrored["layers"]
    for name in ("shift", "mirror"):
        assert layers[name][0] != layers[name][1], name


@on_tensorflow
@pytest.mark.slow
def test_the_first_replica_draws_as_keras_does(mirrored):
    (first, second), keras_seeds = mirrored["layers"]["own"], mirrored["layers"]["keras"]
    assert first == keras_seeds[0] == keras_seeds[1] == [3, 1]
    assert first != second
    own, others = mirrored["state"]
    assert own == others == [3, 2]


def test_without_replicas_a_generator_is_keras_s():
    own, other = backend.SeedGenerator(5), keras.random.SeedGenerator(5)
    for _ in range(3):
        np.testing.assert_array_equal(numpy(own.next()), numpy(other.next()))
    np.testing.assert_array_equal(numpy(own.state.value), numpy(other.state.value))
    assert own.state.path.split("/")[-1] == other.state.path.split("/")[-1]


@on_tensorflow
@pytest.mark.slow
def test_replicas_keep_the_same_running_statistics(mirrored):
    first, second = mirrored["norm"]
    assert first == second
    # Twice the mean of [3, 4] and [4, 5], at momentum 0.99.
    close(first, np.array([3.5, 4.5]) * (1 - 0.99**2))


@on_tensorflow
@pytest.mark.slow
def test_replicas_go_on_from_a_checkpoint(mirrored):
    close_weights(mirrored["resumed"], mirrored["unbroken"])


# JAX: one global batch, on several devices or in several processes.

PARALLEL = f"""
JIT = True
{NETWORK}
from lib import Devices, devices_for

def results(devices):
    with devices.building():
        model = network()
    with devices.training():
        ibnn.set_noise(model, False)
        off = fit(model, devices.shard)
        after = weights(model)
        ibnn.set_noise(model, True)
        on = fit(model, devices.shard, initial_epoch=1, epochs=2, callbacks=[ibnn.PosteriorLog()])
    found = {{"count": devices.count, "shard": devices.shard, "off": off, "after": after}}
    return {{**found, "on": on, "end": weights(model)}}

if sys.argv[1] == "devices":
    several = devices_for(2)
    print(json.dumps([results(Devices()), results(several)]))
else:
    devices = devices_for(distributed=True)
    found = results(devices)
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def parallel():
    """What one device, two devices, and either of two processes come to."""
    together = start_two("-c", PARALLEL, "process")
    try:
        return [*result_of(start("-c", PARALLEL, "devices")), *map(result_of, together)]
    finally:
        for process in together:
            process.kill()


@on_jax
def test_shards_of_devices_and_processes(parallel):
    assert [found["count"] for found in parallel] == [1, 2, 2, 2]
    assert [found["shard"] for found in parallel] == [[0, 1], [0, 1], [0, 2], [1, 2]]


@on_jax
def test_without_noise_all_are_one_device(parallel):
    one, *others = parallel
    assert one["off"]["kl"] == 0
    for other in others:
        assert other["off"] == pytest.approx(one["off"], rel=1e-5)
        close_weights(other["after"], one["after"])


@on_jax
def test_with_noise_all_are_one_device_too(parallel):
    """The draws are those of the global batch, whoever computes them, and the KL counts once."""
    one, *others = parallel
    assert one["on"]["kl"] > 1
    for other in others:
        assert other["on"]["loss"] - other["on"]["nll"] == pytest.approx(
            other["on"]["kl"] / 32, rel=1e-4
        )
        assert other["on"] == pytest.approx(one["on"], rel=1e-4, abs=1e-6)
        close_weights(other["end"], one["end"])


@on_jax
def test_processes_end_with_identical_weights(parallel):
    first, second = parallel[2:]
    assert first["end"] == second["end"]
    assert np.abs(np.array(first["end"][0]) - first["after"][0]).max() > 1e-3


# Posteriors over weights, on either engine: one model on one device and on two.

OF_WEIGHTS = f"""
JIT = {JAX}
{NETWORK}
from lib import Devices, devices_for

two = devices_for(2)

def results(devices, posterior):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(6, "tanh"), keras.layers.Dense(3)]
    det = keras.Sequential([keras.Input((4,)), *layers])
    with devices.building():
        model = ibnn.to_stochastic(det, posterior, train_size=N, seed=1)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=JIT)
        model.optimizer.build(model.trainable_variables)
    with devices.training():
        ibnn.set_noise(model, False)
        off = fit(model)
        ibnn.set_noise(model, True)
        on = fit(model)
    return {{"off": off, "on": on, "end": weights(model)}}

templates = {{"mean_field": ibnn.MeanField(), "mnf": ibnn.MNF()}}
print(json.dumps({{
    name: [results(devices, template) for devices in (Devices(), two)]
    for name, template in templates.items()
}}))
"""


@pytest.mark.slow
def test_posteriors_of_weights_on_two_devices():
    found = result_of(start("-c", OF_WEIGHTS))
    for name, (one, two) in found.items():
        assert two["off"]["nll"] == pytest.approx(one["off"]["nll"], rel=1e-4), name
        for logs in (one["on"], two["on"]):
            assert logs["kl"] > 1, name
            assert logs["loss"] - logs["nll"] == pytest.approx(logs["kl"] / 32, rel=1e-3), name
        assert all(np.isfinite(part).all() for part in two["end"]), name
    # The KL of mean field is a closed form of weights that have hardly moved.
    one, two = found["mean_field"]
    assert two["on"]["kl"] == pytest.approx(one["on"]["kl"], rel=0.02)


# The command line.

RUN = {
    "dataset": "digits",
    "model": "mlp",
    "epochs": 2,
    "limit": 200,
    "batch_size": 40,
    "samples": 3,
    "learning_rate": 0.05,
    "augment": True,
}
NOISY = Settings(**RUN, posterior="gaussian", kl_warmup=3)
PLAIN = Settings(**RUN, posterior="none", evaluate_every=1)  # its augmentation is random


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    data.load("digits", folder)
    return folder


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_cifar", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def command(settings, data_dir):
    arguments = [*settings.command().split()[2:], "--data-dir", data_dir]
    return [SCRIPT, *arguments, "--backend", keras.backend.backend()]


def rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def metrics_of(folder):
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


@on_tensorflow
@pytest.mark.slow
def test_the_script_trains_on_replicas(script, data_dir, tmp_path, capsys):
    words = [*command(NOISY, data_dir), "--output", tmp_path / "run"]
    assert "Written to" in output_of(start(*words, "--devices", 2))
    found = metrics_of(tmp_path / "run")
    assert found["devices"] == 2
    first, second = rows(tmp_path / "run" / "training.csv")
    assert second["nll"] < first["nll"]
    assert found["saved_model"] is True
    # A plain model, which forgets the strategy it was trained by.
    model = keras.saving.load_model(tmp_path / "run" / "model.keras")
    assert model._distribute_strategy is None
    # The replicas have drawn otherwise than one device would have.
    assert script.main([str(word) for word in words[1:]]) == 1
    assert "replicas 2, not None" in capsys.readouterr().err


@pytest.fixture(scope="module")
def broken_off(data_dir, tmp_path_factory):
    """A run of one device, what it comes to, and a copy of it as it was after an epoch."""
    folder = tmp_path_factory.mktemp("runs")

    def copy_after_an_epoch(line):
        if line.startswith("training: epoch 1/"):
            shutil.copytree(folder / "whole", folder / "broken")

    found = lib.run(PLAIN, folder / "whole", data_dir, log=copy_after_an_epoch)
    return folder / "whole", folder / "broken", found


@on_jax
@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--devices", "--distributed"])
def test_the_script_goes_on_with_others(broken_off, data_dir, tmp_path, flag):
    """A run of one device goes on with two, and ends where it would have ended by itself."""
    whole, copy, expected = broken_off
    broken, absent = tmp_path / "broken", tmp_path / "absent"
    shutil.copytree(copy, broken)
    words = command(PLAIN, data_dir)
    if flag == "--devices":
        said = output_of(start(*words, "--output", broken, "--devices", 2))
    else:
        # The second process has another folder, which it leaves alone: it asks the first.
        outputs = [("--output", folder) for folder in (broken, absent)]
        said, silence = map(output_of, start_two(*words, "--distributed", outputs=outputs))
        assert "training" not in silence
        assert "Written" not in silence
        assert not absent.exists()
    assert "going on after epoch 1 of 2" in said
    assert "Written to" in said
    found = metrics_of(broken)
    assert (expected["devices"], found["devices"]) == (1, 2)
    for key in ("accuracy", "nll", "brier", "ece"):
        assert found[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-4)
    models = [keras.saving.load_model(folder / "model.keras") for folder in (broken, whole)]
    for one, other in zip(*(model.weights for model in models), strict=True):
        np.testing.assert_allclose(numpy(one.value), numpy(other.value), rtol=1e-3, atol=1e-4)
    for one, other in zip(
        *(rows(folder / "training.csv") for folder in (broken, whole)), strict=True
    ):
        del one["seconds"], other["seconds"]
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)


@on_jax
@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_others(data_dir, tmp_path):
    words = command(Settings(**RUN | {"epochs": 100_000}, posterior="none"), data_dir)
    together = start_two(*words, "--output", tmp_path / "run", "--distributed")
    first, second = together
    try:
        while "training: epoch 1/" not in (line := first.stdout.readline()):
            assert line, first.communicate()[1][-3000:]
        second.kill()
        _, errors = first.communicate(timeout=120)
    finally:
        for process in together:
            process.kill()
    assert first.returncode == 1
    assert "error: Training in common has broken off" in errors
    assert (tmp_path / "run" / "training.npz").exists()


@pytest.mark.slow
@on_jax
def test_processes_with_different_settings_are_refused(data_dir, tmp_path):
    words = command(PLAIN, data_dir)
    outputs = [("--output", tmp_path / "run", "--seed", seed) for seed in (0, 1)]
    together = start_two(*words, "--distributed", outputs=outputs)
    try:
        _, errors = together[1].communicate(timeout=120)
    finally:
        for process in together:
            process.kill()
    assert together[1].returncode == 1
    assert "error: The processes have different settings" in errors


# What is refused.


def refused(script, capsys, output, *arguments):
    words = (*command(PLAIN, output)[1:], "--output", output, *arguments)
    code = script.main([str(word) for word in words])
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert not output.exists()
    return code, message


def test_more_devices_than_there_are_are_refused(script, capsys, tmp_path):
    keras.ops.zeros(1)  # a backend that has started makes no more devices
    code, message = refused(script, capsys, tmp_path / "run", "--devices", 64)
    assert code == 2
    assert "`devices` is 64" in message
    code, message = refused(script, capsys, tmp_path / "run", "--devices", 0)
    assert code == 2
    assert "`devices`" in message


@pytest.mark.once
def test_a_batch_that_does_not_divide_is_refused():
    devices = lib.Devices()
    devices.check_batch(7)
    devices.count = 3
    devices.check_batch(6)
    with pytest.raises(RunError, match="batch of 7 .* 3 devices.*`batch_size`"):
        devices.check_batch(7)


@on_tensorflow
def test_many_machines_take_jax(script, capsys, tmp_path):
    code, message = refused(script, capsys, tmp_path / "run", "--distributed")
    assert code == 2
    assert "JAX" in message


@on_jax
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((None, None, None), "JOB_ADDRESSES, KERAS_DISTRIBUTION_NUM_PROCESSES, KERAS_DIST"),
        (("127.0.0.1:1", "2", None), "the environment variable KERAS_DISTRIBUTION_PROCESS_ID:"),
        (("127.0.0.1:1", "2", "2"), "got '2' and '2'"),
        (("127.0.0.1:1", "two", "0"), "got '0' and 'two'"),
    ],
)
def test_the_environment_must_name_the_processes(
    script, capsys, tmp_path, monkeypatch, values, message
):
    for name, value in zip(VARIABLES, values, strict=True):
        if value is None:
            monkeypatch.delenv(f"KERAS_DISTRIBUTION_{name}", raising=False)
        else:
            monkeypatch.setenv(f"KERAS_DISTRIBUTION_{name}", value)
    code, found = refused(script, capsys, tmp_path / "run", "--distributed")
    assert code == 2
    assert message in found


def test_one_device_is_no_distribution():
    for count in (None, 1):
        devices = devices_for(count)
        assert type(devices) is lib.Devices
        assert (devices.count, devices.shard, devices.identity) == (1, (0, 1), {})
