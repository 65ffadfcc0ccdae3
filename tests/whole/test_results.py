import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from lib import Scores, store
from lib.markdown import PAGES, fill
from lib.plan import PLANS, key
from lib.study import best

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
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
    content = json.loads(path.read_text())
    assert content.keys() >= {"options", "command", "missing", "rows"}
    for row in content["rows"]:
        for name in ("dataset", "model", "method", "budget", "command", "backend", "hardware"):
            assert isinstance(row[name], str)
        assert row["epochs"] >= 1
        assert row["samples"] >= 1
        # An experiment that is not finished says what it lacks.
        assert len(row["seeds"]) >= (1 if content["missing"] else 3)
        for name in ("accuracy", "nll", "brier", "ece"):
            assert row[name].keys() == {"mean", "std"}
        assert 0 < row["accuracy"]["mean"] < 1


@pytest.mark.parametrize("path", SUMMARIES, ids=lambda path: path.parent.name)
def test_summaries_are_those_of_the_runs(path):
    runs, _ = store.read(path.parent)
    for row in json.loads(path.read_text())["rows"]:
        keys = ("dataset", "method", "budget")
        values = [run["nll"] for run in runs if all(run[name] == row[name] for name in keys)]
        assert len(values) == len(row["seeds"])
        assert row["nll"]["mean"] == pytest.approx(sum(values) / len(values), abs=1e-6)


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_is_what_was_run(name):
    """Every run is stored by the hash of the settings that the plan gives it now."""
    plan, (records, missing) = PLANS[name], store.read(RESULTS / name)
    found = {record["name"]: record for record in records}
    seeds, planned, chosen = list(plan.seeds), {}, {}
    if plan.trials:
        planned = plan.trial_runs(seeds[0])
        chosen = {of: planned[trial] for of, trial in best(planned, found).items()}
    for part in plan.parts:
        planned |= plan.runs(part, seeds, chosen=chosen)
    keys = {run: key(run, settings) for run, settings in planned.items()}
    for line in missing:
        del keys[line.split(": ")[0]]
    assert {run: record["key"] for run, record in found.items()} == keys


def test_every_number_of_the_first_form_is_in_the_new_one():
    """Of runs.json, summary.json and robustness.json, which runs.jsonl has replaced."""
    with gzip.open(ROOT / "tests" / "files" / "results_before_jsonl.json.gz", "rt") as file:
        before = json.load(file)
    assert sum(len(content["runs"]) for content in before.values()) == 342
    for name, old in before.items():
        records, missing = store.read(RESULTS / name)
        summary = json.loads((RESULTS / name / "summary.json").read_text())
        assert [row for row in summary["rows"] if row in old["summary"]] == old["summary"]
        assert (summary["options"], summary["command"]) == (old["options"], old["command"])
        # What was planned later may be missing, too.
        assert missing[: len(old.get("missing", []))] == old.get("missing", [])
        assert all(line.endswith(": not run") for line in missing[len(old.get("missing", [])) :])
        for row in (*old["runs"], *old.get("trials", ()), *old.get("ablations", ())):
            assert any(all(record.get(k) == v for k, v in row.items()) for record in records)
        by_run = {tuple(record[part] for part in OF): record for record in records}
        for row in old.get("scaled", ()):
            assert by_run[of(row)]["scaled"] == rest(row)
        for row in old.get("draws", ()):
            assert by_run[of(row)]["evaluations"][f"draws{row['samples']}"] == [
                rest(row, "samples")
            ]
        for row in old.get("shifts", ()):
            assert rest(row) in by_run[of(row)]["evaluations"]["robustness"]
        averaged = {(row["budget"], row["method"]): row for row in summary.get("averaged", ())}
        for row in old.get("averaged", ()):
            # Sums may differ in the last digit from one machine to another.
            found = averaged[row["budget"], row["method"]]
            for name, value in row.items():
                exact = isinstance(value, str)
                assert found[name] == (value if exact else pytest.approx(value, rel=1e-12))
        assert summary.get("evaluations", {}) == old.get("evaluations", {})


OF = ("budget", "method", "seed")


def of(row):
    return tuple(row[part] for part in OF)


def rest(row, *without):
    return {name: value for name, value in row.items() if name not in (*OF, *without)}


def test_there_are_results():
    assert {path.parent.name for path in SUMMARIES} == set(PLANS)


def test_scores_can_be_computed_again_from_the_probabilities():
    """Float16 is enough for that."""
    folder = RESULTS / "vgg16"
    runs = {run["name"]: run for run in store.read(folder)[0] if store.is_shown(run)}
    names = {f"{run['budget']}-{run['method']}-seed{run['seed']}.npz" for run in runs.values()}
    assert {path.name for path in (folder / "probabilities").iterdir()} == names
    for run in runs.values():
        mean, labels = store.stored(run, folder)
        again = Scores(mean, None, labels, 1).scores()
        assert again["accuracy"] == pytest.approx(run["accuracy"], abs=2e-4)
        assert again["nll"] == pytest.approx(run["nll"], abs=5e-4)
        assert again["brier"] == pytest.approx(run["brier"], abs=5e-4)
        assert again["ece"] == pytest.approx(run["ece"], abs=1e-3)


def test_ensembles_and_temperatures_can_be_computed_again():
    folder = RESULTS / "vgg16"
    runs = [run for run in store.read(folder)[0] if store.is_shown(run)]
    scaled = [run for run in runs if "scaled" in run]
    assert {run["method"] for run in scaled} >= {"deterministic", "gaussian"}
    for row in json.loads((folder / "summary.json").read_text())["averaged"]:
        each = [store.stored({**row, "seed": seed}, folder) for seed in row["seeds"]]
        mean = np.mean([mean for mean, _ in each], axis=0)
        again = Scores(mean, None, each[0][1], 1).scores()
        assert again["nll"] == pytest.approx(row["nll"], abs=5e-4)
        assert again["ece"] == pytest.approx(row["ece"], abs=1e-3)
    for run in scaled:
        mean, labels = store.stored(run, folder)
        powers = mean ** (1 / run["scaled"]["temperature"])
        again = Scores(powers / powers.sum(axis=1, keepdims=True), None, labels, 1).scores()
        # What float16 has cut off weighs more at a temperature above 1.
        assert again["nll"] == pytest.approx(run["scaled"]["nll"], abs=3e-3)
        assert again["accuracy"] == pytest.approx(run["scaled"]["accuracy"], abs=2e-4)
