import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from lib import RunError, data, run_many, store
from lib.plan import PLANS

SCRIPT = Path(__file__).parents[2] / "scripts" / "reproduce.py"
KEYS = {
    "dataset",
    "model",
    "method",
    "budget",
    "epochs",
    "samples",
    "seeds",
    "accuracy",
    "nll",
    "brier",
    "ece",
    "command",
    "backend",
    "hardware",
}

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("reproduce", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made_images(name, data_dir=None):
    """Images of the right shapes whose brightness tells the class."""
    rng = np.random.default_rng(0)
    splits = []
    for count in (400, 300):
        labels = rng.integers(0, 10, count).astype("int32")
        noise = rng.integers(0, 30, (count, *data.DATASETS[name].image_shape))
        splits.append(((noise + 20 * labels[:, None, None, None]).astype("uint8"), labels))
    return tuple(splits)


def check(folder):
    table = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["rows"]
    for row in table:
        assert set(row) >= KEYS
        for key in ("accuracy", "nll", "brier", "ece"):
            assert set(row[key]) == {"mean", "std"}
            assert np.isfinite(list(row[key].values())).all()
    return table


@pytest.mark.slow
def test_a_quick_run(script, tmp_path, monkeypatch, capsys):
    """All in one test: in several, each process would train anew."""
    folder = tmp_path
    arguments = ["lenet", "--quick", "--datasets", "fashion_mnist", "--seeds", "1"]
    arguments += ["--methods", "gaussian"]
    arguments += ["--runs", str(folder / "runs"), "--results", str(folder / "results")]
    monkeypatch.setattr(data, "load", made_images)
    assert script.main(arguments) == 0
    has_every_row(folder)
    has_figures(folder)

    # A second time nothing is trained.
    path = folder / "results" / "lenet" / "summary.json"
    before = path.read_bytes()
    monkeypatch.setattr(run_many, "run", None)
    monkeypatch.setattr(data, "load", None)
    assert script.main(arguments) == 0
    assert path.read_bytes() == before

    # The trials were made with the first seed: another first seed needs another folder.
    arguments[arguments.index("--seeds") + 1] = "2"
    arguments.append("--force")
    capsys.readouterr()
    assert script.main(arguments) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1


def has_every_row(folder):
    table = check(folder / "results" / "lenet")
    assert [(row["budget"], row["method"]) for row in table] == [
        ("report", "gaussian"),
        ("equal", "gaussian"),
    ]
    for row in table:
        assert row["seeds"] == [1]
        assert row["dataset"] == "fashion_mnist"
        assert row["samples"] == 4
    records, missing = store.read(folder / "results" / "lenet")
    assert [record["budget"] for record in records] == ["trials", "report", "equal"]
    assert missing == []


def has_figures(folder):
    for name in ("curves.png", "scores.png"):
        content = (folder / "results" / "lenet" / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 10_000


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["vgg"],
        ["lenet", "--jobs", "0"],
        ["lenet", "--jobs", "two"],
        ["lenet", "--seeds"],
        ["lenet", "--seeds", "-1"],
        ["lenet", "--seeds", "1", "1"],
        ["lenet", "--seeds", str(2**32)],
        ["lenet", "--datasets", "mnist"],
        ["lenet", "--methods", "dropout"],
        ["lenet", "--finished"],
        ["toy2d", "--parts", "equal"],
        ["vgg16", "--methods", "flow"],
        ["vgg16", "--parts", "all"],
        ["vgg16", "--datasets", "cifar10"],
        ["lenet", "--add"],
        ["lenet", "--backend", "torch"],
        ["lenet", "--unknown"],
    ],
    ids=" ".join,
)
def test_bad_options_exit_2(script, capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        script.parse(arguments)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_an_interruption_is_told_in_a_line(script, tmp_path, monkeypatch, capsys):
    def interrupted(name, options, folder, missing):
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "experiment", interrupted)
    assert script.main(["toy2d", "--results", str(tmp_path)]) == 130
    assert capsys.readouterr().err.strip().startswith("interrupted; what is finished")


def test_a_failure_ends_nothing_else_and_is_told_by_the_exit_status(
    script, tmp_path, monkeypatch, capsys
):
    def experiment(name, options, folder, missing):
        if name == "toy2d":
            raise RunError("no luck")
        if name == "frozen":
            missing["trials/a"] = "it diverged"
        return []

    monkeypatch.setattr(script, "experiment", experiment)
    assert script.main(["all", "--results", str(tmp_path)]) == 1
    told = capsys.readouterr()
    first, second = told.err.splitlines()
    assert first == "error: no luck"
    assert second == "error: 1 runs of frozen failed, the first trials/a: it diverged"
    assert [line.split(":")[0] for line in told.out.splitlines() if "written" in line] == [
        *("frozen", "lenet")
    ]


