import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"

pytestmark = pytest.mark.once


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


def run(name, *arguments, folder):
    return subprocess.run(
        [sys.executable, SCRIPTS / name, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
def test_digits_example_writes_what_it_says(eagerly, script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example = script("train_digits")
    some = [part[:128] for part in example.load()]
    monkeypatch.setattr(example, "load", lambda: some)
    arguments = ("--epochs", "2", "--samples", "2", "--seed", "3", "--output", "here")
    example.main(arguments)
    printed = capsys.readouterr().out
    written = printed.split("Written:")[1].split()
    assert len(written) == 3
    assert all((tmp_path / name).stat().st_size > 0 for name in written)
    record = json.loads((tmp_path / "here" / "metrics.json").read_text())
    assert record["options"]["seed"] == 3
    assert list(record["results"]) == ["deterministic", "Gaussian posterior", "flow posterior"]
    for row in record["results"].values():
        assert 0.1 < row["accuracy"] <= 1
        assert f"{row['nll']:.4f}" in printed
        assert f"{row['ece']:.4f}" in printed


@pytest.mark.parametrize("option", ["--epochs", "--samples", "--seed"])
def test_digits_example_names_a_bad_option(script, capsys, option):
    with pytest.raises(SystemExit) as caught:
        script("train_digits").parse([option, "-1"])
    assert caught.value.code == 2
    assert option in capsys.readouterr().err.splitlines()[-1]
