"""The report of each study shows the tables of its stored runs."""

import importlib
import re
from pathlib import Path

import pytest

import study
from lib import files, tasks

ROOT = Path(__file__).parents[3]


def reported(name):
    """Whether a study stores runs, whose tables its report shows."""
    settings = importlib.import_module(f"studies.{name}").STUDY
    report = getattr(settings, "report", None)
    return report is not None and (ROOT / report).exists() and (ROOT / settings.results).is_dir()


@pytest.mark.once
@pytest.mark.parametrize("name", [name for name in study.studies() if reported(name)])
def test_the_report_shows_the_stored_runs(name):
    settings = importlib.import_module(f"studies.{name}").STUDY
    make = importlib.import_module(f"studies.{name}.tables").tables
    text = (ROOT / settings.report).read_text(encoding="utf-8")
    blank = re.sub(f"(<!-- {name}: .* -->\n)[^<]*", r"\1old\n", text)
    assert blank != text
    assert files.filled(blank, name, make(tasks.read(ROOT / settings.results))) == text
