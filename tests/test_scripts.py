import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


def run(name, *arguments, folder):
    return subprocess.run(
        [sys.executable, SCRIPTS / name, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_digits_example_writes_what_it_says_and_repeats(tmp_path):
    arguments = ("--epochs", "2", "--samples", "2", "--seed", "3")
    results = []
    for output in ("first", "second"):
        done = run("train_digits.py", *arguments, "--output", output, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        written = done.stdout.split("Written:")[1].split()
        assert len(written) == 3
        assert all((tmp_path / name).stat().st_size > 0 for name in written)
        record = json.loads((tmp_path / output / "metrics.json").read_text())
        assert record["options"]["seed"] == 3
        results.append(record["results"])
    assert list(results[0]) == ["deterministic", "Gaussian posterior", "flow posterior"]
    for name, row in results[0].items():
        for key in ("accuracy", "nll", "ece"):
            assert row[key] == pytest.approx(results[1][name][key], rel=1e-4), (name, key)


@pytest.mark.parametrize("option", ["--epochs", "--samples", "--seed"])
def test_digits_example_names_a_bad_option(tmp_path, option):
    done = run("train_digits.py", option, "-1", folder=tmp_path)
    assert done.returncode == 2
    assert option in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_glow_ablation_runs(tmp_path):
    arguments = ("--steps", "5", "--only", "as shipped", "no remedy", "--output", "glow")
    done = run("glow_ablation.py", *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    variants = json.loads((tmp_path / "glow" / "glow_ablation.json").read_text())["variants"]
    assert abs(variants["as shipped"]["start"]["kl"]) < 1e-2
    assert variants["no remedy"]["start"]["kl"] > 100
