"""The study of how fast large tables are scored."""

import argparse
import json
from pathlib import Path

import pytest

from studies.score_time import RESULTS, STUDY
from studies.score_time import run as study

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-beam" / "bin" / "python"
pytestmark = pytest.mark.once


def test_it_asks_for_the_environment(tmp_path):
    options = STUDY.parse(["--python", str(tmp_path / "python")])
    with pytest.raises(SystemExit, match="`make beam` makes the environment"):
        study.execute(options)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="`make beam` makes the environment of Beam")
def test_rows_are_scored_and_counted():
    options = STUDY.parse(["--rows", "9000", "--workers", "1", "--python", str(PYTHON)])
    assert isinstance(options, argparse.Namespace)
    rows = study.execute(options)
    assert [row["rows"] for row in rows] == ["9,000"] * 3
    assert all(row["seconds"] > 0 for row in rows)


def test_the_page_shows_the_stored_rows():
    path = ROOT / RESULTS / "runs.json"
    text = (ROOT / RESULTS / "README.md").read_text()
    stored = json.loads(path.read_text())["rows"] if path.exists() else []
    for row in stored:
        assert f"| {row['rows a second']} |" in text
    assert stored or "Not run yet." in text
