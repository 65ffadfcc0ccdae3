import dataclasses
import math
import os
import subprocess

import numpy as np
import pytest

import lib
from lib import (
    RunError,
    Settings,
    data,
    plan,
    robustness,
    run_many,
    scoring,
    store,
    study,
)
from lib.plan import PLANS
from lib.run import identity

pytestmark = pytest.mark.once

LENET = PLANS["lenet"]
KEYS = {
    "dataset": "digits",
    "model": "mlp",
    "method": "flow",
    "budget": "equal",
    "epochs": 5,
    "samples": 8,
}
SETTINGS = Settings(
    dataset="digits", model="mlp", posterior="none", epochs=1, limit=200, batch_size=100
)


def row(seed=0, **changed):
    values = np.random.default_rng(seed).uniform(0.1, 1, 4)
    scores = {key: float(value) for key, value in zip(scoring.SCORES, values, strict=True)}
    return {**KEYS, **scores, "seed": seed, "parameters": 10, **changed}


# Tables.


def test_mean_and_deviation_are_numpys():
    rows = [row(seed) for seed in range(5)]
    (found,) = lib.summarise(rows, command="python x.py")
    for key in scoring.SCORES:
        values = [one[key] for one in rows]
        assert found[key]["mean"] == pytest.approx(np.mean(values), abs=1e-6)
        assert found[key]["std"] == pytest.approx(np.std(values, ddof=1), abs=1e-6)
    assert found["seeds"] == [0, 1, 2, 3, 4]
    assert found["command"] == "python x.py"
    assert found["parameters"] == 10
    assert {key: found[key] for key in KEYS} == KEYS
    assert "seed" not in found


def test_groups_do_not_mix():
    rows = [row(seed, method=name) for seed in range(2) for name in ("a", "b")]
    rows += [row(7, method="a", budget="report"), row(8, dataset="mnist"), row(9, epochs=6)]
    table = lib.summarise(rows)
    assert [(one["method"], one["seeds"]) for one in table] == [
        ("a", [0, 1]),
        ("b", [0, 1]),
        ("a", [7]),
        ("flow", [8]),
        ("flow", [9]),
    ]


def test_one_seed_has_no_deviation():
    (found,) = lib.summarise([row(3)])
    assert found["nll"] == {"mean": pytest.approx(row(3)["nll"], abs=1e-6), "std": 0.0}


def test_no_rows_make_no_table():
    assert lib.summarise([]) == []


def test_what_differs_between_seeds_is_left_out_and_what_was_promised_is_not():
    rows = [row(0, hardware="A", backend="jax"), row(1, hardware="B", backend="jax")]
    (found,) = lib.summarise(rows)
    assert found["backend"] == "jax"
    assert "A" in found["hardware"]
    assert "B" in found["hardware"]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_nan_stays_nan(count):
    rows = [row(0, nll=float("nan")), *(row(seed) for seed in range(1, count))]
    (found,) = lib.summarise(rows)
    assert math.isnan(found["nll"]["mean"])
    assert math.isfinite(found["accuracy"]["mean"])


