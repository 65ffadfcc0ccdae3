"""Runs a pipeline on this machine, and goes on when one of its processes is killed.

Beam waits for ever for a worker that is gone. So the pipeline runs in a process of its own, which
ends, with all of its workers, as soon as one of them does.
"""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bulk import pipeline, shards

TRIES = 3
"""How often workers may be lost without any shard having been done."""

_LOST = -signal.SIGKILL
"""The exit code when a worker is lost, or the process that waits for them."""


class Failed(RuntimeError):
    """The pipeline ended with an error."""


def run(
    plan: pipeline.Plan,
    remaining: Callable[[], list[shards.Shard]],
    options: list[str],
    say: Callable[[str], Any],
) -> None:
    """Score the shards that remain, until none does.

    Args:
        plan: what to do with each.
        remaining: returns those that are not done.
        options: Beam's.
        say: told of lost workers.

    Raises:
        Failed: If the pipeline fails, or workers are lost again and again.
    """
    todo, lost = remaining(), 0
    while todo:
        code, text = _try(plan, todo, options)
        left = remaining()
        if code == 0 and left:
            raise Failed(f"{len(left)} parts were not written.")
        if code not in (0, _LOST):
            raise Failed(text)
        lost = lost + 1 if len(left) == len(todo) else 0
        if lost == TRIES:
            raise Failed("Workers were lost again and again; is there too little memory?")
        if left:
            say(f"A worker was lost: going on with the {len(left)} parts that are left.")
        todo = left


def _try(plan: pipeline.Plan, todo: list[shards.Shard], options: list[str]) -> tuple[int, str]:
    """Run the pipeline once; return the exit code, and what it said last."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=_child, args=(plan, todo, options, str(log)))
        process.start()
        try:
            process.join()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        lines = log.read_text().strip().splitlines() if log.exists() else []
        return process.exitcode, lines[-1] if lines else f"exit code {process.exitcode}"


def _child(plan: pipeline.Plan, todo: list[shards.Shard], options: list[str], log: str) -> None:
    """Run the pipeline; what it prints goes to a file."""
    os.setpgrp()
    threading.excepthook = _end_all
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    pipeline.run(plan, todo, options)


def _end_all(_: Any) -> None:
    """End this process and its workers, because one of these is lost."""
    os.killpg(0, signal.SIGKILL)
