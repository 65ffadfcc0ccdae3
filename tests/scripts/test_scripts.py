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


def test_every_ablation_lacks_what_it_says(script):
    glow = script("studies.glow.run")
    kl = {}
    for name, variant in glow.VARIANTS.items():
        posterior = glow.posterior(variant)
        posterior.build((None, 8))
        kl[name] = float(posterior.summary().kl.__array__().mean())
    starts_at_zero = {
        "as shipped",
        "unbounded log-scales",
        "free matrix",
        "entries not enlarged",
        "not enlarged, unbounded",
    }
    assert {name for name, value in kl.items() if abs(value) < 1e-3} == starts_at_zero


@pytest.mark.slow
def test_ablation_runs(tmp_path):
    arguments = ("--steps", "5", "--only", "as shipped", "no remedy", "--output", "glow")
    done = run("study.py", "glow", *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    variants = json.loads((tmp_path / "glow" / "glow_ablation.json").read_text())["variants"]
    assert abs(variants["as shipped"]["start"]["kl"]) < 1e-2
    assert variants["no remedy"]["start"]["kl"] > 100


def test_backends_are_compared_in_one_table(script, monkeypatch, tmp_path, capsys):
    compare = script("studies.backends.run")

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
        assert compare.main(["--only", "lenet-gaussian", "--results", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("failed: out of memory") == 3
    rows = json.loads((tmp_path / "runs.json").read_text())
    names = ["jax-lenet-gaussian-float32", "tensorflow-lenet-gaussian-float32"]
    assert [row["name"] for row in rows] == [*names, f"{names[1]}-no_jit"]
    assert "--no-jit" in rows[2]["command"]
    cell = "2.000 → 1.500; 3.0; 0.500, 1.250"
    table = (tmp_path / "README.md").read_text()
    assert f"| lenet, gaussian, float32 | {cell} | {cell} | {cell} |" in table
    assert compare.main(["--only", "no such run", "--results", str(tmp_path)]) == 2
