import dataclasses
import importlib
import json
import re
from pathlib import Path

import keras
import matplotlib
import numpy as np
import pytest
from scipy.stats import multivariate_normal

from experiments import toy2d
from tfp_ibnn import metrics
from tfp_ibnn.data import toy

matplotlib.use("Agg")

pytestmark = pytest.mark.once

SCRIPTS = Path(__file__).parents[2] / "scripts"
TINY = toy2d.Settings.quick(
    points=70, test_points=500, lengths=(0, 1), flow_length=1, epochs=2, converged_epochs=8
)
METHODS = {
    ("report", "deterministic"): 5,
    ("report", "deterministic_continued"): 7,
    ("report", "gaussian"): 7,
    ("report", "flow_1"): 7,
    ("equal", "deterministic"): 10,
    ("equal", "gaussian"): 10,
    ("equal", "flow_1"): 10,
}


@pytest.fixture(scope="module")
def result():
    return toy2d.run(3, TINY)


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("train_toy")


def test_true_probabilities_are_those_of_the_densities():
    points = np.random.default_rng(0).uniform(-4, 4, (50, 2))
    density = [
        sum(
            multivariate_normal(centre, toy.SCALE**2 * np.eye(2)).pdf(points)
            for centre in toy.CENTRES[toy.CLASSES == k]
        )
        for k in (0, 1)
    ]
    expected = np.transpose(density / np.sum(density, axis=0))
    np.testing.assert_allclose(toy.true_probabilities(points), expected, rtol=1e-9)
    assert toy.true_probabilities(points.reshape(5, 10, 2)).shape == (5, 10, 2)


def test_true_probabilities_exist_far_from_all_clusters():
    far = toy.true_probabilities([[1e4, 1e4], [0.0, -1e4]])
    np.testing.assert_allclose(far, [[1, 0], [0, 1]], atol=1e-12)


def test_bayes_scores_are_those_of_many_points():
    x, y = toy.sample(400_000, seed=5)
    p = toy.true_probabilities(x)
    expected = toy.bayes_scores()
    # About four standard errors.
    assert np.mean(p.argmax(axis=-1) == y) == pytest.approx(expected["accuracy"], abs=0.0014)
    assert metrics.negative_log_likelihood(p, y) == pytest.approx(expected["nll"], abs=0.0022)
    assert metrics.brier_score(p, y) == pytest.approx(expected["brier"], abs=0.0014)
    assert metrics.expected_calibration_error(p, y) < 0.002


def test_clusters_are_where_they_should_be():
    x, y = toy.sample(100_000, seed=1)
    assert x.dtype == "float32"
    np.testing.assert_allclose(x[y == 1].mean(axis=0), toy.CENTRES[3], atol=0.02)
    np.testing.assert_allclose(x[y == 1].std(axis=0), toy.SCALE, atol=0.02)
    np.testing.assert_allclose(x[y == 0].mean(axis=0), toy.CENTRES[:3].mean(axis=0), atol=0.03)
    assert np.mean(y) == pytest.approx(0.25, abs=0.006)


