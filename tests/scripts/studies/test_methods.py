"""The study of all methods: its scores, its tables, and a run from end to end."""

import re
from pathlib import Path

import numpy as np
import pytest

from lib import tasks
from studies.methods import STUDY
from studies.methods import run as study
from studies.methods import tables as method_tables

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[3]


def test_a_temperature_is_found_again():
    random = np.random.default_rng(0)
    logits = random.normal(size=(20_000, 4))
    p = study.scaled(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True), 1.0)
    y = (random.random((len(p), 1)) > p.cumsum(-1)).sum(-1).clip(max=3)
    sharp = study.scaled(p, 0.4)
    assert study.best_temperature(sharp, y) == pytest.approx(2.5, rel=0.03)
    assert study.nll(study.scaled(sharp, 2.5), y) == pytest.approx(study.nll(p, y))


def test_the_tables_are_those_of_the_stored_runs(tmp_path):
    text, copy = (ROOT / STUDY.report).read_text(), tmp_path / "page.md"
    (tmp_path / "runs.jsonl").write_bytes((ROOT / STUDY.results / "runs.jsonl").read_bytes())
    copy.write_text(re.sub("(<!-- methods: .* -->\n)[^<]*", r"\1old\n", text))
    assert copy.read_text() != text
    tasks.write_tables(tmp_path, "methods", method_tables.tables(tasks.read(tmp_path)), copy)
    assert copy.read_text() == text


@pytest.mark.parametrize("pair", ["fashion_lenet", "cifar_lenet", "cifar_vgg16"])
def test_every_task_of_a_stored_pair_was_run_once(pair):
    records = tasks.read(ROOT / STUDY.results)
    found = sorted((x["seed"], x["group"]) for x in records if x["pair"] == pair)
    groups = [group for group in study.TASKS if group != "features" or pair == "cifar_vgg16"]
    assert found == sorted((seed, group) for seed in range(3) for group in groups)


def test_a_pair_that_was_not_run_says_so():
    assert method_tables.table([], "digits").startswith("Not run yet: digits")


def test_a_pair_must_be_known(capsys):
    with pytest.raises(SystemExit):
        STUDY.main(["--pairs", "nonsense"])
    assert "--pairs must be some of fashion_lenet" in capsys.readouterr().err


@pytest.mark.slow
def test_a_quick_run_is_stored_and_not_repeated(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tasks, "apart", lambda function, *task: function(*task))
    command = ["--quick", "--pairs", "digits", "--seeds", "0", "--output", str(tmp_path)]
    assert STUDY.main(command) == 0
    records = tasks.read(tmp_path)
    assert ["features", *(record["group"] for record in records)] == study.TASKS
    for record in records:
        for row in record["methods"].values():
            assert np.isfinite(row["NLL"])
    assert STUDY.main(command) == 0
    assert "0 runs to do, 13 are there" in capsys.readouterr().out
