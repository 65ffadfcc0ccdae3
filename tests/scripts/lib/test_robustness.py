import functools
import importlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from lib import RunError, Scorer, data, robustness, shifts
from lib.networks import mlp
from lib.robustness import table
from tfp_ibnn import metrics
from tfp_ibnn.data import preprocessing

pytestmark = pytest.mark.once

COUNT = 60
SMALL = {
    "dataset": "digits",
    "corruptions": ["gaussian_noise", "contrast"],
    "severities": [1, 4],
    "degrees": [90, 30],
    "epsilons": [8, 32],
    "samples": 4,
    "limit": COUNT,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a stochastic model, one with dropout and a plain one, and the data."""
    folder = tmp_path_factory.mktemp("models")
    (images, labels), _ = data.load("digits", folder)
    keras.utils.set_random_seed(0)
    networks = {}
    for name, rate in {"plain": 0.0, "dropout": 0.2}.items():
        front = preprocessing(images)
        model = mlp((8, 8, 1), 10, hidden=(16,), preprocessing=front, dropout=rate)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss)
        model.fit(images, labels, epochs=3, verbose=0)
        networks[name] = model
    posterior = ibnn.NormalAffine(initial_scale=0.3)
    networks["stochastic"] = ibnn.to_stochastic(networks["plain"], posterior, len(images), seed=0)
    networks["stochastic"].compile(loss=loss)
    for name, model in networks.items():
        model.save(folder / f"{name}.keras")
    (folder / "settings.json").write_text(json.dumps({"dataset": "digits"}))
    return folder


@pytest.fixture(scope="module")
def examples(folder):
    _, (images, labels) = data.load("digits", folder)
    return images[:COUNT], labels[:COUNT]


@pytest.fixture
def evaluate(monkeypatch, folder):
    """Call the script; give its exit code."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "scripts")
    script = importlib.import_module("evaluate")

    def call(*arguments):
        return script.main([*map(str, arguments), "--data-dir", str(folder)])

    return call


@pytest.fixture(scope="module")
def predicted(folder):
    """Mean probabilities and epistemic uncertainties, without the code under test."""

    @functools.cache
    def average(name):
        model = keras.saving.load_model(folder / f"{name}.keras", compile=False)
        is_random = name != "plain"
        options = {"seed": 0, "from_logits": True, "dropout": name == "dropout"}
        return ibnn.MonteCarlo(model, 4 if is_random else 1, **options)

    def predict(name, images):
        found = average(name).predict(images.astype("float32"), batch_size=COUNT, verbose=0)
        return found["mean"], found["epistemic"]

    return predict


def row_of(rows, shift, level=None, name=None):
    (found,) = (
        row
        for row in rows
        if row["shift"] == shift and level in (None, row["level"]) and name in (None, row["name"])
    )
    return found


@pytest.mark.parametrize(
    "name", ["stochastic", pytest.param("dropout", marks=pytest.mark.slow), "plain"]
)
def test_rows_are_what_direct_computation_gives(folder, predicted, examples, tmp_path, name):
    images, labels = examples
    lines = []
    settings = robustness.Settings(**SMALL, shifts=["corruptions", "rotations"])
    record = robustness.evaluate(
        folder / f"{name}.keras", settings, tmp_path / "out", folder, log=lines.append
    )
    rows = record["rows"]
    assert len(rows) == len(settings) == 1 + 4 + 2
    assert record["draws"] == (1 if name == "plain" else 4)
    assert sum(line.startswith("[") for line in lines) == len(rows)
    scaled = np.rint(images * (255 / 16)).astype("uint8")
    noisy = shifts.corrupt(scaled, "gaussian_noise", 4).astype("float32") * (16 / 255)
    shifted = {
        ("clean", 0, ""): images,
        ("corruption", 4, "gaussian_noise"): noisy,
        # Up to the rounding on the scale of 255, which must not show: by 90 degrees it is exact.
        ("rotation", 90, ""): np.rot90(images, axes=(1, 2)),
    }
    for (shift, level, corruption), changed in shifted.items():
        row = row_of(rows, shift, level, corruption)
        mean, epistemic = predicted(name, changed)
        expected = {
            "accuracy": np.mean(mean.argmax(-1) == labels),
            "nll": -np.mean(np.log(mean[np.arange(COUNT), labels])),
            "brier": np.mean(np.sum((mean - np.eye(10)[labels]) ** 2, axis=-1)),
            "entropy": np.mean(-np.sum(mean * np.log(mean), axis=-1)),
            "epistemic": np.mean(epistemic),
            "ece": metrics.expected_calibration_error(mean, labels),
        }
        tolerance = 0.02 if shift == "rotation" else 1e-4
        for key, value in expected.items():
            assert row[key] == pytest.approx(value, rel=tolerance, abs=tolerance), (shift, key)
    assert row_of(rows, "clean")["accuracy"] > 0.6


@pytest.mark.slow
def test_attack_is_on_what_is_scored_and_nothing_is_compiled_twice(folder, examples, monkeypatch):
    images, labels = examples
    scorer = Scorer(keras.saving.load_model(folder / "stochastic.keras"), 4)
    score, shapes = scorer.score, []

    def watched(x, y):
        shapes.append((x.shape, x.dtype))
        return score(x, y)

    monkeypatch.setattr(scorer, "score", watched)
    others = {"mnist": np.zeros((7, 8, 8, 1), "float32")}
    settings = robustness.Settings(**SMALL, foreign=["mnist"])
    found = robustness.measure(scorer, settings, examples, others)
    assert len(shapes) == len(settings)
    assert set(shapes) == {((COUNT, 8, 8, 1), np.dtype("float32"))}
    assert scorer.monte_carlo.predict_function.experimental_get_tracing_count() == 1
    assert len(found.ood["mnist"].entropy) == row_of(found.rows, "foreign")["images"] == 7
    # The digits go to 16: 32 of 255 are about 2 of 16.
    attack = shifts.fgsm(scorer.monte_carlo, images, labels, 32 * 16 / 255)
    expected = score(np.clip(attack, 0, 16), labels).summary()
    rows = [row_of(found.rows, *which) for which in (("clean",), ("fgsm", 8), ("fgsm", 32))]
    for key in ("accuracy", "nll", "brier", "ece"):
        assert rows[-1][key] == pytest.approx(expected[key], rel=1e-5)
    assert rows[0]["nll"] < rows[1]["nll"] < rows[2]["nll"]


def test_foreign_rows_compare_with_clean_images(folder, predicted, examples, tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    strange = rng.integers(0, 256, (COUNT + 5, 28, 28, 1), "uint8")
    load = data.load

    def patched(name, data_dir=None):
        if name == "digits":
            return load(name, data_dir)
        return (strange, None), (strange, np.zeros(len(strange), "int32"))

    monkeypatch.setattr(data, "load", patched)
    settings = robustness.Settings(**{**SMALL, "shifts": ["foreign"], "foreign": ["mnist"]})
    for name in ("stochastic", "plain"):
        path = folder / f"{name}.keras"
        record = robustness.evaluate(path, settings, tmp_path / name, log=lambda line: None)
        row = row_of(record["rows"], "foreign", name="mnist")
        known = predicted(name, examples[0])
        unknown = predicted(name, shifts.convert_images(strange[:COUNT], "mnist", "digits"))
        entropies = [-np.sum(mean * np.log(mean), axis=-1) for mean, _ in (known, unknown)]
        assert row["entropy_auroc"] == pytest.approx(metrics.auroc(*entropies), abs=2e-3)
        assert row["entropy_aupr"] == pytest.approx(metrics.aupr(*entropies), abs=2e-3)
        assert row["entropy_fpr95"] == pytest.approx(metrics.fpr_at_95_tpr(*entropies), abs=0.02)
        if name == "plain":
            assert row["epistemic_auroc"] is None
        else:
            expected = metrics.auroc(known[1], unknown[1])
            assert row["epistemic_auroc"] == pytest.approx(expected, abs=2e-3)
        assert (tmp_path / name / "foreign.png").stat().st_size > 0
        assert not (tmp_path / name / "robustness.png").exists()


def test_smaller_images_are_padded_as_they_are():
    images = np.random.default_rng(0).integers(0, 256, (3, 28, 28, 1), "uint8")
    found = shifts.convert_images(images, "mnist", "cifar10")
    assert found.shape == (3, 32, 32, 3)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[:, 2:-2, 2:-2], np.repeat(images, 3, axis=-1))
    assert found.sum() == pytest.approx(3.0 * images.sum())


def test_other_images_are_resized_and_grey():
    red = np.zeros((2, 32, 32, 3), "uint8")
    red[..., 0] = 200
    grey = shifts.convert_images(red, "cifar10", "mnist")
    np.testing.assert_array_equal(grey, np.full((2, 28, 28, 1), 60))
    # From 16 to 255, and far smaller than what is wanted.
    digits = np.full((2, 8, 8, 1), 16, "uint8")
    np.testing.assert_array_equal(
        shifts.convert_images(digits, "digits", "cifar10"), np.full((2, 32, 32, 3), 255)
    )
    white = np.full((2, 28, 28, 1), 255, "uint8")
    np.testing.assert_allclose(
        shifts.convert_images(white, "mnist", "digits"), np.full((2, 8, 8, 1), 16)
    )


@pytest.mark.parametrize("dataset", list(data.DATASETS))
def test_every_dataset_has_its_own_foreign_ones(dataset):
    expected = {"cifar10": "fashion_mnist", "fashion_mnist": "mnist", "mnist": "fashion_mnist"}
    found = robustness.Settings(dataset=dataset).foreign
    assert found == ((expected[dataset],) if dataset in expected else ())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"dataset": "imagenet"}, "imagenet"),
        ({"shifts": ["clean", "snow"]}, "snow"),
        ({"corruptions": ["fog"]}, "fog"),
        ({"severities": [0]}, "severities"),
        ({"severities": []}, "severities"),
        ({"degrees": [float("nan")]}, "degrees"),
        ({"epsilons": [-1]}, "epsilons"),
        ({"foreign": ["digits"]}, "foreign"),
        ({"samples": 0}, "samples"),
        ({"limit": 0}, "limit"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_settings_are_named(change, told):
    with pytest.raises(ValueError, match=told):
        robustness.Settings(**{**SMALL, **change})


def test_settings_take_each_value_once():
    settings = robustness.Settings(dataset="digits", severities=[2, 2, 1])
    assert settings.severities == (2, 1)


def test_script_writes_and_prints_and_does_not_repeat(evaluate, folder, tmp_path, capsys):
    output = tmp_path / "new" / "out"
    arguments = (folder / "plain.keras", "--limit", 30, "--samples", 2, "--severities", 1, 2)
    arguments += ("--corruptions", "contrast", "pixelate", "--degrees", -45, 45, "--epsilons", 2)
    arguments += ("--shifts", "corruptions", "rotations", "fgsm", "--output", output)
    assert evaluate(*arguments) == 0
    first = capsys.readouterr()
    names = {path.name for path in output.iterdir()}
    assert names == {"settings.json", "robustness.json", "robustness.png"}
    record = json.loads((output / "robustness.json").read_text())
    assert record["options"]["dataset"] == "digits"
    assert {"command", "versions", "hardware", "backend", "model"} <= record.keys()
    assert table(record["rows"]) in first.out
    contrast = [row_of(record["rows"], "corruption", 2, name) for name in ("contrast", "pixelate")]
    mean = np.mean([row["nll"] for row in contrast])
    (line,) = (line for line in first.out.splitlines() if "(mean of 2), severity 2" in line)
    assert f"{mean:.4f}" in line
    before = (output / "robustness.json").stat().st_mtime_ns
    assert evaluate(*arguments) == 0
    again = capsys.readouterr().out
    assert "finished already" in again
    assert table(record["rows"]) in again
    assert evaluate(*arguments, "--seed", 1) == 1
    assert "another run" in capsys.readouterr().err
    assert (output / "robustness.json").stat().st_mtime_ns == before


def test_script_says_in_one_line_what_is_wrong(evaluate, folder, tmp_path, capsys):
    model = folder / "plain.keras"
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious.txt").write_text("mine")
    text = tmp_path / "text.keras"
    text.write_text("no model")
    broken = tmp_path / "broken.keras"
    broken.write_bytes(model.read_bytes()[:-100])
    empty = tmp_path / "empty.keras"
    zipfile.ZipFile(empty, "w").close()
    soft = tmp_path / "soft.keras"
    softmax = [keras.layers.Flatten(), keras.layers.Dense(10, "softmax")]
    keras.Sequential([keras.Input((8, 8, 1)), *softmax]).save(soft)
    out = ("--output", tmp_path / "out")
    cases = [
        ((tmp_path / "none.keras", *out), 1, "does not exist"),
        ((tmp_path / "none.keras", "--dataset", "digits", *out), 1, "does not exist"),
        ((text, *out), 1, "--dataset"),
        ((text, "--dataset", "digits", *out), 1, "cannot be read"),
        ((broken, "--dataset", "digits", *out), 1, "cannot be read"),
        ((empty, "--dataset", "digits", *out), 1, "cannot be read"),
        ((soft, "--dataset", "digits", *out), 1, "softmax"),
        ((model, "--dataset", "cifar10", *out), 1, "(32, 32, 3)"),
        ((model, "--dataset", "imagenet", *out), 2, "imagenet"),
        ((model, "--shifts", "snow", *out), 2, "snow"),
        ((model, "--corruptions", "fog", *out), 2, "fog"),
        ((model, "--foreign", "svhn", *out), 2, "svhn"),
        ((model, "--classes", 1, *out), 2, "classes"),
        ((model, "--classes", 5, *out), 1, "(5,)"),
        ((model, "--severities", 6, *out), 2, "6"),
        ((model, "--output", full), 1, "full"),
        ((model, "--export", full, *out), 1, "full"),
        ((model, "--export", tmp_path / "out", *out), 1, "another folder"),
    ]
    for arguments, code, told in cases:
        assert evaluate(*arguments) == code, arguments
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert told in line
    assert not (tmp_path / "out").exists()
    assert [path.name for path in full.iterdir()] == ["precious.txt"]


def test_classes_that_were_held_out_are_foreign(evaluate, folder, tmp_path):
    """A model of the first six digits: the images of the other four are what it does not know."""
    front = preprocessing(data.load("digits", folder)[0][0])
    network = mlp((8, 8, 1), 6, hidden=(16,), preprocessing=front)
    (tmp_path / "run").mkdir()
    network.save(tmp_path / "run" / "model.keras")
    record = {"dataset": "digits", "classes": 6}
    (tmp_path / "run" / "settings.json").write_text(json.dumps(record))
    assert evaluate(tmp_path / "run" / "model.keras", "--shifts", "foreign", "--samples", 4) == 0
    rows = json.loads((tmp_path / "run" / "robustness" / "robustness.json").read_text())["rows"]
    _, (images, labels) = data.load("digits", folder)
    known, unknown = (images[labels < 6], labels[labels < 6]), images[labels >= 6]
    scorer = Scorer(network, 4)
    clean = scorer.score(known[0].astype("float32"), known[1])
    assert [row["shift"] for row in rows] == ["clean", "foreign"]
    assert rows[0]["images"] == len(known[1])
    assert rows[0]["nll"] == pytest.approx(clean.summary()["nll"], rel=1e-4)
    assert rows[1]["name"] == "held-out classes"
    assert rows[1]["images"] == len(unknown)
    entropy = scorer.score(unknown.astype("float32"), np.zeros(len(unknown), int)).entropy
    expected = metrics.auroc(clean.entropy, entropy)
    assert rows[1]["entropy_auroc"] == pytest.approx(expected, abs=1e-4)


def test_diverged_model_is_told(folder, tmp_path):
    model = keras.saving.load_model(folder / "plain.keras")
    model.set_weights([np.full_like(weight, np.nan) for weight in model.get_weights()])
    model.save(tmp_path / "nan.keras")
    settings = robustness.Settings(**SMALL)
    with pytest.raises(RunError, match="finite"):
        robustness.evaluate(tmp_path / "nan.keras", settings, tmp_path / "out", folder)


def test_a_failure_leaves_the_folder_unlocked(folder, tmp_path, monkeypatch):
    def refuse(*arguments):
        raise ValueError("this network\nis not for it")

    arguments = folder / "plain.keras", robustness.Settings(**SMALL), tmp_path / "out", folder
    with monkeypatch.context() as patch:
        patch.setattr(robustness, "Scorer", refuse)
        with pytest.raises(RunError, match="plain.keras cannot be scored: this network$"):
            robustness.evaluate(*arguments)
    assert "this network" in (tmp_path / "out" / "failure.txt").read_text()
    monkeypatch.setattr(robustness, "_evaluate", lambda *arguments: {"rows": []})
    assert robustness.evaluate(*arguments) == {"rows": []}
    assert not (tmp_path / "out" / "failure.txt").exists()


@pytest.mark.slow
def test_coloured_images_of_32_pixels(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    shapes = {"cifar10": (20, 32, 32, 3), "fashion_mnist": (20, 28, 28, 1)}
    sets = {
        name: (rng.integers(0, 256, shape, "uint8"), rng.integers(0, 10, 20).astype("int32"))
        for name, shape in shapes.items()
    }
    monkeypatch.setattr(data, "load", lambda name, data_dir=None: (sets[name], sets[name]))
    model = mlp((32, 32, 3), 10, hidden=(), preprocessing=[keras.layers.Rescaling(1 / 255)])
    model.save(tmp_path / "model.keras")
    settings = robustness.Settings(dataset="cifar10", severities=[3], degrees=[45], epsilons=[4])
    lines = []
    record = robustness.evaluate(
        tmp_path / "model.keras", settings, tmp_path / "out", log=lines.append
    )
    assert [row["name"] for row in record["rows"][1:10]] == list(shifts.CORRUPTIONS)
    assert record["rows"][-1]["name"] == "fashion_mnist"
    assert {"robustness.png", "foreign.png"} <= {path.name for path in (tmp_path / "out").iterdir()}
    # 4 of 255 against a linear model.
    nll = {row["shift"]: row["nll"] for row in record["rows"] if row["shift"] != "foreign"}
    assert nll["fgsm"] > nll["clean"]


SERVE = """
import sys
import numpy as np
import tensorflow as tf

model = tf.saved_model.load(sys.argv[1])
images = np.load(sys.argv[2])
assert not {"tfp_ibnn", "tensorflow_probability"} & sys.modules.keys()
np.save(sys.argv[3], model.signatures["serve"](image=tf.constant(images))["mean"].numpy())
"""


@pytest.mark.slow
def test_exported_model_predicts_alike_without_this_package(
    evaluate, folder, predicted, examples, tmp_path
):
    exported = tmp_path / "new" / "saved"
    arguments = ("--shifts", "clean", "--limit", 20, "--samples", 4, "--output", tmp_path / "out")
    model = folder / "stochastic.keras"
    assert evaluate(model, *arguments, "--export", exported) == 0
    assert [path.name for path in exported.parent.iterdir()] == ["saved"]
    images = examples[0].astype("float32")
    np.save(tmp_path / "images.npy", images)
    paths = [exported, tmp_path / "images.npy", tmp_path / "mean.npy"]
    subprocess.run([sys.executable, "-c", SERVE, *paths], check=True, cwd=tmp_path, timeout=120)
    expected, _ = predicted("stochastic", images)
    np.testing.assert_allclose(np.load(tmp_path / "mean.npy"), expected, atol=1e-6)
    assert evaluate(model, *arguments, "--export", exported) == 1
