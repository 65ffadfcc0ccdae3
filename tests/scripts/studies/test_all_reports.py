"""The report of each study shows the tables of its stored runs."""

import importlib
import re
from pathlib import Path

import pytest

import study
from lib import files, tasks
from studies.command import Study

ROOT = Path(__file__).parents[3]


def settings_of(name):
    return importlib.import_module(f"studies.{name}").STUDY


STORED = [name for name in study.studies() if isinstance(settings_of(name), Study)]
"""The studies that keep their runs; others measure times, or compare with other packages."""


@pytest.mark.once
@pytest.mark.parametrize("name", STORED)
def test_the_report_shows_the_stored_runs(name):
    settings = settings_of(name)
    make = importlib.import_module(f"studies.{name}.tables").tables
    text = (ROOT / settings.report).read_text(encoding="utf-8")
    blank = re.sub(f"(<!-- {name}: .* -->\n)[^<]*", r"\1old\n", text)
    assert blank != text
    assert files.filled(blank, name, make(tasks.read(ROOT / settings.results))) == text
