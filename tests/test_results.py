import json
from pathlib import Path

import pytest

from tfp_ibnn.experiments.tables import fill

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
SUMMARIES = sorted(RESULTS.glob("*/summary.json"))


@pytest.mark.parametrize("name", ["README.md", "results/README.md"])
def test_tables_are_those_of_the_results(name):
    text = (ROOT / name).read_text()
    assert text.count("<!-- end -->") >= 1
    assert fill(text, RESULTS) == text


def test_a_wrong_number_is_noticed():
    text = (ROOT / "README.md").read_text()
    begin = text.index("<!-- scores:")
    row = text.index("± 0.", begin)
    wrong = text[:row] + "± 9." + text[row + 4 :]
    assert fill(wrong, RESULTS) == text


@pytest.mark.parametrize("path", SUMMARIES, ids=lambda path: path.parent.name)
def test_summaries_have_what_they_promise(path):
    rows = json.loads(path.read_text())
    for row in rows:
        for key in ("dataset", "model", "method", "budget", "command", "backend", "hardware"):
            assert isinstance(row[key], str)
        assert row["epochs"] >= 1
        assert row["samples"] >= 1
        assert len(row["seeds"]) >= 3
        for key in ("accuracy", "nll", "brier", "ece"):
            assert row[key].keys() == {"mean", "std"}
        assert 0 < row["accuracy"]["mean"] < 1


@pytest.mark.parametrize("path", SUMMARIES, ids=lambda path: path.parent.name)
def test_summaries_are_those_of_the_runs(path):
    runs = json.loads((path.parent / "runs.json").read_text())["runs"]
    for row in json.loads(path.read_text()):
        keys = ("dataset", "method", "budget")
        values = [run["nll"] for run in runs if all(run[key] == row[key] for key in keys)]
        assert len(values) == len(row["seeds"])
        assert row["nll"]["mean"] == pytest.approx(sum(values) / len(values), abs=1e-6)


def test_there_are_results():
    assert {path.parent.name for path in SUMMARIES} >= {"toy2d", "lenet"}
