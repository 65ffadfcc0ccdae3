"""`--help` is answered before what takes seconds to import."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLOW = {"jax", "keras", "tensorflow", "tensorflow_probability", "tf_keras"}
SCRIPTS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("scripts/*.py"))
PACKAGE = ("-m tfp_ibnn", "-m tfp_ibnn calibrate")

pytestmark = pytest.mark.once


def run(command):
    """Run Python in the repository; return the process, and the slow packages it imported."""
    words = [sys.executable, "-X", "importtime", *command.split()]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    # A line of an import ends with the module, after its times.
    imported = re.findall(r"^import time:.*\| +([\w.]+)$", done.stderr, flags=re.MULTILINE)
    return done, SLOW & set(imported)


@pytest.mark.parametrize("command", [*PACKAGE, *SCRIPTS])
def test_help_imports_nothing_slow(command):
    done, imported = run(f"{command} --help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
    assert imported == set()


def test_a_wrong_option_is_answered_before_slow_imports():
    done, imported = run("-m tfp_ibnn calibrate model.keras data.npz")
    assert (done.returncode, imported) == (2, set())
    assert "the following arguments are required: --output" in done.stderr


def test_imports_are_seen():
    code = "import tfp_ibnn; print(tfp_ibnn.calibrate.__name__)"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "calibrate\n"
    assert re.search(r"^import time:.*\| +keras$", done.stderr, flags=re.MULTILINE)
