r"""Runs the fuzzer of legal models: many seeds, in several processes.

`scripts/robustness.py --only legal` calls it. Each worker is a process that tries a block of seeds
and writes a line of JSON for each, so that a crash or a hang costs one seed.
"""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

__all__ = ["campaign"]

BLOCK = 40
"""How many seeds a process tries before a fresh one takes its place."""

SECONDS = 300
"""A seed that takes longer counts as hung."""

SETTINGS = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "-1",
    # On JAX most of the time goes into compiling: do not optimize, and share what is compiled.
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
    "JAX_COMPILATION_CACHE_DIR": str(Path(tempfile.gettempdir()) / "legal_models_compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
"""Of the processes, where the environment has no other."""

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "NPROC"), "1")

SCRIPTS = Path(__file__).parents[2]


def campaign(first: int, models: int, workers: int, say: Any = print) -> dict[str, Any]:
    """Try models with the seeds from `first` on; return what came of them.

    Args:
        first: the first seed.
        models: how many.
        workers: processes at once.
        say: told of every fault, and from time to time how it goes.

    Returns:
        A dict with `checks`, a count of outcomes by check; `refused`, a count by reason; `faults`,
        a list of dicts with seed, check, kind, text and program; `seconds` and `models`.
    """
    begin, told = time.monotonic(), queue.SimpleQueue()
    blocks = queue.SimpleQueue()
    for start in range(first, first + models, BLOCK):
        blocks.put((start, min(start + BLOCK, first + models)))
    threads = [threading.Thread(target=_work, args=(blocks, told)) for _ in range(workers)]
    for thread in threads:
        thread.start()
    summary = Summary()
    last = begin
    while summary.done < models:
        summary.add(told.get(), say)
        if time.monotonic() - last > 30:
            last = time.monotonic()
            say(f"legal models: {summary.done:,} of {models:,}, {len(summary.faults)} faults")
    for thread in threads:
        thread.join()
    seconds = round(time.monotonic() - begin)
    return {**summary.result(), "first": first, "models": models, "seconds": seconds}


class Summary:
    """Counts outcomes."""

    def __init__(self) -> None:
        self.done, self.faults = 0, []
        self.checks: dict[str, Counter] = {}
        self.refused: Counter = Counter()

    def add(self, report: dict[str, Any], say: Any) -> None:
        """Count what came of one seed."""
        self.done += 1
        for check, outcome in report["outcomes"].items():
            self.checks.setdefault(check, Counter())[outcome] += 1
        self.refused.update(report["refused"])
        for fault in report["faults"]:
            self.faults.append({"seed": report["seed"], **fault})
            say(f"FAULT seed {report['seed']}, {fault['check']}: {fault['text']}")
            say("\n".join(f"    {line}" for line in fault["program"].splitlines()))

    def result(self) -> dict[str, Any]:
        """Return all counts."""
        checks = {name: dict(counts) for name, counts in sorted(self.checks.items())}
        refused = dict(self.refused.most_common())
        return {"checks": checks, "refused": refused, "faults": self.faults}


def table(result: dict[str, Any]) -> list[str]:
    """Return the counts as lines to print."""
    outcomes = ("passed", "inapplicable", "refused", "failed")
    rows = [f"| check | {' | '.join(outcomes)} |", "|---|---|---|---|---|"]
    for check, counts in result["checks"].items():
        rows.append(f"| {check} | {' | '.join(str(counts.get(x, 0)) for x in outcomes)} |")
    rows += ["", "Refused in words:"]
    return rows + [f"{count:6} {reason}" for reason, count in result["refused"].items()]


def _work(blocks: queue.SimpleQueue, told: queue.SimpleQueue) -> None:
    """Try blocks of seeds in processes, until none is left."""
    while True:
        try:
            first, last = blocks.get_nowait()
        except queue.Empty:
            return
        while first < last:
            first = _try_block(first, last, told)


def _try_block(first: int, last: int, told: queue.SimpleQueue) -> int:
    """Try seeds in one process; return the first that is left."""
    command = [sys.executable, "-m", "lib.legal_models.worker", str(first), str(last)]
    path = os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**SETTINGS, **os.environ, **ONE_THREAD}
    process = subprocess.Popen(
        command,
        env={**environment, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    watch = threading.Timer(SECONDS, process.kill)
    watch.start()
    for line in process.stdout:
        watch.cancel()
        watch = threading.Timer(SECONDS, process.kill)
        watch.start()
        told.put(json.loads(line))
        first += 1
    watch.cancel()
    process.wait()
    if first < last:
        text = f"The process ended with {process.returncode}, or hung."
        fault = {"check": "process", "kind": "crash", "text": text, "program": ""}
        outcomes = {"process": "failed"}
        told.put({"seed": first, "outcomes": outcomes, "refused": [], "faults": [fault]})
        first += 1
    return first
