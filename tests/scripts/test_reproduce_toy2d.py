import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import keras
import matplotlib
import numpy as np
import pytest
from scipy.stats import multivariate_normal

from lib import run, store, study, toy
from lib.plan import PLANS
from lib.store import history
from tests import autodiff
from tfp_ibnn import metrics

matplotlib.use("Agg")

pytestmark = pytest.mark.once

SCRIPTS = Path(__file__).parents[2] / "scripts"
TINY = {"points": 32, "test_points": 500, "lengths": (0, 1), "flow_length": 1, "epochs": 2}
TINY |= {"converged_epochs": 4, "samples": 8}
METHODS = {
    ("report", "deterministic"): 5,
    ("report", "deterministic_continued"): 7,
    ("report", "gaussian"): 7,
    ("report", "flow_1"): 7,
    ("equal", "deterministic"): 6,
    ("equal", "gaussian"): 6,
    ("equal", "flow_1"): 6,
}


def toy2d(**settings):
    """The plan that the script makes, which begins from that of the full experiment."""
    script = imported()
    return script.toy2d(**{**script.FULL, **settings})


def imported():
    spec = importlib.util.spec_from_file_location("train_toy", SCRIPTS / "train_toy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_has_the_plan_of_the_experiment():
    assert toy2d() == PLANS["toy2d"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def records(runs):
    autodiff.run_eagerly(True)  # the fixture of that name is for one test
    with pytest.MonkeyPatch.context() as patch:
        # The report of one run is tested elsewhere.
        patch.setattr(sys.modules["lib.run"], "write_report", lambda *_: None)
        found = study.study(toy2d(**TINY), runs, [3], log=print).records
    autodiff.run_eagerly(False)
    return found


@pytest.fixture
def script():
    return imported()


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
        (lambda: toy2d(points=0), "`points` must be"),
        (lambda: toy2d(samples=2.5), "`samples` must be"),
        (lambda: toy2d(lengths=(3, 6)), "must rise from 0"),
        (lambda: toy2d(lengths=(0,)), "must rise from 0"),
        (lambda: toy2d(lengths=(0, 12, 3)), "must rise from 0"),
        (lambda: toy2d(lengths=(0, 3)), "such as 3; got 12"),
        (lambda: toy2d().runs("report", [-1]), "`seed` must be"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.slow
def test_one_seed_gives_every_row(records):
    assert {(r["budget"], r["method"]): r["epochs"] for r in records} == METHODS
    for row in records:
        stochastic = not row["method"].startswith("deterministic")
        assert (row["dataset"], row["seed"]) == ("four_clusters", 3)
        assert row["samples"] == (TINY["samples"] if stochastic else 1)
        assert 0.5 < row["accuracy"] <= 1
        assert 0.1 < row["nll"] < 1
        assert 0.05 < row["brier"] < 0.7
        assert 0 < row["ece"] < 0.5
        assert ("train_kl" in row) == stochastic


@pytest.mark.slow
def test_histories_are_of_every_epoch_and_add_up(records, runs):
    for record in records:
        if "train_kl" in record:
            logged = history(runs / record["name"])
            loss, nll, kl = (np.array(logged[key]) for key in ("loss", "nll", "kl"))
            assert len(loss) == TINY["epochs"]
            np.testing.assert_allclose(loss, nll + kl / TINY["points"], rtol=1e-4)
            assert record["train_loss"] == pytest.approx(loss.mean(), rel=1e-6)


@pytest.mark.slow
def test_scores_are_of_the_probabilities_kept(records, runs):
    for record in records[:4]:
        p, labels = store.predictions(runs / record["name"])
        np.testing.assert_array_equal(labels, toy.sample(100_000, [2])[1][:500])
        assert record["nll"] == pytest.approx(metrics.negative_log_likelihood(p, labels), rel=1e-5)


@pytest.mark.slow
def test_the_network_continues_where_it_was_stopped(records, runs):
    """All of one seed begin with the same network: its first epochs are the same."""
    stopped, continued = (
        history(runs / f"report/four_clusters/{name}/seed3")["loss"]
        for name in ("deterministic", "deterministic_continued")
    )
    np.testing.assert_allclose(continued[:5], stopped, rtol=1e-5)


@pytest.mark.slow
def test_seed_settles_the_result(eagerly, records, runs, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["lib.run"], "write_report", lambda *_: None)
    name = "report/four_clusters/gaussian/seed3"
    settings = toy2d(**TINY).runs("report", [3])[name]
    keras.utils.set_random_seed(9)
    run(settings, tmp_path / "again", keep_models=False, log=print)
    expected = history(runs / name)["loss"]
    np.testing.assert_allclose(history(tmp_path / "again")["loss"], expected, rtol=1e-5)


def test_test_points_are_no_training_points():
    x_test, _ = toy.sample(500, [2])
    x, _ = toy.sample(TINY["points"], [1, 3])
    assert not set(map(tuple, x_test)) & set(map(tuple, x))


@pytest.mark.slow
@pytest.mark.slow
def test_script_writes_what_it_says(script, records, runs, monkeypatch, tmp_path, capsys):
    # The training is tested above; here each seed only has other numbers.
    asked = []

    def pretend(plan, folder, seeds, log):
        log("training")
        asked.extend(seeds)
        shutil.copytree(runs, folder, dirs_exist_ok=True)
        found = [
            {**record, "seed": seed, "ece": record["ece"] + 0.01 * seed}
            for seed in seeds
            for record in records
        ]
        return study.Results(found, [])

    monkeypatch.setattr(script.study, "study", pretend)
    arguments = ["--quick", "--lengths", "0", "1", "--seeds", "0", "1"]
    script.main([*arguments, "--output", str(tmp_path / "here")])
    assert asked == [0, 1]
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
    try:
        code = script.main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert name in capsys.readouterr().err.splitlines()[-1]


def test_the_preferred_length_is_taken_where_it_is_tried(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for lengths, expected in (("0 3 12 15", 12), ("0 3 6", 6)):
        for quick in ([], ["--quick"]):
            options = script.parse(["--lengths", *lengths.split(), *quick])
            assert script.settings_of(options)["flow_length"] == expected
