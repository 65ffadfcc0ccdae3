"""Run the smoke suite on several versions of Keras and the backends, each in its own environment.

tests/versions.toml says which. The environments are made under .venv-versions/ and kept: they take
2 GB each, and are made anew when their versions or pyproject.toml change. Needs a package index. It
prints a table at the end, and exits with 1 if anything failed; the output is in .log files there.

Examples:
    python scripts/versions.py
    python scripts/versions.py keras-3.12 jax-0.6
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv-versions"
MATRIX = tomllib.loads((ROOT / "tests" / "versions.toml").read_text())
BACKENDS = {"tensorflow": ["tensorflow"], "jax": ["jax"], "both": ["tensorflow", "jax"]}
TOOLS = ["pytest", "pandas", "pillow"]  # what tests/conftest.py imports
SUITE = [
    "tests/whole/test_smoke.py",
    "tests/_core/test_keras_internals.py",
    "tests/whole/test_keras_files.py",
]
PROBE = """
from importlib.metadata import PackageNotFoundError, version
for name in ("keras", "tensorflow", "jax", "tensorflow-probability", "tfp-nightly", "numpy"):
    try:
        print(name, version(name))
    except PackageNotFoundError:
        pass
"""


def main(argv: list[str] | None = None) -> int:
    """Run the suite in the environments that are asked for, and return the exit code."""
    about = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(**about)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {' '.join(MATRIX)}")
    names = parser.parse_args(argv).names or list(MATRIX)
    for name in set(names) - set(MATRIX):
        parser.error(f"tests/versions.toml has no {name!r}; it has {', '.join(MATRIX)}")
    results = [result for name in names for result in tried(name)]
    print("\n| environment | backend | versions | result | minutes |\n|---|---|---|---|---|")
    for *cells, _ in results:
        print(f"| {' | '.join(cells)} |")
    return int(any(failed for *_, failed in results))


def tried(name: str) -> Iterator[tuple[str, str, str, str, str, bool]]:
    """Yield a row of the table for each backend of an environment, and whether it failed."""
    entry, log = MATRIX[name], FOLDER / f"{name}.log"
    print(f"{name}: installing", flush=True)
    if not install(FOLDER / name, entry, log):
        yield name, "-", ", ".join(entry["pins"]), f"not installed, see {log}", "-", True
        return
    python = FOLDER / name / "bin" / "python"
    versions = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, check=True)
    for backend in BACKENDS[entry["extras"].split(",")[0]]:
        log = FOLDER / f"{name}-{backend}.log"
        print(f"{name}: testing on {backend}", flush=True)
        start = time.monotonic()
        options = ["-q", "-p", "no:cacheprovider", "-m", "not install and not slow"]
        command = [python, "-m", "pytest", *options, *SUITE]
        code = run(command, log, env={**os.environ, "KERAS_BACKEND": backend})
        minutes = f"{(time.monotonic() - start) / 60:.1f}"
        last = log.read_text().splitlines()[-1].strip("= ") or f"exit code {code}"
        if code:
            print(log.read_text()[-4000:])
        yield name, backend, ", ".join(versions.stdout.splitlines()), last, minutes, code != 0


def install(folder: Path, entry: dict, log: Path) -> bool:
    """Make an environment, if it is not there as wanted; return whether that worked."""
    what = ["-e", f"{ROOT}[{entry['extras']}]", *entry["pins"], *TOOLS]
    wanted = "\n".join([*what, (ROOT / "pyproject.toml").read_text()])
    stamp = folder / ".installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return True
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    pip = [folder / "bin" / "python", "-m", "pip"]
    steps = [[*pip, "install", "--quiet", "--no-compile", *what], [*pip, "check"]]
    if any(run(step, log) for step in steps):
        return False
    stamp.write_text(wanted)
    return True


def run(command: list, log: Path, **options: dict) -> int:
    """Run a command in the project's folder, with its output in a file; return the exit code."""
    with log.open("w") as file:
        return subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, **options).returncode


if __name__ == "__main__":
    sys.exit(main())
