"""Many runs, one after another or several at once."""

import concurrent.futures
import contextlib
import logging
import multiprocessing
from pathlib import Path
from typing import Any, NamedTuple

import keras

from lib import data, robustness
from lib.folder import RecordError, RunError, RunFolder, read_record
from lib.run import identity, run
from lib.settings import Settings

NOT_RUN = "not run"  # why something is missing that was not tried


def run_many(
    runs,
    folder,
    *,
    evaluations=None,
    keep_models=False,
    train=True,
    missing=None,
    jobs=1,
    **options,
):
    """Train every run, name to settings, in a folder of its own; return what each measured.

    Runs that are finished already are not repeated, and unfinished ones resume. A run that fails,
    or whose files are damaged, does not stop the others: `missing` gets the names of what was not
    run or failed, and why; without it a RunError is raised at the end. With `train=False` only what
    is finished is returned.

    `evaluations`, by the run's name and that of a folder in the run's, are what its model is
    evaluated on in addition to the test: what the run measured holds their rows, without those that
    failed. Such models are kept, those of other runs with `keep_models`. More
    than one of `jobs`, processes at once, pay for small networks on a GPU. The options are
    `data_dir` and `log`, called with lines of progress.
    """
    log, found, failed = options.pop("log", print), {}, {}
    tasks, shifts = {}, evaluations or {}
    for name, settings in runs.items():
        more = (shifts.get(name, {}), keep_models)
        tasks[name] = Task(name, settings, Path(folder), *more, **options)

    def fail(name, error):
        failed[name] = str(error)
        log(f"{name} failed: {error}")

    for name, task in tasks.items():
        try:
            metrics = task.measured()
        except RecordError as error:
            fail(name, error)
            continue
        if metrics is not None and not (train and task.left(metrics)):
            found[name] = metrics
    done = found.keys() | failed.keys()
    waiting = [task for name, task in tasks.items() if train and name not in done]
    for name, outcome in _each(waiting, jobs, log):
        if isinstance(outcome, RunError):
            fail(name, outcome)
            with contextlib.suppress(RecordError):
                outcome = tasks[name].measured()
        if isinstance(outcome, dict):
            found[name] = outcome
            scores = ", ".join(f"{key} {outcome[key]:.4f}" for key in ("accuracy", "nll", "ece"))
            scores += f", {sum(outcome['seconds'].values()):.0f} s"
            log(f"[{len(found)}/{len(runs)}] {name}: {scores}")
    if missing is None and failed:
        name, why = next(iter(failed.items()))
        raise RunError(f"{len(failed)} of {len(runs)} runs failed. {name}: {why}")
    for name, task in tasks.items() if missing is not None else ():
        if name in found:
            why = failed.get(name, NOT_RUN)
            missing |= {f"{name}/{part}": why for part in task.left(found[name])}
        else:
            missing[name] = failed.get(name) or task.failure() or NOT_RUN
    return {name: found[name] for name in runs if name in found}


class Task(NamedTuple):
    """A run, and where it goes."""

    name: str
    settings: Settings
    runs: Path
    evaluations: dict[str, robustness.Settings]
    keep_models: bool = False
    data_dir: Any = None

    @property
    def folder(self):
        return self.runs / self.name

    def measured(self):
        """Return what the finished run measured, with the evaluations that are finished."""
        folder, done = self._kept(), {}
        if folder is None or (metrics := folder.metrics) is None:
            return None
        for name, settings in self.evaluations.items():
            path = self.folder / name / "robustness.json"
            if path.exists():
                record = read_record(path)
                if not record.keys() >= {"options", "rows"}:
                    raise RecordError(f"{path} is not the record of an evaluation: remove it.")
                if record["options"] != settings.as_dict():
                    raise RunError(f"{path} is of another evaluation: choose another folder.")
                done[name] = record["rows"]
        return {**metrics, "evaluations": done}

    def failure(self):
        return (folder := self._kept()) and folder.failure

    def _kept(self):
        return RunFolder(self.folder, identity(self.settings)) if self.folder.exists() else None

    def left(self, metrics):
        return [name for name in self.evaluations if name not in metrics["evaluations"]]

    def run(self, log=lambda line: None):
        """Do what is left, and return what was measured, or the RunError."""
        # TensorFlow counts the functions that it traces, and takes one for each run for a mistake.
        logging.getLogger("tensorflow").setLevel(logging.ERROR)
        options = {"data_dir": self.data_dir, "log": lambda line: log(f"{self.name}: {line}")}
        keep = self.keep_models or bool(self.evaluations)
        try:
            run(self.settings, self.folder, keep_models=keep, export=False, **options)
            for name in self.left(self.measured()):
                model = self.folder / "model.keras"
                if not model.exists():
                    raise RunError(f"{model} is gone: remove the run's folder to evaluate it.")
                robustness.evaluate(model, self.evaluations[name], self.folder / name, **options)
            return self.measured()
        except RunError as error:
            return error


def _each(tasks, jobs, log):
    if min(jobs, len(tasks)) <= 1:
        for task in tasks:
            keras.utils.clear_session()
            log(f"{task.name}: begins")
            yield task.name, task.run(log)
        return
    # Once, before all processes would fetch it.
    for task in tasks:
        shifts = [settings.foreign for settings in task.evaluations.values()]
        for name in {task.settings.dataset, *sum(shifts, ())} & data.DATASETS.keys():
            data.load(name, task.data_dir)
    # Not forked: TensorFlow and JAX do not survive that.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context) as pool:
        futures = {pool.submit(task.run): task.name for task in tasks}
        try:
            for future in concurrent.futures.as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
