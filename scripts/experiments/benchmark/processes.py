"""What is measured in processes of its own: memory in training, and the time of an import."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.benchmark import timing
from experiments.benchmark.networks import KINDS
from experiments.benchmark.record import Row, row
from experiments.benchmark.settings import Settings

__all__ = ["child", "environment_with", "import_time", "memory_in_training"]

_PACKAGE = "experiments.benchmark"
_SCRIPTS = str(Path(__file__).parents[2])
_MEBI = 2**20
_LIMIT_SECONDS = 900

# Memory that is freed goes back to the system at once, so that the peak is of what is in use.
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}

# TensorFlow Probability loads its parts when they are first used; that is not ours to answer for.
_IMPORT = """
import time, keras
if keras.backend.backend() == "tensorflow":
    import tensorflow_probability as tfp
else:
    from tensorflow_probability.substrates import jax as tfp
tfp.distributions.Normal, tfp.bijectors.Chain
began = time.perf_counter()
import tfp_ibnn
print(time.perf_counter() - began)
"""


def memory_in_training(settings: Settings) -> Iterator[Row]:
    """Measure the peak memory of training VGG16 with batches of 32, each case in a process."""
    cases = {"deterministic": ("none", "channel")}
    targets = {"channel": 1.15, "position": 1.6}
    for noise in targets:
        cases |= {f"memory.{noise}.{kind}": (kind, noise) for kind in KINDS}
    count = 2 if settings.rounds < 12 else 3
    found = {name: [] for name in cases}
    for number in range(count):
        for name, (kind, noise) in cases.items():
            seed = settings.seed + number
            found[name].append(child("memory", kind, noise, seed, environment=_GIVE_BACK))
    plain = found.pop("deterministic")
    for name, runs in found.items():
        kind, noise = cases[name]
        whole = timing.ratio([run["peak"] for run in runs], [run["peak"] for run in plain])
        yield row(
            name,
            f"VGG16 memory in training, {KINDS[kind]}, {noise} noise",
            timing.ratio(_growths(runs), _growths(plain)),
            targets[noise],
            whole_process=round(whole["ratio"], 4),
            mebibytes={
                "growth": round(min(_growths(runs)) / _MEBI, 1),
                "growth_deterministic": round(min(_growths(plain)) / _MEBI, 1),
                "peak": round(min(run["peak"] for run in runs) / _MEBI, 1),
                "peak_deterministic": round(min(run["peak"] for run in plain) / _MEBI, 1),
            },
        )


def _growths(runs: list[dict[str, int]]) -> list[int]:
    return [run["peak"] - run["before"] for run in runs]


def import_time(settings: Settings) -> Iterator[Row]:
    """Time `import tfp_ibnn` in processes that have imported Keras and TFP already."""
    times = [float(_run([sys.executable, "-c", _IMPORT])) for _ in range(6)]
    yield row("imports", "import tfp_ibnn, after Keras and TFP", timing.smallest(times), 0.2, "s")


def child(module: str, *arguments: Any, environment: dict[str, str] | None = None) -> Any:
    """Run a module of this package in a process of its own; return what it prints as JSON."""
    command = [sys.executable, "-m", f"{_PACKAGE}.{module}", *map(str, arguments)]
    return json.loads(_run(command, environment))


def environment_with(more: dict[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a process that imports this package."""
    path = os.pathsep.join(filter(None, [_SCRIPTS, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **(more or {})}


def _run(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Return the last line that a command prints, or raise `RuntimeError` if it fails."""
    name = "A process" if command[1] == "-c" else " ".join(command[1:])
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            env=environment_with(environment),
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{name} took longer than {_LIMIT_SECONDS} s.") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise RuntimeError(f"{name} failed ({done.returncode}): {last}")
    return done.stdout.strip().splitlines()[-1]