def test_results_are_written_whole(tmp_path):
    made = {"backend": "jax", "hardware": "none"}
    rows = [row(seed, key="k", name=f"equal/digits/flow/seed{seed}", **made) for seed in (0, 1)]
    rows.append(row(2, key="k", name="trials/digits/flow/a", **{**made, "budget": "trials"}))
    table = lib.write_results(tmp_path, rows, {"quick": True}, ["a: not run"])
    assert {"command", "backend", "hardware"} <= set(table[0])
    assert table[0]["seeds"] == [0, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs.jsonl", "summary.json"]
    assert store.read(tmp_path) == (rows, ["a: not run"])


# The choice of settings.


def trials(*scores):
    names = [f"trials/cifar10/flow/{number}" for number in range(len(scores))]
    settings = {
        name: dataclasses.replace(SETTINGS, seed=number) for number, name in enumerate(names)
    }
    return settings, {name: {"nll": nll} for name, nll in zip(names, scores, strict=True)}


@pytest.mark.parametrize(
    ("scores", "index"),
    [
        ([0.3, 0.1, 0.2], 1),
        ([0.1], 0),
        ([0.2, 0.1, 0.1], 1),
        ([float("nan"), 0.2], 1),
        ([0.2, float("nan"), 0.1], 2),
    ],
)
def test_the_best_has_the_least_nll(scores, index):
    settings, found = trials(*scores)
    assert study.best(settings, found)["cifar10", "flow"] == list(settings)[index]


def test_a_trial_that_failed_is_not_chosen():
    settings, found = trials(0.1, 0.3, 0.2)
    names = list(settings)
    del found[names[0]]
    assert study.best(settings, found)["cifar10", "flow"] == names[2]
    with pytest.raises(RunError, match="No trial of flow on cifar10"):
        study.best(settings, {})


@pytest.mark.parametrize("dataset", LENET.datasets)
def test_every_method_may_choose_from_as_many(dataset):
    for method in LENET.methods:
        found = LENET.trial_runs(0, [method], [dataset])
        assert len(found) == len(set(found.values())) == 6
        for name, settings in found.items():
            assert name.startswith(f"trials/{dataset}/{method}/")
            assert settings.method in (method, "deterministic")
            assert (settings.epochs, settings.pretrain_epochs) == (60, 0)
            assert settings.validation == 5000
            runs = LENET.runs("equal", [4], [method], [dataset], {(dataset, method): settings})
            assert list(runs) == [f"equal/{dataset}/{method}/seed4"]
            (final,) = runs.values()
            assert final == dataclasses.replace(settings, validation=0, seed=4)


def test_a_run_of_lenet_may_fail(tmp_path, monkeypatch):
    """Of a trial, the others are chosen from. A run of the table is missing, but ends no other."""
    names = dict.fromkeys((*scoring.SCORES, "samples", "parameters", "backend"), 0.5)
    names |= {**dict.fromkeys(("hardware", "versions", "python"), "x"), "seconds": {}}
    lost = "learning_rate=0.02,weight_decay=0/"
    ran, missing = [], {}

    def pretend(runs, folder, missing, **options):
        gone = [name for name in runs if lost in f"{name}/"]
        missing |= dict.fromkeys(gone, "diverged")
        ran.extend(runs)
        return {name: names for name in runs if name not in gone}

    def budgets(results):
        return [record["budget"] for record in results.records if record["budget"] != "trials"]

    monkeypatch.setattr(run_many, "run_many", pretend)
    monkeypatch.setattr(study, "history", lambda folder: {"loss": [0.5]})
    options = {"datasets": ["cifar10"], "methods": ["deterministic"]}
    results = study.study(LENET, tmp_path, [0], missing=missing, **options)
    assert len([record for record in results.records if record["budget"] == "trials"]) == 5
    assert list(missing.values()) == ["diverged"]
    everything = ran.copy()
    assert budgets(results) == ["report", "report", "equal"]
    lost = "report/cifar10/deterministic/"
    results = study.study(LENET, tmp_path, [0], **options)
    assert results.missing == ["report/cifar10/deterministic/seed0: diverged"]
    assert budgets(results) == ["report", "equal"]
    assert ran == 2 * everything


def test_the_reports_runs_have_its_budget():
    runs = LENET.runs("report", [2], datasets=["cifar10"])
    found = {name.split("/")[2]: settings for name, settings in runs.items()}
    assert {*LENET.methods, "deterministic_continued"} == set(found)
    assert (found["deterministic"].epochs, found["deterministic"].pretrain_epochs) == (20, 0)
    for name, settings in found.items():
        assert settings.seed == 2
        if name != "deterministic":
            assert (settings.epochs, settings.pretrain_epochs) == (50, 20)
            assert settings.method == name.removesuffix("_continued")


def test_a_key_is_of_the_part_and_of_every_setting():
    def key(part, **changes):
        return plan.key(f"{part}/a/b/seed0", dataclasses.replace(SETTINGS, **changes))

    assert key("equal") == plan.key("equal/c/d/seed1", SETTINGS)
    assert len({key("equal"), key("trials"), key("equal", seed=1), key("equal", beta=2.0)}) == 4


def test_an_experiment_is_one_entry():
    """All that a plan may say, in one that is made here."""
    runs = {"gaussian": {}, "twice": {"initial_scale": "$prior_scale", "use": ["flow"]}}
    part = {"runs": runs, "base": {"posterior": "gaussian", "epochs": {"mnist": 3}}}
    made = plan._plan(
        [4, 6], {"a": part, "b": {"list": [{"beta": 2.0}, {}], "base": {}}}, datasets=["mnist"]
    )
    assert list(made.seeds) == [4, 5]
    assert made.methods == ("gaussian", "twice", "beta=2", "reference")
    found = made.runs("a", [4])
    assert list(found) == ["a/mnist/gaussian/seed4", "a/mnist/twice/seed4"]
    second = found["a/mnist/twice/seed4"]
    assert (second.posterior, second.initial_scale, second.epochs) == ("flow", 0.5, 3)
    assert made.runs("b", [0])["b/mnist/beta=2/seed0"].beta == 2.0


# Many runs.


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    data.load("digits", folder)
    return folder


@pytest.fixture
def quickly(eagerly, monkeypatch):
    """Compile nothing, and write no SavedModel."""
    monkeypatch.setattr(lib.Scorer, "export", lambda *arguments, **options: None)


def test_finished_runs_are_skipped_and_the_rest_is_run(quickly, tmp_path, data_dir, monkeypatch):
    runs = {"a/0": SETTINGS, "b": dataclasses.replace(SETTINGS, seed=1)}
    options = {"data_dir": data_dir, "log": lambda line: None}
    first = run_many.run_many({"a/0": SETTINGS}, tmp_path, **options)
    trained = []
    run = run_many.run

    def watched(settings, *args, **kwargs):
        trained.append(settings.seed)
        return run(settings, *args, **kwargs)

    monkeypatch.setattr(run_many, "run", watched)
    found = run_many.run_many(runs, tmp_path, **options)
    assert trained == [1]
    assert list(found) == ["a/0", "b"]
    assert found["a/0"] == first["a/0"]
    assert run_many.run_many(runs, tmp_path, **options) == found
    assert trained == [1]


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others(quickly, tmp_path, data_dir):
    bad = dataclasses.replace(SETTINGS, learning_rate=1e30)
    runs = {"bad": bad, "checkpoint": SETTINGS, "record": SETTINGS, "good": SETTINGS}
    damaged = {"checkpoint": "training.npz", "record": "metrics.json"}
    for name, file in damaged.items():
        folder = lib.RunFolder(tmp_path / name, identity(SETTINGS))
        folder.claim()
        folder.release()
        (tmp_path / name / file).write_bytes(b"PK half")
    said, missing = [], {}
    found = run_many.run_many(runs, tmp_path, data_dir=data_dir, missing=missing, log=said.append)
    assert list(found) == ["good"]
    for name, why in {"bad": "diverged", **damaged}.items():
        assert why in missing.pop(name)
        assert any(line.startswith(f"{name} failed: ") for line in said)
    assert not missing
    assert not (tmp_path / "bad" / "metrics.json").exists()
    run_many.run_many(runs, tmp_path, train=False, missing=missing, log=said.append)
    assert "diverged" in missing["bad"]
    assert "training.npz" in missing["checkpoint"]
    with pytest.raises(RunError, match="3 of 4 runs failed. record: .*metrics.json"):
        run_many.run_many(runs, tmp_path, data_dir=data_dir, log=said.append)


@pytest.mark.slow
def test_an_evaluation_is_part_of_the_run(quickly, tmp_path, data_dir, monkeypatch):
    """One that failed loses nothing else, and is taken up without training anew."""
    shifts = robustness.Settings(dataset="digits", shifts=["rotations"], degrees=[90], samples=2)
    options = {"data_dir": data_dir, "evaluations": {"a": {"turned": shifts}}, "log": print}
    evaluate = robustness.evaluate

    def broken(*args, **kwargs):
        raise RunError("the power is gone")

    monkeypatch.setattr(robustness, "evaluate", broken)
    missing = {}
    found = run_many.run_many({"a": SETTINGS}, tmp_path, missing=missing, **options)
    assert missing == {"a/turned": "the power is gone"}
    assert found["a"]["evaluations"] == {}
    monkeypatch.setattr(robustness, "evaluate", evaluate)
    before = (tmp_path / "a" / "metrics.json").read_bytes()
    found = run_many.run_many({"a": SETTINGS}, tmp_path, **options)
    assert [row["shift"] for row in found["a"]["evaluations"]["turned"]] == ["clean", "rotation"]
    assert (tmp_path / "a" / "metrics.json").read_bytes() == before
    assert run_many.run_many({"a": SETTINGS}, tmp_path, **options) == found


def test_a_run_of_other_settings_stops_all(tmp_path, data_dir):
    lib.RunFolder(tmp_path / "b", {"other": 1}).claim()
    runs = {"a": SETTINGS, "b": SETTINGS}
    with pytest.raises(RunError, match="another run"):
        run_many.run_many(runs, tmp_path, data_dir=data_dir)
    assert os.listdir(tmp_path) == ["b"]


@pytest.mark.slow
def test_two_processes_measure_what_one_does(tmp_path, data_dir):
    runs = {f"run{seed}": dataclasses.replace(SETTINGS, seed=seed) for seed in range(3)}
    one, two = (
        run_many.run_many(runs, tmp_path / str(jobs), jobs=jobs, data_dir=data_dir)
        for jobs in (1, 2)
    )
    assert list(one) == list(two) == list(runs)
    for name in runs:
        for key in scoring.SCORES:
            assert one[name][key] == pytest.approx(two[name][key], rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_an_error_in_another_process_surfaces(tmp_path, data_dir):
    bad = dataclasses.replace(SETTINGS, learning_rate=1e25, epochs=3, optimizer="sgd")
    with pytest.raises(RunError, match="diverged"):
        run_many.run_many({"a": SETTINGS, "bad": bad}, tmp_path, jobs=2, data_dir=data_dir)


def test_records_have_the_commit_that_made_them(tmp_path):
    assert store.commit(tmp_path) is None
    git = ["git", "-c", "user.name=x", "-c", "user.email=x"]

    def run(*arguments):
        done = subprocess.run(
            [*git, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    run("init")
    (tmp_path / "file").write_text("one")
    run("add", "file")
    run("commit", "-m", "first")
    head = run("rev-parse", "HEAD")
    assert store.commit(tmp_path) == head
    (tmp_path / "file").write_text("two")
    assert store.commit(tmp_path) == f"{head}-dirty"
    assert store.provenance({})["commit"] == store.commit()
