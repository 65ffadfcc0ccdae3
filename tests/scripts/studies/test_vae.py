"""The study of variational autoencoders: its data, schedule, tables and a run from end to end."""

import json
from types import SimpleNamespace

import keras
import numpy as np
import pytest

import reproduce
from lib import data, tasks
from studies.vae import run as study
from studies.vae import tables as vae_tables

pytestmark = pytest.mark.once


@pytest.fixture
def images(monkeypatch):
    """Grey images in place of MNIST, which tests have not."""
    x = np.random.default_rng(1).integers(256, size=(50_020, 28, 28), dtype="uint8")
    parts = (x, None), (x[::-1][:1000], None)
    monkeypatch.setattr(data, "load", lambda name, folder: parts)
    return x, parts[1][0]


def test_pixels_are_drawn_once_with_the_probabilities_of_their_levels(images):
    train, validation, test = study.load()
    assert train.shape == (50_000, 28, 28, 1)
    assert validation.shape == (20, 28, 28, 1)
    levels, found = images[0][:2000].ravel(), train[:2000].ravel()
    assert set(np.unique(found)) == {0, 1}
    rates = np.bincount(levels, found) / np.bincount(levels)
    np.testing.assert_allclose(rates, np.arange(256) / 255, atol=0.03)
    assert rates[0] == 0
    assert rates[255] == 1
    # The first uniform numbers of the seed, and those after the training images.
    rng = np.random.default_rng(0)
    uniform = rng.random(images[0].size, dtype="float32")
    first = images[0][0].ravel() / 255
    np.testing.assert_array_equal(train[0].ravel(), uniform[:784] < first)
    uniform = rng.random(784, dtype="float32")
    np.testing.assert_array_equal(test[0].ravel(), uniform < images[1][0].ravel() / 255)


@pytest.mark.parametrize("pair", study.PAIRS)
def test_coders_have_the_published_sizes(pair):
    encoder, decoder = study.coders(pair, 6)
    assert encoder.output_shape == (None, {"conv": 256, "mlp": 400}[pair])
    assert decoder.output_shape == encoder.input_shape == (None, 28, 28, 1)
    kinds = (keras.layers.Conv2D, keras.layers.Conv2DTranspose)
    filters = [[x.filters for x in m.layers if isinstance(x, kinds)] for m in (encoder, decoder)]
    gates = [[64, 64, 128, 128, 128, 512], [128, 128, 64, 64, 64, 64, 1]]
    assert filters == (gates if pair == "conv" else [[], []])


def test_a_gate_multiplies_and_maxout_takes_the_largest():
    x = keras.Input((4, 4, 1))
    model = keras.Model(x, study.gated(keras.layers.Conv2D, x, 1, 1))
    model.set_weights([np.array([[[[2.0, 3.0]]]]), np.zeros(2)])
    found = model(np.ones((1, 4, 4, 1)))
    np.testing.assert_allclose(found, np.full((1, 4, 4, 1), 2 / (1 + np.exp(-3))), rtol=1e-5)
    x = keras.Input((1,))
    model = keras.Model(x, study.maxout(x, units=2, window=2))
    model.set_weights([np.array([[1.0, -1.0, 3.0, -2.0]]), np.zeros(4)])
    np.testing.assert_allclose(model(np.array([[1.0], [-1.0]])), [[3, -1], [-1, 2]])


def test_schedule_follows_the_share_of_the_run(monkeypatch):
    schedule = study.Schedule(epochs=100)
    kept = []
    schedule.set_model(
        SimpleNamespace(
            beta=SimpleNamespace(assign=kept.append),
            optimizer=SimpleNamespace(),
            get_weights=lambda: ["weights"],
            name="vae",
        )
    )
    for epoch, beta, rate in ((0, 0, 1), (10, 0.4, 1), (25, 1, 1), (60, 1, 1), (80, 1, 0.5)):
        schedule.on_epoch_begin(epoch)
        assert kept[-1] == pytest.approx(beta)
        assert schedule.model.optimizer.learning_rate == pytest.approx(rate * study.RATE)
    logs = {"loss": 1.0, "val_reconstruction": 60.0, "val_kl": 20.0}
    schedule.on_epoch_end(10, logs)  # warming up: a low bound does not count
    assert schedule.weights is None
    schedule.on_epoch_end(30, logs | {"val_kl": 30.0})
    schedule.on_epoch_end(31, logs | {"val_kl": 31.0})
    assert (schedule.best, schedule.best_epoch, schedule.weights) == (90, 31, ["weights"])
    assert not schedule.model.stop_training
    with pytest.raises(RuntimeError, match="loss of epoch 33 is nan"):
        schedule.on_epoch_end(32, logs | {"loss": np.nan})
    schedule.seconds, schedule.begun = 60, 0.0
    monkeypatch.setattr(study.time, "perf_counter", lambda: 61.0)
    schedule.on_epoch_end(33, logs)
    assert schedule.model.stop_training
    assert schedule.done == 34


def record(pair, seed, method, bound):
    scores = {"-ELBO": bound, "NLL": bound - 4, "kl": 25.0, "reconstruction": 61.0, "active": 30}
    scores |= {"parameters": 12_345, "epochs": 100 + seed, "seconds": 600.0}
    return {"pair": pair, "seed": seed, "group": method, "scores": scores}


def test_tables():
    records = [record("conv", 0, "Gaussian", 86.0), record("conv", 1, "Gaussian", 86.2)]
    found = vae_tables.tables([*records, record("mlp", 0, "10 planar", 88.0)])
    line = "| Gaussian | 86.10 ± 0.14 | 86.55 | 82.10 ± 0.14 | 82.14 | 25.0 | 61.0 | 30 | 12,345 |"
    assert f"{line} 100 to 101 | 600 |" in found["conv"]
    assert "| 10 planar | 88.00 | 87.5 | 84.00 | 25.0 | 61.0 | 30 |" in found["mlp"]
    assert vae_tables.tables([])["conv"] == "Not run yet."
    for pair, methods in study.POSTERIORS.items():
        assert vae_tables.PUBLISHED[pair].keys() == methods.keys()


def test_a_quick_run_is_stored_and_not_repeated(images, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tasks, "apart", lambda function, *task: function(*task))
    monkeypatch.setattr(study, "load", lambda folder: [images[0][:200, ..., None] / 255.0] * 3)
    options = ["vae", "--quick", "--pairs", "mlp", "--methods", "Gaussian", "--seeds", "0"]
    assert reproduce.main([*options, "--output", str(tmp_path)]) == 0
    (line,) = (tmp_path / "runs.jsonl").read_text().splitlines()
    scores = json.loads(line)["scores"]
    assert scores["NLL"] < scores["-ELBO"] < 784
    np.testing.assert_allclose(scores["-ELBO"], scores["kl"] + scores["reconstruction"], rtol=1e-6)
    assert scores["epochs"] == 2
    assert 0 <= scores["active"] <= 40
    assert "Gaussian" in (tmp_path / "table.md").read_text()
    assert reproduce.main([*options, "--output", str(tmp_path)]) == 0
    assert "0 runs to do, 1 are there" in capsys.readouterr().out


def test_unknown_posteriors_are_named(tmp_path):
    with pytest.raises(SystemExit, match="some of .*10 planar.*; got 9 planar"):
        study.run_all(["mlp"], [0], tmp_path, methods=["9 planar"])
