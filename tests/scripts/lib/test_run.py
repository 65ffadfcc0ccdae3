import csv
import errno
import functools
import importlib.util
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest

import lib
import tfp_ibnn as ibnn
from lib import RunError, Settings, data, report
from lib.networks import mlp
from lib.run import _network
from tests.layer_checklist import numpy

SCRIPT = Path(__file__).parents[3] / "scripts" / "train_cifar.py"
HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None
SMALL = {
    "dataset": "digits",
    "model": "mlp",
    "posterior": "none",
    "epochs": 1,
    "limit": 200,
    "batch_size": 100,
    "samples": 3,
    "learning_rate": 0.05,
}
DIGITS = ("--dataset", "digits", "--model", "mlp", "--posterior", "none", "--data-dir")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    data.load("digits", folder)
    return folder


@pytest.fixture(scope="module")
def run(data_dir):
    return functools.partial(lib.run, data_dir=data_dir, log=lambda line: None)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_cifar", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def contents(folder):
    """All files below a folder, with their bytes and when they were written."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return [
            {name: float(value) for name, value in row.items() if value}
            for row in csv.DictReader(file)
        ]


def strict_json(path):
    """Read JSON as the standard has it: without NaN."""

    def refuse(constant):
        raise AssertionError(f"{path}: {constant}")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


# A finished run.

FULL = Settings(
    **SMALL
    | {"posterior": "gaussian", "epochs": 2, "pretrain_epochs": 1, "evaluate_every": 1, "seed": 3}
)


@pytest.fixture(scope="module")
def full(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("full") / "deep" / "run"
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["scripts/train_cifar.py", "--an-option", "a value"])
        metrics = run(FULL, folder, log=lines.append)
    return folder, metrics, lines


def test_a_run_writes_all_that_it_says(full):
    folder, metrics, lines = full
    assert strict_json(folder / "metrics.json") == metrics
    assert strict_json(folder / "settings.json") == {
        **FULL.as_dict(),
        "backend": keras.backend.backend(),
    }
    for key in ("accuracy", "nll", "brier", "ece"):
        assert math.isfinite(metrics[key])
    assert 0.1 < metrics["accuracy"] <= 1
    assert metrics["train_size"] == metrics["test_size"] == 200
    assert (metrics["samples"], metrics["tested_on"], metrics["method"]) == (3, "test", "gaussian")
    assert set(metrics["seconds"]) == {"pretraining", "training", "testing"}
    for name in ("reliability.png", "training.png", "images.png"):
        content = (folder / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 5_000
    assert [row["epoch"] for row in rows(folder / "training.csv")] == [1, 2]
    assert [row["epoch"] for row in rows(folder / "pretraining.csv")] == [1]
    assert {"loss", "kl", "beta", "fc1/kl", "test_nll", "seconds"} <= set(
        rows(folder / "training.csv")[0]
    )
    card = (folder / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert "python scripts/train_cifar.py --an-option 'a value'" in card
    assert f"{metrics['nll']:.4f}" in card
    assert "| | this model, 3 draws | the deterministic network it began with |" in card
    assert re.search(r"\| ECE of a perfectly calibrated model \| 0\.\d{4} \| 0\.\d{4} \|", card)
    assert "The library's defaults for this network and these data: `prior_scale` 0.3, " in card
    epochs = [line for line in lines if line.startswith("training: epoch")]
    assert all(re.search(r", ece [\d.e-]+, .*test_ece [\d.e-]+", line) for line in epochs)
    assert "import keras, tfp_ibnn as ibnn  # without the second, Keras cannot load" in card
    assert sum(line.startswith("training: epoch") for line in lines) == 2
    assert list((folder / "tensorboard").rglob("events*")) if HAS_TENSORFLOW else True
    # No checkpoint, no temporary file.
    assert not [path for path in folder.rglob("*") if path.name.startswith(".")]
    assert not list(folder.glob("*training.npz"))


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({"posterior": "none"}, "NLL"),
        ({"posterior": "gaussian", "beta": 1.0}, "negative ELBO"),
        ({"posterior": "gaussian", "beta": 10.0}, "NLL + weighted KL"),
        ({"posterior": "gaussian", "beta": 1.0, "kl_warmup": 2}, "NLL + weighted KL"),
    ],
)
def test_the_loss_of_the_figure_has_its_name(changes, label):
    options = Settings(**SMALL | {"epochs": 3} | changes).as_dict()
    assert report.loss_label(options) == label


def test_the_scores_are_those_of_the_probabilities(full):
    folder, metrics, _ = full
    with np.load(folder / "probabilities.npz") as file:
        p, labels = file["probabilities"].astype("float64"), file["labels"]
        assert file["epistemic"].shape == labels.shape == (200,)
        assert (file["epistemic"] > 0).any()
    np.testing.assert_allclose(p.sum(axis=1), 1, atol=5e-3)
    assert metrics["accuracy"] == pytest.approx(np.mean(p.argmax(axis=1) == labels), abs=0.006)
    assert metrics["nll"] == pytest.approx(-np.log(p[np.arange(200), labels]).mean(), rel=0.01)


def test_the_model_loads_and_predicts_the_same(full, data_dir):
    folder, metrics, _ = full
    model = keras.saving.load_model(folder / "model.keras")
    _, (x, y) = data.load("digits", data_dir)
    found = lib.Scorer(model, 3, seed=3).score(x[:200], y[:200]).summary()
    for key in ("accuracy", "nll", "brier", "ece"):
        assert found[key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-5)


@pytest.mark.skipif(not HAS_TENSORFLOW, reason="a SavedModel takes TensorFlow")
def test_the_saved_model_loads(full, data_dir):
    import tensorflow as tf

    folder, metrics, _ = full
    assert metrics["saved_model"] is True
    served = tf.saved_model.load(str(folder / "saved_model"))
    _, (x, y) = data.load("digits", data_dir)
    found = served.signatures["serve"](image=tf.constant(x[:200], tf.float32))
    mean = found["mean"].numpy()
    np.testing.assert_allclose(mean.sum(axis=1), 1, rtol=1e-4)
    assert np.mean(mean.argmax(axis=1) == y[:200]) == pytest.approx(metrics["accuracy"], abs=0.1)


def test_a_finished_run_is_not_repeated(full, run, monkeypatch):
    folder, metrics, _ = full
    before, lines = contents(folder), []
    monkeypatch.setattr(data, "load", None)  # not even the data is looked at
    assert run(FULL, folder, log=lines.append) == metrics
    assert contents(folder) == before
    assert lines == [f"{folder}: finished already."]


@pytest.mark.once
def test_a_run_with_other_settings_is_refused(full, run):
    folder, _, _ = full
    before = contents(folder)
    other = Settings(**FULL.as_dict() | {"seed": 4, "learning_rate": 0.1})
    with pytest.raises(RunError, match="learning_rate 0.05, not 0.1, seed 3, not 4"):
        run(other, folder)
    assert contents(folder) == before


# Folders.


@pytest.mark.once
def test_a_folder_of_something_else_is_left_alone(run, tmp_path):
    (tmp_path / "thesis.tex").write_text("work of years")
    with pytest.raises(RunError, match="not a run"):
        run(Settings(**SMALL), tmp_path)
    assert list(contents(tmp_path)) == ["thesis.tex"]


@pytest.mark.once
@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\x00"])
def test_a_record_that_is_none_is_refused(run, tmp_path, text):
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(RunError, match=r"settings\.json"):
        run(Settings(**SMALL), tmp_path)
    assert (tmp_path / "settings.json").read_text() == text


@pytest.mark.once
def test_a_file_is_no_folder(run, script, tmp_path, capsys, data_dir):
    (tmp_path / "file").write_text("text")
    with pytest.raises(RunError, match="file"):
        run(Settings(**SMALL), tmp_path / "file")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        assert script.main([*DIGITS, str(data_dir), "--output", str(output)]) == 1
        message = capsys.readouterr().err
        assert message.startswith("error: ")
        assert message.count("\n") == 1
    assert (tmp_path / "file").read_text() == "text"


@pytest.mark.once
def test_a_folder_that_cannot_be_written_is_an_error_in_one_line(
    script, tmp_path, capsys, monkeypatch, data_dir
):
    def refuse(self, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)  # root may write anywhere
    assert script.main([*DIGITS, str(data_dir), "--output", str(tmp_path / "new")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.once
@pytest.mark.parametrize(
    "arguments",
    [
        ["--dropout", "1.5"],
        ["--dataset", "imagenet"],
        ["--posterior", "missing.json"],
        ["--model", "wide_resnet_11_4", "--dataset", "digits"],
        ["--model", "lenet", "--dataset", "digits"],
        ["--dataset", "digits", "--model", "mlp", "--seed", str(2**32)],
    ],
    ids=lambda arguments: arguments[0] + arguments[1],
)
def test_bad_options_are_found_before_anything_is_done(
    script, tmp_path, capsys, arguments, data_dir
):
    output = tmp_path / "run"
    common = ["--posterior", "none"] if "--posterior" not in arguments else []
    place = ["--output", str(output), "--data-dir", str(data_dir)]
    assert script.main([*arguments, *common, *place]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert not output.exists()


@pytest.mark.once
@pytest.mark.parametrize("pattern", ["conv9", "("])
def test_a_pattern_that_matches_nothing_is_found_before_the_pretraining(run, tmp_path, pattern):
    (tmp_path / "p.json").write_text(json.dumps({pattern: {"posterior": "NormalAffine"}}))
    options = SMALL | {"posterior": str(tmp_path / "p.json"), "pretrain_epochs": 1}
    lines = []

    def begin():
        run(Settings(**options), tmp_path / "run", log=lines.append)

    with pytest.raises((RunError, ValueError), match="conv9" if pattern == "conv9" else r"\("):
        begin()
    assert lines == []


@pytest.mark.once
def test_a_posterior_file_that_has_changed_makes_another_run(run, tmp_path, monkeypatch):
    module = sys.modules["lib.run"]  # the package has the function by that name
    # As if killed at once.
    monkeypatch.setattr(module, "_run", lambda settings, folder, *_: folder.claim())
    path = tmp_path / "p.json"
    path.write_text(json.dumps({".*": {"posterior": "NormalAffine"}}))
    run(Settings(**SMALL | {"posterior": str(path)}), tmp_path / "run")
    path.write_text(json.dumps({".*": {"posterior": "NormalAffine", "prior_scale": 0.1}}))
    with pytest.raises(RunError, match="another run"):
        run(Settings(**SMALL | {"posterior": str(path)}), tmp_path / "run")


@pytest.mark.once
@pytest.mark.parametrize("kind", ["missing", "text", "shape", "stochastic"])
def test_a_bad_pretrained_network_is_named(run, tmp_path, full, kind):
    path = tmp_path / "net.keras"
    if kind == "text":
        path.write_text("no network")
    elif kind == "shape":
        mlp((4, 4, 1), hidden=(2,)).save(path)
    elif kind == "stochastic":
        path = full[0] / "model.keras"
    with pytest.raises(RunError, match=path.name) as caught:
        run(Settings(**SMALL | {"posterior": "gaussian", "pretrained": str(path)}), tmp_path / "a")
    assert "\n" not in str(caught.value)


# Other kinds of runs.


@pytest.mark.slow
def test_a_deterministic_run_serves_what_it_predicts(run, tmp_path, data_dir):
    metrics = run(Settings(**SMALL | {"augment": True}), tmp_path / "run")
    assert (metrics["method"], metrics["samples"]) == ("deterministic", 1)
    model = keras.saving.load_model(tmp_path / "run" / "model.keras")
    _, (x, _) = data.load("digits", data_dir)
    x = x[:50].astype("float32")
    expected = keras.ops.softmax(model.predict(x, verbose=0))
    if HAS_TENSORFLOW:
        import tensorflow as tf

        served = tf.saved_model.load(str(tmp_path / "run" / "saved_model"))
        for _ in range(2):
            found = served.signatures["serve"](image=tf.constant(x))["mean"]
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.once
def test_a_run_of_some_classes_knows_no_others(eagerly, run, tmp_path, data_dir):
    small = {**SMALL, "classes": 4, "limit": None}
    metrics = run(Settings(**small), tmp_path / "run", keep_models=False)
    (_, labels), (_, tested) = data.load("digits", data_dir)
    assert metrics["train_size"] == sum(labels < 4)
    assert metrics["test_size"] == sum(tested < 4)
    with np.load(tmp_path / "run" / "probabilities.npz") as found:
        assert found["probabilities"].shape == (metrics["test_size"], 4)
        assert found["labels"].max() == 3
    card = (tmp_path / "run" / "MODEL_CARD.md").read_text()
    assert "0, 1, 2, 3: logits" in " ".join(card.split())


@pytest.mark.once
def test_a_transfer_goes_to_the_other_classes(eagerly, run, tmp_path, data_dir, monkeypatch):
    seen, fit = [], keras.Model.fit
    monkeypatch.setattr(
        keras.Model, "fit", lambda self, x, **rest: (seen.append(x), fit(self, x, **rest))[1]
    )
    small = {**SMALL, "classes": 5, "transfer": True, "pretrain_epochs": 1, "limit": 100}
    metrics = run(Settings(**small), tmp_path / "run", keep_models=False)
    _, (_, tested) = data.load("digits", data_dir)
    assert [len(batches) for batches in seen] == [5, 1]  # of 100: five times as many before
    assert metrics["train_size"] == metrics["test_size"] == 100
    with np.load(tmp_path / "run" / "probabilities.npz") as found:
        np.testing.assert_array_equal(found["labels"], tested[tested >= 5][:100] - 5)
        assert found["probabilities"].shape == (100, 5)


@pytest.mark.once
def test_a_mobilenet_begins_with_the_preprocessing_and_has_averages_that_follow():
    images = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), "uint8")
    model = _network(Settings(model="mobilenet_v2", posterior="none", classes=5), images)
    assert model.name == "mobilenet_v2"
    assert model.output_shape == (None, 5)
    assert any(isinstance(layer, ibnn.data.RandomShift) for layer in model.layers)
    norms = [x for x in model.layers if isinstance(x, keras.layers.BatchNormalization)]
    assert {layer.momentum for layer in norms} == {0.9}


@pytest.mark.once
def test_layers_that_are_to_stay_deterministic_must_exist(run, tmp_path):
    small = {**SMALL, "posterior": "gaussian", "deterministic_layers": "Fc1"}
    with pytest.raises(RunError, match="`deterministic_layers` 'Fc1' matches no layer of mlp"):
        run(Settings(**small), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_dropout_without_a_posterior_is_mc_dropout(eagerly, run, tmp_path):
    chosen = Settings(**SMALL | {"dropout": 0.3, "validation": 50})
    metrics = run(chosen, tmp_path / "run", keep_models=False)
    assert (metrics["method"], metrics["samples"]) == ("mc_dropout", 3)
    assert (metrics["tested_on"], metrics["train_size"], metrics["test_size"]) == (
        "validation",
        150,
        50,
    )
    with np.load(tmp_path / "run" / "probabilities.npz") as file:
        assert (file["epistemic"] > 0).any()
    assert not (tmp_path / "run" / "model.keras").exists()


@pytest.mark.slow
def test_dropout_of_the_inputs_of_some_layers(run, tmp_path):
    chosen = Settings(**SMALL | {"dropout": 0.5, "dropout_layers": "fc1"})
    metrics = run(chosen, tmp_path / "run")
    assert (metrics["method"], metrics["samples"]) == ("mc_dropout", 3)
    saved = keras.saving.load_model(tmp_path / "run" / "model.keras")
    assert [x.name for x in saved.layers if isinstance(x, keras.layers.Dropout)] == ["fc1_dropout"]
    with np.load(tmp_path / "run" / "probabilities.npz") as file:
        assert (file["epistemic"] > 0).any()


@pytest.mark.slow
def test_float16_with_a_posterior(run, tmp_path):
    before = keras.config.dtype_policy()
    chosen = Settings(**SMALL | {"posterior": "gaussian", "precision": "mixed_float16"})
    metrics = run(chosen, tmp_path / "run", keep_models=False)
    assert math.isfinite(metrics["nll"])
    assert keras.config.dtype_policy() is before


# What goes wrong.


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_good_checkpoint(eagerly, run, tmp_path, monkeypatch):
    chosen = Settings(**SMALL | {"epochs": 3})
    savez, calls = np.savez, []

    def full_at_the_second(file, **arrays):
        calls.append(file)
        if len(calls) == 2:
            Path(file).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        savez(file, **arrays)

    monkeypatch.setattr(np, "savez", full_at_the_second)
    with pytest.raises(OSError, match="No space"):
        run(chosen, tmp_path / "run", keep_models=False)
    with np.load(tmp_path / "run" / "training.npz") as file:
        assert json.loads(str(file["record"]))["epochs"] == 1
    assert not (tmp_path / "run" / "metrics.json").exists()
    assert not list((tmp_path / "run").glob(".*"))
    lines = []
    run(chosen, tmp_path / "run", keep_models=False, log=lines.append)
    assert lines[0] == "training: going on after epoch 1 of 3."
    assert [row["epoch"] for row in rows(tmp_path / "run" / "training.csv")] == [1, 2, 3]


@pytest.mark.once
def test_a_broken_checkpoint_is_an_error_and_stays(run, script, tmp_path, capsys, data_dir):
    output = tmp_path / "run"
    lib.RunFolder(
        output, {**Settings(**SMALL).as_dict(), "backend": keras.backend.backend()}
    ).claim()
    (output / "training.npz").write_bytes(b"PK half a zip")
    with pytest.raises(RunError, match=r"training\.npz is not a whole checkpoint"):
        run(Settings(**SMALL), output)
    assert (output / "training.npz").read_bytes() == b"PK half a zip"
    assert "training.npz" in (output / "failure.txt").read_text()


@pytest.mark.parametrize(
    "options",
    [
        {"posterior": "none", "evaluate_every": 1},
        pytest.param({"posterior": "gaussian", "evaluate_every": 1}, marks=pytest.mark.slow),
        {"posterior": "none", "batch_size": 200, "epochs": 1, "learning_rate": 1e38},
    ],
    ids=["evaluated", "posterior", "in the last step"],
)
def test_a_run_that_diverges_says_so_each_time(eagerly, run, tmp_path, options):
    chosen = Settings(**SMALL | {"epochs": 3, "learning_rate": 1e25, "optimizer": "sgd"} | options)
    for _ in range(2):
        lines = []
        with pytest.raises(RunError, match="diverged"):
            run(chosen, tmp_path / "run", log=lines.append, keep_models=False)
        assert not any("going on" in line for line in lines)
        assert not (tmp_path / "run" / "metrics.json").exists()
        assert "diverged" in (tmp_path / "run" / "failure.txt").read_text()


@pytest.mark.slow
@pytest.mark.once
def test_a_frozen_network_stays_as_it_is(eagerly, run, tmp_path, monkeypatch):
    monkeypatch.setattr(lib.Scorer, "export", lambda *arguments, **options: None)
    network = mlp((8, 8, 1), hidden=(8,))
    network.save(tmp_path / "network.keras")
    frozen = {"posterior": "gaussian", "freeze_network": True, "weight_decay": 0.1}
    chosen = Settings(**SMALL | frozen, pretrained=str(tmp_path / "network.keras"))
    run(chosen, tmp_path / "run")
    trained = keras.models.load_model(tmp_path / "run" / "model.keras")
    fresh = ibnn.to_stochastic(network, ibnn.NormalAffine(), 200)
    assert all("/posterior/" in weight.path for weight in trained.trainable_weights)
    for name in ("fc1", "fc2"):
        layer = trained.get_layer(name)
        before, after = network.get_layer(name).get_weights(), layer.layer.get_weights()
        assert all(map(np.array_equal, before, after))
        old, new = fresh.get_layer(name).posterior, layer.posterior
        for start, end in zip(old.trainable_weights, new.trainable_weights, strict=True):
            assert not np.array_equal(numpy(start), numpy(end))


def test_a_failure_is_forgotten_when_the_run_is_tried_again(tmp_path):
    folder = lib.RunFolder(tmp_path / "run", {"seed": 0})
    with pytest.raises(RunError, match="not ours yet"), folder:
        raise RunError("not ours yet")
    assert not folder.path.exists()
    folder.claim()
    with pytest.raises(RunError, match="no luck"), folder:
        raise RunError("no luck")
    again = lib.RunFolder(folder.path, {"seed": 0})
    assert again.failure == "no luck"
    again.claim()
    assert again.failure is None
    again.release()


# Killed runs.

KILLED = {
    "dataset": "digits",
    "model": "mlp",
    "dropout": 0.1,
    "augment": True,
    "kl_warmup": 3,
    "epochs": 6,
    "pretrain_epochs": 3,
    "limit": 640,
    "batch_size": 8,
    "samples": 4,
    "learning_rate": 0.002,
    "stochastic_learning_rate": 0.004,
    "evaluate_every": 3,
    "evaluation_samples": 2,
    "seed": 5,
}


def start_and_kill(command, log, csv_file, epochs):
    """Start a run, and kill it in the epoch after those that are to be done."""
    # The tests run with it, and it changes what JAX draws.
    environment = {**os.environ, "JAX_ENABLE_X64": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            deadline = time.monotonic() + 240
            while not csv_file.exists() or len(csv_file.read_text().splitlines()) < epochs + 1:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.002)
            time.sleep(0.03)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def epochs_in(path):
    with np.load(io.BytesIO(path.read_bytes())) as file:
        return json.loads(str(file["record"]))["epochs"]


@pytest.mark.slow  # four processes' worth of tracing
def test_a_killed_run_ends_like_an_unbroken_one(run, script, tmp_path, data_dir, capsys):
    posterior = tmp_path / "posterior.json"
    posterior.write_text(
        '{"fc2": {"posterior": "NormalPlanar1d"}, ".*": {"posterior": "NormalAffine"}}'
    )
    chosen = Settings(**KILLED, posterior=str(posterior))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    arguments = [*chosen.command().split()[2:], "--output", str(killed)]
    arguments += ["--data-dir", str(data_dir), "--backend", keras.backend.backend()]
    command = [sys.executable, str(SCRIPT), *arguments]

    start_and_kill(command, tmp_path / "log", killed / "pretraining.csv", 1)
    assert not (killed / "training.npz").exists()
    assert 1 <= epochs_in(killed / "pretraining.npz") < 3
    start_and_kill(command, tmp_path / "log", killed / "training.csv", 2)
    assert "pretraining: going on after epoch" in (tmp_path / "log").read_text()
    assert 2 <= epochs_in(killed / "training.npz") < 6
    assert not (killed / "metrics.json").exists()
    assert script.main(arguments) == 0
    assert "training: going on after epoch" in capsys.readouterr().out

    expected = run(chosen, whole)
    found = strict_json(killed / "metrics.json")
    for key in ("seconds", "command"):
        del expected[key], found[key]
    for key in ("accuracy", "nll", "brier", "ece"):
        assert found.pop(key) == pytest.approx(expected.pop(key), rel=1e-3, abs=1e-4)
    assert found == expected
    for name in ("pretraining.csv", "training.csv"):
        for row, other in zip(rows(killed / name), rows(whole / name), strict=True):
            del row["seconds"], other["seconds"]
            assert row == pytest.approx(other, rel=1e-3, abs=1e-4)
    models = [keras.saving.load_model(folder / "model.keras") for folder in (killed, whole)]
    for a, b in zip(*(model.weights for model in models), strict=True):
        np.testing.assert_allclose(
            numpy(a.value), numpy(b.value), rtol=1e-3, atol=1e-4, err_msg=a.path
        )
    left = {path.name for path in killed.iterdir()}
    assert left == {path.name for path in whole.iterdir()}
    assert os.listdir(killed / "tensorboard") if HAS_TENSORFLOW else True


def test_two_at_once_are_kept_apart(tmp_path):
    first, second = (lib.RunFolder(tmp_path / "run", {"seed": 1}) for _ in range(2))
    first.claim()
    with pytest.raises(RunError, match="run is in use: somebody else is at this run"):
        second.claim()
    first.release()
    second.claim()
    second.release()


def test_a_folder_that_was_claimed_meanwhile_is_left(tmp_path):
    late = lib.RunFolder(tmp_path / "run", {"seed": 2})
    early = lib.RunFolder(tmp_path / "run", {"seed": 1})
    early.claim()
    early.release()
    with pytest.raises(RunError, match="holds another run"), late:
        late.claim()
    early.claim()  # which it has not locked
    early.release()
    assert early.failure is None


@pytest.mark.once
def test_an_interruption_is_told_in_a_line(script, tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(lib, "run", interrupted)
    assert script.main(["--output", str(tmp_path / "run")]) == 130
    assert capsys.readouterr().err.strip().startswith("interrupted; the same command")
