import json
from pathlib import Path

import pytest

from tests import readme_example
from tests.calibration.tools import methods
from tfp_ibnn._core.command_line import EXAMPLES
from tfp_ibnn.calibration import run, untrained

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def test_the_example_works_with_few_epochs_and_draws(capsys, monkeypatch):
    # The other methods have tests of their own.
    monkeypatch.setattr(run, "METHODS", methods(untrained.as_it_is, untrained.given))
    code = readme_example.code()
    for old, few in (("epochs=50", "epochs=2"), ("seed=0)\n", "seed=0, samples=4)\n")):
        assert code.count(old) == 1
        code = code.replace(old, few)
    names = {}
    exec(code, names)
    assert names["prediction"]["mean"].shape == (797, 10)
    printed = capsys.readouterr().out
    assert "\n| candidate " in printed
    (chosen,) = [line for line in printed.splitlines() if line.startswith("| **")]
    assert f"| **{names['report'].chosen.name}** " in chosen


@pytest.mark.slow
def test_the_example_works_when_pasted(capsys):
    assert len(readme_example.code().splitlines()) <= 16
    assert readme_example.run()["prediction"]["mean"].shape == (797, 10)
    lines = capsys.readouterr().out.splitlines()
    rows = [line.strip("| ").split("|") for line in lines if line.startswith("| ")]
    column = [title.strip() for title in rows[0]].index("NLL")
    nll = {row[0].strip(" *"): float(row[column]) for row in rows[2:]}
    assert nll.keys() >= {"as it is", "as it is + temperature", "Laplace, last layer"}
    (chosen,) = (row[0].strip(" *") for row in rows if "**" in row[0])
    assert nll[chosen] < 0.9 * nll["as it is"]
    recorded = json.loads(readme_example.RECORD.read_text())
    assert list(nll) == list(recorded["test"])
    assert chosen == recorded["chosen"]
    # Other processors round otherwise, and a training carries that on.
    expected = {name: row["NLL"] for name, row in recorded["test"].items()}
    assert nll == pytest.approx(expected, abs=0.02)


def test_the_table_is_that_of_the_recorded_run():
    text, record = README.read_text(), json.loads(readme_example.RECORD.read_text())
    assert readme_example.filled(text, record) == text
    assert f"| **{record['chosen']}** |" in text
    changed = {**record, "test": {**record["test"], "as it is": {**record["test"]["as it is"]}}}
    changed["test"]["as it is"]["NLL"] += 1
    assert readme_example.filled(text, changed) != text


def test_the_recorded_run_has_the_candidates_of_today():
    """Else run `python -m tests.readme_example` anew."""
    record = json.loads(readme_example.RECORD.read_text())
    assert record["methods"] == readme_example.methods()


def test_the_table_of_make_train_is_that_of_the_recorded_run():
    recorded = ROOT / "results" / "digits" / "metrics.json"
    text = (ROOT / "docs" / "real_data.md").read_text()
    for name, row in json.loads(recorded.read_text())["results"].items():
        numbers = [f"{row[key]:.4f}" for key in ("accuracy", "nll", "ece")]
        cells = " | ".join([name, *numbers, f"{row['parameters']:,}"])
        assert f"| {cells} |" in text


def test_it_names_the_two_commands():
    text, targets = README.read_text(), (ROOT / "Makefile").read_text()
    for target in ("train", "test"):
        assert f"`make {target}`" in text
        assert f"\n{target}: " in targets


def test_it_names_the_arrays_of_the_command():
    text = README.read_text()
    paragraph = text[text.index("python -m tfp_ibnn calibrate") :].split("\n\n")[0]
    for part in ("train", "val", "test"):
        assert f"`x_{part}`, `y_{part}`" in paragraph
        assert f"x_{part}, y_{part}" in EXAMPLES


def test_it_is_short():
    assert len(README.read_text().splitlines()) <= 120