def test_points_depend_on_the_seed_alone():
    (x, y), (again, classes) = toy.sample(20, seed=7), toy.sample(20, seed=7)
    np.testing.assert_array_equal(x, again)
    np.testing.assert_array_equal(y, classes)
    assert not np.array_equal(x, toy.sample(20, seed=8)[0])
    assert not np.array_equal(x, toy.sample(20, seed=[7, 1])[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: toy.sample(0, seed=0), "`size` must be a whole number of at least 1; got 0"),
        (lambda: toy.true_probabilities([1.0, 2.0, 3.0]), r"(..., 2); got the shape (3,)"),
        (lambda: toy2d.Settings(points=0), "`points` must be"),
        (lambda: toy2d.Settings(samples=2.5), "`samples` must be"),
        (lambda: toy2d.Settings(learning_rate=-1.0), "`learning_rate` must be above 0"),
        (lambda: toy2d.Settings(lengths=(3, 6)), "must rise from 0"),
        (lambda: toy2d.Settings(lengths=(0,)), "must rise from 0"),
        (lambda: toy2d.Settings(lengths=(0, 12, 3)), "must rise from 0"),
        (lambda: toy2d.Settings(lengths=(0, 3)), "such as 3; got 12"),
        (lambda: toy2d.run(-1, TINY), "`seed` must be"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_one_seed_gives_every_row(result):
    assert {(r["budget"], r["method"]): r["epochs"] for r in result.rows} == METHODS
    for row in result.rows:
        stochastic = not row["method"].startswith("deterministic")
        assert (row["dataset"], row["model"]) == ("four_clusters", "mlp")
        assert row["seed"] == 3
        assert row["samples"] == (TINY.samples if stochastic else 1)
        assert 0.5 < row["accuracy"] <= 1
        assert 0.1 < row["nll"] < 1
        assert 0.05 < row["brier"] < 0.7
        assert 0 < row["ece"] < 0.5
        assert ("train_kl" in row) == stochastic


def test_histories_are_of_every_epoch_and_add_up(result):
    assert set(result.histories) == {name for name in METHODS if "deterministic" not in name[1]}
    for history in result.histories.values():
        loss, nll, kl = (np.array(history[key]) for key in ("loss", "nll", "kl"))
        assert len(loss) == TINY.epochs
        np.testing.assert_allclose(loss, nll + kl / TINY.points, rtol=1e-4)


def test_scores_are_of_the_probabilities_kept(result):
    for row in result.rows[:4]:
        name = row["budget"], row["method"]
        p = result.probabilities[name]
        assert row["nll"] == metrics.negative_log_likelihood(p, result.labels)
        prediction = result.predict[name](toy.sample(500, [2])[0])
        mean = prediction["mean"] if name in result.histories else prediction
        np.testing.assert_allclose(mean, p, atol=1e-6)


def gaussian_history(seed, sampled):
    """The training of the Gaussian from the early network alone."""
    training = toy2d._Training(seed, TINY, *toy.sample(TINY.points, sampled), lambda text: None)
    start = training.deterministic([TINY.early_epochs])[TINY.early_epochs]
    return training.stochastic(start, 0, ("report", "gaussian"))[1]["loss"]


def test_seed_settles_the_result(result):
    expected = result.histories["report", "gaussian"]["loss"]
    keras.utils.set_random_seed(9)
    np.testing.assert_allclose(gaussian_history(3, [1, 3]), expected, rtol=1e-5)
    # Other weights, noise and order on the same points.
    assert np.abs(np.subtract(gaussian_history(4, [1, 3]), expected)).min() > 1e-3


def test_test_points_are_no_training_points(result):
    x_test, labels = toy.sample(500, [2])
    np.testing.assert_array_equal(labels, result.labels)
    assert not set(map(tuple, x_test)) & set(map(tuple, result.x))


def test_script_writes_what_it_says(script, result, monkeypatch, tmp_path, capsys):
    # The training is tested above; here each seed only has other numbers.
    seeds = []
    predict = {
        name: (lambda x: {"mean": toy.true_probabilities(x)})
        if name in result.histories
        else toy.true_probabilities
        for name in METHODS
    }

    def run(seed, settings, progress):
        progress(f"seed {seed}")
        seeds.append(seed)
        rows = [{**row, "seed": seed, "ece": row["ece"] + 0.01 * seed} for row in result.rows]
        return dataclasses.replace(result, seed=seed, settings=settings, rows=rows, predict=predict)

    monkeypatch.setattr(toy2d, "run", run)
    arguments = ["--quick", "--lengths", "0", "1", "--seeds", "0", "1"]
    script.main([*arguments, "--output", str(tmp_path / "here")])
    assert seeds == [0, 1]
    printed = capsys.readouterr().out
    table, written = printed.split("Written:")
    names = ["boundaries", "calibration", "curves", "lengths"]
    assert [Path(path).name for path in written.split()] == [
        *(f"{name}.png" for name in names),
        "histories.json",
        "metrics.json",
    ]
    assert all(Path(path).stat().st_size > 0 for path in written.split())
    record = json.loads((tmp_path / "here" / "metrics.json").read_text())
    assert record["settings"]["flow_length"] == 1
    assert record["options"]["seeds"] == [0, 1]
    assert len(record["results"]) == 2 * len(METHODS)
    for budget, method in METHODS:
        eces = [
            row["ece"]
            for row in record["results"]
            if (row["budget"], row["method"]) == (budget, method)
        ]
        assert f"{np.mean(eces):.4f} ± {np.std(eces, ddof=1):.4f}" in table


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--points", "-1"], "points"),
        (["--samples", "0"], "samples"),
        (["--lengths", "3", "6"], "lengths"),
        (["--flow-length", "7"], "flow_length"),
        (["--seeds", "0", "0"], "--seeds"),
        (["--seeds", "-2"], "--seeds"),
        (["--output", "/dev/null/here"], "/dev/null/here"),
    ],
)
def test_script_names_a_bad_option(script, capsys, arguments, name):
    with pytest.raises(SystemExit) as caught:
        script.parse(arguments)
    assert caught.value.code == 2
    assert name in capsys.readouterr().err.splitlines()[-1]


def test_the_preferred_length_is_taken_where_it_is_tried(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for lengths, expected in (("0 3 12 15", 12), ("0 3 6", 6)):
        for quick in ([], ["--quick"]):
            _, settings = script.parse(["--lengths", *lengths.split(), *quick])
            assert settings.flow_length == expected
