"""The comparison of backends."""

import json

import pytest

from studies.backends import STUDY
from studies.backends import run as compare

pytestmark = pytest.mark.once


def test_backends_are_compared_in_one_table(monkeypatch, tmp_path, capsys):
    def train(name, arguments, options):
        if "bfloat16" in name:
            return "out of memory"
        scores = {"test_accuracy": 0.5, "test_nll": 1.25, "hardware": "a GPU", "python": "3.12"}
        about = {"backend": name.split("-")[0], "versions": {"keras": "3.15"}}
        return {
            "name": name,
            "loss": [2.0, 1.5],
            "kl": [0.5, 3.0],
            **scores,
            **about,
            "command": " ".join(arguments),
        }

    monkeypatch.setattr(compare, "train", train)
    for backend in ("tensorflow", "jax"):
        monkeypatch.setenv("KERAS_BACKEND", backend)
        assert STUDY.main(["--only", "lenet-gaussian", "--results", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("failed: out of memory") == 3
    rows = json.loads((tmp_path / "runs.json").read_text())
    names = ["jax-lenet-gaussian-float32", "tensorflow-lenet-gaussian-float32"]
    assert [row["name"] for row in rows] == [*names, f"{names[1]}-no_jit"]
    assert "--no-jit" in rows[2]["command"]
    cell = "2.000 → 1.500; 3.0; 0.500, 1.250"
    table = (tmp_path / "README.md").read_text()
    assert f"| lenet, gaussian, float32 | {cell} | {cell} | {cell} |" in table
    assert STUDY.main(["--only", "no such run", "--results", str(tmp_path)]) == 2
