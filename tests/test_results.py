import json
from pathlib import Path

import numpy as np
import pytest

from experiments import Scores
from experiments.tables import PAGES, fill

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
SUMMARIES = sorted(RESULTS.glob("*/summary.json"))


@pytest.mark.parametrize("name", PAGES)
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
    # An experiment that is not finished says what it lacks.
    missing = json.loads((path.parent / "runs.json").read_text()).get("missing")
    for row in rows:
        for key in ("dataset", "model", "method", "budget", "command", "backend", "hardware"):
            assert isinstance(row[key], str)
        assert row["epochs"] >= 1
        assert row["samples"] >= 1
        assert len(row["seeds"]) >= (1 if missing else 3)
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
    assert {path.parent.name for path in SUMMARIES} >= {"toy2d", "lenet", "vgg16"}


def test_scores_can_be_computed_again_from_the_probabilities():
    """Float16 is enough for that."""
    folder = RESULTS / "vgg16"
    runs = json.loads((folder / "runs.json").read_text())["runs"]
    names = {f"{run['budget']}-{run['method']}-seed{run['seed']}.npz": run for run in runs}
    assert {path.name for path in (folder / "probabilities").iterdir()} == set(names)
    for name, run in names.items():
        with np.load(folder / "probabilities" / name) as found:
            mean, labels = found["probabilities"].astype("float64"), found["labels"]
            again = Scores(mean, found["epistemic"], labels, run["samples"]).summary()
        assert again["accuracy"] == pytest.approx(run["accuracy"], abs=2e-4)
        assert again["nll"] == pytest.approx(run["nll"], abs=5e-4)
        assert again["brier"] == pytest.approx(run["brier"], abs=5e-4)
        assert again["ece"] == pytest.approx(run["ece"], abs=1e-3)


def test_ensembles_and_temperatures_can_be_computed_again():
    folder = RESULTS / "vgg16"
    record = json.loads((folder / "runs.json").read_text())

    def stored(row, seed):
        name = f"{row['budget']}-{row['method']}-seed{seed}.npz"
        with np.load(folder / "probabilities" / name) as found:
            return found["probabilities"].astype("float64"), found["labels"]

    assert {row["method"] for row in record["scaled"]} >= {"deterministic", "gaussian"}
    for row in record["averaged"]:
        each = [stored(row, seed) for seed in row["seeds"]]
        mean = np.mean([mean for mean, _ in each], axis=0)
        again = Scores(mean, None, each[0][1], 1).summary()
        assert again["nll"] == pytest.approx(row["nll"], abs=5e-4)
        assert again["ece"] == pytest.approx(row["ece"], abs=1e-3)
    for row in record["scaled"]:
        mean, labels = stored(row, row["seed"])
        powers = mean ** (1 / row["temperature"])
        again = Scores(powers / powers.sum(axis=1, keepdims=True), None, labels, 1).summary()
        # What float16 has cut off weighs more at a temperature above 1.
        assert again["nll"] == pytest.approx(row["nll"], abs=3e-3)
        assert again["accuracy"] == pytest.approx(row["accuracy"], abs=2e-4)
