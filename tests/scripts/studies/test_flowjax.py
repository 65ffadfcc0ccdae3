"""The comparison of densities with FlowJAX's."""

import importlib
import os
import re
from pathlib import Path

import pytest

from lib import files, tasks
from studies.density import run as density
from studies.flowjax import tables

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[3]


def test_the_table_of_peers():
    def row(seed, ours, peer):
        both = {"ours": ours, "peer": peer}
        both = {key: {"log-likelihood": nats, **speed} for key, nats in both.items()}
        return {"pair": "rings", "seed": seed, "group": "8 affine couplings", **both}

    speed = {"parameters": 1045, "milliseconds": 1.234, "seconds": 8.0}
    found = tables.tables([row(0, -2.6, -2.7), row(1, -2.8, -2.7)])["peers"]
    assert "| ours | - | -2.700 ± 0.141 | - | - | 1,045 | 1.23 | 8 |" in found
    assert "| FlowJAX | - | -2.700 ± 0.000 | - | - | 1,045 | 1.23 | 8 |" in found
    assert tables.tables([])["peers"] == "Not run yet."


def test_flowjax_has_the_flows_that_are_compared(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", os.environ.get("KERAS_BACKEND", "tensorflow"))
    run = importlib.import_module("studies.flowjax.run")
    text = run.PEER.read_text()
    assert all(f'"{flow}"' in text for flow in run.FLOWS)
    assert set(run.FLOWS) <= density.FLOWS.keys()


def test_the_report_shows_the_stored_runs():
    found = tables.tables(tasks.read(ROOT / "results" / "density", "peers.jsonl"))
    text = (ROOT / "results" / "density" / "README.md").read_text()
    blank = re.sub("(<!-- flowjax: .* -->\n)[^<]*", r"\1old\n", text)
    assert blank != text
    assert files.filled(blank, "flowjax", found) == text
