"""The rule by which a candidate is chosen, the words for it, and what a report shows and writes."""

import dataclasses
import json
import resource
import types

import keras
import numpy as np
import pytest

from tfp_ibnn.calibration import Table
from tfp_ibnn.calibration.report import Candidate, Report, behind, choose
from tfp_ibnn.likelihoods.class_scaling import ClassScaling


def test_cheapest_within_one_standard_error_is_chosen():
    base = np.array([1.0, 2.0, 3.0, 4.0])
    noise = np.array([0.1, -0.1, 0.1, -0.1])
    error = noise.std(ddof=1) / 2
    near, far = base + noise + 0.9 * error, base + noise + 1.1 * error
    assert choose(np.stack([near, base]), [(1,), (2,)]) == 0
    assert choose(np.stack([far, base]), [(1,), (2,)]) == 1
    # In pairs: it is not the spread of the NLL itself that counts.
    assert choose(np.stack([base + 0.01, base]), [(1,), (2,)]) == 1
    # The best costs least; then, among equally cheap ones, the better.
    assert choose(np.stack([base, near]), [(1,), (2,)]) == 0
    assert choose(np.stack([near, base, near - 0.5 * error]), [(1,), (2,), (1,)]) == 2
    # Even if that one is so like the best that it is outside of its own standard error.
    assert choose(np.stack([near, base + 0.5 * error, base]), [(1,), (1,), (2,)]) == 1


def test_a_temperature_is_preferred_to_a_scaling_of_each_class(handmade, monkeypatch):
    """Unless it is worse by more than one standard error."""
    monkeypatch.setattr(Report, "model_of", lambda self, name: None)
    untreated, scaled, *_ = handmade.candidates
    noise = np.random.default_rng(1).normal(size=len(scaled.nll))
    noise -= noise.mean()

    def chosen(gain):
        by_class = {"parameter": ClassScaling(), "nll": scaled.nll + noise - gain}
        rival = dataclasses.replace(scaled, name="as it is + vector scaling", **by_class)
        report = dataclasses.replace(handmade, candidates=[untreated, scaled, rival])
        return report.chosen.name

    error = noise.std(ddof=1) / np.sqrt(len(noise))
    assert chosen(0.9 * error) == "as it is + temperature"
    assert chosen(1.1 * error) == "as it is + vector scaling"


def test_why_names_the_best_and_what_is_as_good_for_less():
    def candidate(name, nll):
        trial = types.SimpleNamespace()
        return Candidate(name, trial, 1.0, 0.0, np.zeros((4, 2)), np.array(nll), np.zeros(4))

    def why(*costs, **nll):
        report = Report.__new__(Report)
        report.candidates = [candidate(name, values) for name, values in nll.items()]
        report.chosen = report.candidates[choose([*nll.values()], costs)]
        for other in report.candidates:
            other.trial = report.candidates[0].trial
        return report.why()

    dear = [1.0, 1.0, 1.0, 1.0]
    only = why(1, 8, cheap=[2.0, 2.0, 2.0, 2.1], dear=dear)
    assert only == "Chosen: dear, NLL 1.0000: the best of 2, and none as good is cheaper."
    text = "noisy, NLL 1.1000, 0.1000 ± 0.6351 behind the best of 2, dear, which costs more."
    assert why(1, 8, noisy=[0.0, 2.2, 0.0, 2.2], dear=dear) == f"Chosen: {text}"


def test_the_short_table_has_what_nothing_matches(handmade):
    short = handmade.table()
    printed = [line.split("|")[1].strip(" *") for line in str(short).splitlines() if "|" in line]
    shown = ["as it is", "as it is + temperature", "ensemble + temperature"]
    assert printed[2:] == shown
    assert str(short).endswith(
        "Not shown: 2 of 5 candidates; for each, a row above is as good at no higher cost. "
        "`report.table(all=True)` has every row."
    )
    assert str(handmade) == f"{handmade.why()}\n\n{short}"
    names = [candidate.name for candidate in handmade.candidates]
    assert [*short.rows] == names
    for whole in (short.all(), handmade.table(all=True)):
        assert str(whole).count("\n") == 3 + len(names)
    cells = next(line for line in str(short).splitlines() if "ensemble" in line).split("|")
    assert [cell.strip() for cell in cells[-5:-1]] == ["3", "2", "0.000432", "0"]