def test_a_quick_look_does_not_touch_the_results(script):
    quick, real = script.parse(["lenet", "--quick"]), script.parse(["lenet"])
    assert (real.runs, real.results) == ("outputs/reproduce", "results")
    assert "quick" in quick.runs
    assert "quick" in quick.results


def test_data_that_cannot_be_had_is_an_error_in_one_line(script, tmp_path, monkeypatch, capsys):
    def missing(name, data_dir=None):
        raise data.DataError(f"{name} could not be loaded.")

    monkeypatch.setattr(data, "load", missing)
    folders = ["--runs", str(tmp_path / "a"), "--results", str(tmp_path / "b")]
    assert script.main(["lenet", "--quick", *folders]) == 1
    assert "could not be loaded" in capsys.readouterr().err


@pytest.mark.slow
def test_everything_quickly(script, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "load", made_images)
    folders = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    assert script.main(["all", "--quick", "--seeds", "0", *folders]) == 0
    for name in ("toy2d", "frozen"):
        check(tmp_path / "results" / name)
    table = check(tmp_path / "results" / "lenet")
    assert {row["method"] for row in table if row["budget"] == "equal"} == set(
        PLANS["lenet"].methods
    )
    assert all(row["seeds"] == [0] for row in table)


@pytest.mark.parametrize(
    ("before", "arguments", "lost"),
    [
        ({"seeds": [0, 1, 2]}, ["--seeds", "0", "1"], "--seeds"),
        ({"seeds": [0]}, ["--quick"], "without --quick"),
        ({"seeds": [0, 1]}, ["--methods", "gaussian"], "--methods"),
        ({"seeds": [0], "methods": ["gaussian"]}, ["--methods", "flow"], "--methods"),
        ({"seeds": [0, 1], "methods": ["flow"]}, ["--methods", "flow", "gaussian"], None),
        ({"seeds": [0, 1]}, [], None),
        ({"seeds": [0, 1], "quick": True}, [], None),
    ],
)
def test_results_that_know_more_are_not_replaced(script, tmp_path, capsys, before, arguments, lost):
    folder = tmp_path / "lenet"
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps({"options": before}))
    common = ["--results", str(tmp_path), "--runs", str(tmp_path / "runs")]
    options = script.parse(["lenet", *arguments, *common])
    options.seeds = options.seeds or [0, 1]
    assert (lost or "None") in str(script.what_is_lost(folder, options))
    if lost:
        assert script.main(["lenet", *arguments, *common]) == 1
        assert "--force" in capsys.readouterr().err
        assert json.loads((folder / "summary.json").read_text()) == {"options": before}


@pytest.mark.parametrize(
    ("quick", "arguments", "lost"),
    [
        (False, ["--seeds", "5"], "None"),
        (False, ["--parts", "long"], "None"),
        (False, ["--quick"], "without --quick"),
        (True, [], "with --quick"),
    ],
)
def test_what_is_added_to_is_not_lost(script, tmp_path, quick, arguments, lost):
    (tmp_path / "summary.json").write_text(json.dumps({"options": {"seeds": [0], "quick": quick}}))
    options = script.parse(["vgg16", "--add", *arguments])
    assert lost in str(script.what_is_lost(tmp_path, options))


def test_what_is_no_result_is_not_replaced(script, tmp_path):
    for content in ("my thesis", "[]", '{"options": 3}'):
        (tmp_path / "summary.json").write_text(content)
        assert script.what_is_lost(tmp_path, script.parse(["lenet"])) == "kinds"
    assert script.what_is_lost(tmp_path / "none", script.parse(["lenet"])) is None


@pytest.mark.parametrize("name", ["toy2d", "frozen", "lenet", "vgg16"])
def test_the_default_seeds_are_those_of_the_kept_results(script, name):
    records, _ = store.read(SCRIPT.parents[1] / "results" / name)
    assert sorted({record["seed"] for record in records}) == list(PLANS[name].seeds)
    options = script.parse([name])
    options.seeds = list(PLANS[name].seeds)
    assert script.what_is_lost(SCRIPT.parents[1] / "results" / name, options) is None
