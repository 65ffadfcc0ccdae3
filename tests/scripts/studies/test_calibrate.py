"""The study of `calibrate`: a run from end to end, what resumes, and its tables."""

import os
from pathlib import Path

import numpy as np
import pytest

from lib import files, tasks
from studies.calibrate import STUDY
from studies.calibrate import run as study
from studies.calibrate import tables as calibrate_tables

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[3]


@pytest.fixture
def here(monkeypatch):
    """Run in this process, which has loaded all that it takes."""
    monkeypatch.setattr(tasks, "apart", lambda function, *task: function(*task))


@pytest.mark.slow
def test_a_quick_run_is_stored_and_not_repeated(here, eagerly, tmp_path, capsys):
    command = ["--quick", "--pairs", "wine", "--seeds", "3", "--output", str(tmp_path)]
    assert STUDY.main(command) == 0
    assert "1 runs to do, 0 are there" in capsys.readouterr().out
    (record,) = tasks.read(tmp_path)
    options = {"quick": True, "effort": "minutes"}
    assert record.keys() >= {"versions", "hardware", "command", "backend", "python"}
    assert (record["pair"], record["seed"], record["options"]) == ("wine", 3, options)
    assert record["seconds"].keys() == {"training", "calibrate", "test"}
    assert record["chosen"] in record["candidates"]
    for row in record["candidates"].values():
        assert row.keys() >= {"accuracy", "NLL", "Brier", "ECE", "ECE floor", "T"}
    assert STUDY.main(command) == 0
    assert "0 runs to do, 1 are there" in capsys.readouterr().out
    assert len(tasks.read(tmp_path)) == 1
    assert "wine 78" in (tmp_path / "table.md").read_text()


def test_runs_are_apart():
    assert tasks.apart(os.getpid) != os.getpid()


def test_a_failed_run_leaves_the_others(here, tmp_path, capsys, monkeypatch):
    def run(name, seed, quick, data_dir, effort):
        if seed == 1:
            raise MemoryError("too large")
        return made("digits", seed, [2.0, 1.0])

    monkeypatch.setattr(study, "run", run)
    command = ["--pairs", "digits", "--seeds", "0", "1", "2", "--output", str(tmp_path)]
    assert STUDY.main(command) == 1
    assert "error: digits, seed 1: MemoryError: too large" in capsys.readouterr().out
    assert sorted(record["seed"] for record in tasks.read(tmp_path)) == [0, 2]


def made(pair, seed, nll, chosen=-1):
    names = ["as it is", "as it is + temperature", "fine-tuned + temperature"]
    rows = {
        name: {"NLL": x, "accuracy": 0.9, "ECE": 0.1} for name, x in zip(names, nll, strict=False)
    }
    about = {"pair": pair, "seed": seed, "seconds": {"training": 1}}
    return {**about, "chosen": names[: len(nll)][chosen], "candidates": rows}


def test_table_has_paired_margins():
    records = [made("digits", 0, [2.0, 1.5, 1.0]), made("digits", 1, [3.0, 2.5, 2.2], chosen=1)]
    _, _, row, _, missing = calibrate_tables.table(records, ["digits", "wine"]).splitlines()
    assert missing == "Not run yet: wine 78, MLP 32-32."
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    # Differences -1 and -0.5: the standard error is 0.25, and t of one degree of freedom 12.706.
    assert cells == [
        *(study.PAIRS["digits"][0], "2", "0.900 → 0.900", "0.100 → 0.100"),
        *("2.5000", "2.0000", "1.7500", "-0.7500 ± 3.1766", "-0.2500 ± 3.1766"),
        "1 × fine-tuned + temperature; 1 × as it is + temperature",
    ]


def test_regression_has_no_temperature():
    records = [made("diabetes", seed, [2.0]) for seed in range(2)]
    for record in records:
        record["candidates"]["as it is"] = {"NLL": 1.0, "RMSE": 0.5}
    cells = calibrate_tables.table(records, study.UNSEEN).splitlines()[2].split("|")
    assert [cell.strip() for cell in cells[3:5]] == ["-", "-"]
    assert cells[6].strip() == cells[9].strip() == "-"


def test_pages_are_filled_by_kind():
    text = "a\n<!-- calibrate: unseen -->\nold\n<!-- end -->\nb"
    records = [made("wine", 0, [2.0]), made("digits", 0, [2.0])]
    filled = files.filled(text, "calibrate", calibrate_tables.tables(records))
    assert "wine 78" in filled
    assert study.PAIRS["digits"][0] not in filled
    assert filled.startswith("a\n<!-- calibrate: unseen -->\n|")
    assert filled.endswith("<!-- end -->\nb")


def test_tables_are_those_of_the_runs():
    text = (ROOT / STUDY.report).read_text(encoding="utf-8")
    assert "<!-- calibrate: tuned -->" in text
    tables = calibrate_tables.tables(tasks.read(ROOT / STUDY.results))
    assert files.filled(text, "calibrate", tables) == text


@pytest.mark.parametrize("name", ["digits", "lstm", "efficientnet", "cancer", "wine", "diabetes"])
def test_seed_draws_the_examples(name):
    first, again, other = (study.load(name, seed) for seed in (0, 0, 1))
    for (x, y), (x_again, _), (x_other, _) in zip(first, again, other, strict=True):
        assert len(x) == len(y) >= 48
        np.testing.assert_array_equal(x, x_again)
        assert (x != x_other).any()


def test_unknown_pairs_are_named(capsys):
    with pytest.raises(SystemExit):
        STUDY.main(["--pairs", "nonsense"])
    assert "--pairs must be some of digits, " in capsys.readouterr().err