def test_short_numbers_have_three_digits():
    rows = {"a": {"passes": 1234.5, "MB": 0.0123456}, "b": {"passes": 1.0, "MB": 12.345}}
    lines = str(Table("", rows, "a")).splitlines()[-2:]
    cells = [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines]
    assert cells == [["1,234", "0.0123"], ["1", "12.3"]]


def test_errors_are_clustered_by_example(handmade):
    groups = np.arange(len(handmade.y)) // 4
    clustered = dataclasses.replace(handmade, groups=groups)
    assert clustered.table().caption.startswith("15 validation examples with 60 outputs")
    nll = [candidate.nll for candidate in handmade.candidates]
    _, error = behind(nll, groups=groups)
    _, plain = behind(nll)
    assert error[0] != pytest.approx(plain[0], rel=0.01)
    assert clustered.table()["as it is"]["behind best"].endswith(f"± {error[0]:.4f}")
    assert json.loads(clustered.to_json())["examples"] == 15


# What is written


def test_json_has_everything(handmade, tmp_path):
    handmade.notes |= {"NaN": np.float32(np.nan), "infinite": [np.inf, 1], "other": tmp_path}
    text = handmade.to_json(tmp_path / "report.json")
    assert (tmp_path / "report.json").read_text() == f"{text}\n"

    def refuse(constant):
        raise AssertionError(constant)

    record = json.loads(text, parse_constant=refuse)
    assert record["chosen"] == handmade.chosen.name
    assert record["reason"] == handmade.why()
    assert (record["examples"], record["rows"], record["seed"]) == (60, 60, 0)
    assert record["dropped"] == {"slow": "there was no time for it"}
    assert record["notes"] == {"NaN": None, "infinite": [None, 1], "other": str(tmp_path)}
    assert record["versions"]["keras"] == keras.__version__
    table = handmade.table()
    best = ("as it is + temperature", "ensemble + temperature")
    for candidate, found in zip(handmade.candidates, record["candidates"], strict=True):
        row = table[candidate.name]
        assert found["name"] == candidate.name
        assert found["scores"] == {key: row[key] for key in found["scores"]}
        assert {*found["scores"]} == {"accuracy", "NLL", "Brier", "ECE", "ECE floor"}
        assert found["parameter"] == candidate.parameter
        assert found["cost"] == {
            "passes": row["passes"],
            "trainings": row["trainings"],
            "megabytes": row["MB"],
        }
        assert found["undominated"] == (candidate.name in best)
        distance = found["behind best"]
        words = f"{distance['mean']:.4f} ± {distance['standard error']:.4f}"
        assert row["behind best"] == (words if distance["mean"] else "best")


@pytest.mark.once
def test_what_cannot_be_written_costs_a_line(handmade, tmp_path, capsys):
    """A limit on the size of files stands for a full disk."""
    (tmp_path / "table.md").mkdir()
    (tmp_path / "model.keras").write_text("old")
    with pytest.raises(FileExistsError, match="model.keras that is not of a report"):
        handmade.save(tmp_path)
    (tmp_path / "report.json").write_text("{}")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        assert handmade.save(tmp_path) == tmp_path
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    lines = capsys.readouterr().out.splitlines()
    written = [line.split(" was not written: ")[0] for line in lines]
    assert written == ["model.keras", "table.md", "calibration.png"]
    assert "File too large" in lines[0]
    assert (tmp_path / "model.keras").read_text() == "old"
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"model.keras", "table.md", "model_card.md", "report.json"}
    assert json.loads((tmp_path / "report.json").read_text())["chosen"] == handmade.chosen.name
