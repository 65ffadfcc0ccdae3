"""Many runs, one after another or several at once."""

import concurrent.futures
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras

from tfp_ibnn import data
from tfp_ibnn.experiments.run import finished, run
from tfp_ibnn.experiments.settings import Settings

__all__ = ["run_all"]

Say = Callable[[str], None]


def run_all(
    runs: Mapping[str, Settings],
    folder: str | os.PathLike,
    *,
    jobs: int = 1,
    data_dir: str | os.PathLike | None = None,
    say: Say = print,
) -> dict[str, dict[str, Any]]:
    """Train every run in a folder of its own; return what each measured, by name.

    Runs that are finished already are not repeated, and unfinished ones are taken up, so that the
    same call goes on after an interruption.

    Args:
        runs: name to settings. A name may have slashes.
        folder: that holds the runs' folders.
        jobs: processes at once. More than one pays where a run leaves the processor idle, as small
            networks do on a GPU.
        data_dir: where the data is cached.
        say: called with lines of progress.
    """
    folder = Path(folder)
    found = {
        name: metrics
        for name, settings in runs.items()
        if (metrics := finished(settings, folder / name)) is not None
    }
    waiting = {name: settings for name, settings in runs.items() if name not in found}
    for name, metrics in _each(waiting, folder, jobs, data_dir, say):
        found[name] = metrics
        say(f"[{len(found)}/{len(runs)}] {_line(name, metrics)}")
    return {name: found[name] for name in runs}


def _each(
    runs: Mapping[str, Settings],
    folder: Path,
    jobs: int,
    data_dir: str | os.PathLike | None,
    say: Say,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and measurements as the runs end."""
    if min(jobs, len(runs)) <= 1:
        for name, settings in runs.items():
            keras.utils.clear_session()
            yield name, _one(name, settings, folder, data_dir, say)
        return
    for dataset in dict.fromkeys(settings.dataset for settings in runs.values()):
        data.load(dataset, data_dir)  # once, before all processes would fetch it
    # Not forked: TensorFlow and JAX do not survive that.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(jobs, len(runs)), mp_context=context) as pool:
        tasks = {
            pool.submit(_one, name, settings, folder, data_dir, None): name
            for name, settings in runs.items()
        }
        try:
            for task in concurrent.futures.as_completed(tasks):
                yield tasks[task], task.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _one(
    name: str,
    settings: Settings,
    folder: Path,
    data_dir: str | os.PathLike | None,
    say: Say | None,
) -> dict[str, Any]:
    # TensorFlow counts the functions that it traces, and takes one for each run to be a mistake.
    logging.getLogger("tensorflow").setLevel(logging.ERROR)

    def speak(line: str) -> None:
        if say is not None:
            say(f"{name}: {line}")

    return run(settings, folder / name, data_dir, say=speak, keep_models=False)


def _line(name: str, metrics: dict[str, Any]) -> str:
    scores = ", ".join(f"{key} {metrics[key]:.4f}" for key in ("accuracy", "nll", "ece"))
    return f"{name}: {scores}, {sum(metrics['seconds'].values()):.0f} s"
