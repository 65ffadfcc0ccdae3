"""One training run, from the data to the report."""

import csv
import hashlib
import importlib.util
import json
import math
import os
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfp_ibnn import data, models
from tfp_ibnn._core import backend, files
from tfp_ibnn.conversion import to_stochastic
from tfp_ibnn.experiments.devices import Devices
from tfp_ibnn.experiments.folder import RunError, RunFolder
from tfp_ibnn.experiments.foreign import by_class
from tfp_ibnn.experiments.interrupts import Interrupts
from tfp_ibnn.experiments.provenance import provenance
from tfp_ibnn.experiments.report import write_report
from tfp_ibnn.experiments.saved import read_model
from tfp_ibnn.experiments.scanned import can_scan, scanned
from tfp_ibnn.experiments.scoring import Scorer, Scores
from tfp_ibnn.experiments.settings import Settings, Stage
from tfp_ibnn.layers import freeze, stochastic_layers
from tfp_ibnn.training import KLAnnealing, PosteriorLog, two_speed
from tfp_ibnn.training.checkpoint import Checkpoint, CheckpointError
from tfp_ibnn.training.nonfinite import NonFiniteError, TerminateOnNonFinite

__all__ = ["finished", "identity", "run"]

Arrays = tuple[np.ndarray, np.ndarray]
Say = Callable[[str], None]

# The images held out are the same in all runs, whatever their seed.
_SPLIT_SEED = 0


def run(
    settings: Settings,
    output: str | os.PathLike,
    data_dir: str | os.PathLike | None = None,
    *,
    say: Say = print,
    keep_models: bool = True,
    devices: Devices | None = None,
) -> dict[str, Any]:
    """Train, test and report; return what `metrics.json` holds.

    The folder gets, as it goes along, `settings.json`, `training.csv`, TensorBoard events and
    a checkpoint every `log_every` epochs; at the end `metrics.json`, `probabilities.npz`, figures,
    the model as `model.keras` and as a SavedModel, and a model card; or `failure.txt`, if
    training fails. If the folder holds an unfinished run of these settings, it is taken up where it
    stopped; if a finished one, nothing is done.

    Args:
        settings: what to do.
        output: folder of the run.
        data_dir: where the data is cached, see `ibnn.data.load`.
        say: called with lines of progress.
        keep_models: write the model files too.
        devices: where to train, see `devices_for`; None is one device. If several processes train
            together, the first one writes, tests and says; the others return an empty dict.

    Raises:
        RunError: if the folder belongs to something else, its checkpoint is damaged, or training
            diverges.
        DataError: if the data cannot be had.
    """
    devices = devices or Devices()
    if not devices.is_first:
        say = _silently
    known = {**identity(settings), **devices.identity}
    ours = json.dumps(known, sort_keys=True)
    if devices.from_first(lambda: ours) != ours:
        raise RunError("The processes have different settings: start all with the same command.")
    metrics = devices.from_first(lambda: RunFolder(output, known).metrics)
    if metrics is not None:
        say(f"{output}: finished already.")
        return metrics
    folder = RunFolder(output, known, check=False)
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(settings.precision)
    try:
        with folder:
            return _run(settings, folder, data_dir, say, keep_models, devices)
    finally:
        keras.config.set_dtype_policy(policy)


def finished(settings: Settings, output: str | os.PathLike) -> dict[str, Any] | None:
    """Return what a finished run of these settings measured, or None if there is none.

    Raises:
        RunError: if the folder belongs to something else.
    """
    if not Path(output).exists():
        return None
    return RunFolder(output, identity(settings)).metrics


def identity(settings: Settings) -> dict[str, Any]:
    """Return what a run is known by: its settings, with the content of the files they name."""
    files = {"pretrained": settings.pretrained}
    if settings.is_stochastic and settings.posterior not in models.POSTERIORS:
        files["posterior"] = settings.posterior
    try:
        content = {
            f"{name}_sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest()
            for name, path in files.items()
            if path is not None
        }
    except OSError as error:
        raise RunError(f"{error.filename} cannot be read: {error.strerror}.") from error
    return {**settings.as_dict(), **content, "backend": backend.NAME}


def _run(
    settings: Settings,
    folder: RunFolder,
    data_dir: str | os.PathLike | None,
    say: Say,
    keep_models: bool,
    devices: Devices,
) -> dict[str, Any]:
    train, test = _arrays(settings, data_dir)
    devices.check_batch(min(settings.batch_size, len(train[0])))
    # Each stage begins from the seed, so that a run taken up in the second one draws the same.
    keras.utils.set_random_seed(settings.seed)
    try:
        with devices.building():
            model = _network(settings, train[0])
            # A pattern that matches no layer is found now, not after the pretraining.
            _stochastic(model, settings, len(train[0]))
    except ValueError as error:
        raise RunError(str(error)) from error
    devices.from_first(folder.claim)
    times = {}
    for stage in settings.stages():
        if stage.name == "training":
            keras.utils.set_random_seed(settings.seed)
            with devices.building():
                model = _stochastic(model, settings, len(train[0]))
        times[stage.name] = _fit(model, settings, stage, train, test, folder, say, devices)
    if devices.is_first:
        model = devices.on_one(model)
    devices.leave()
    if not devices.is_first:
        return {}
    began = time.perf_counter()
    scorer = Scorer(model, settings.samples, settings.seed)
    try:
        scores = scorer.score(*test)
        found = scores.summary()
    except ValueError as error:
        raise RunError(
            f"The network predicts nonsense: training has diverged ({error})."
        ) from error
    times["testing"] = time.perf_counter() - began
    metrics = {
        **found,
        "tested_on": "validation" if settings.validation else "test",
        "method": _method(settings, scorer),
        "train_size": len(train[0]),
        "test_size": len(test[0]),
        "parameters": model.count_params(),
        "devices": devices.count,
        "seconds": {name: round(seconds, 1) for name, seconds in times.items()},
        **provenance(settings.as_dict()),
    }
    say(scores.line())
    _write(folder, metrics, scores, scorer, test, keep_models, say)
    return metrics


def _silently(line: str) -> None:
    """Say nothing: the first process does."""


def _method(settings: Settings, scorer: Scorer) -> str:
    """Return the method's name; a network that was read may have dropout of its own."""
    if settings.is_stochastic:
        return settings.method
    return "deterministic" if scorer.monte_carlo is None else "mc_dropout"


def _arrays(settings: Settings, data_dir: str | os.PathLike | None) -> tuple[Arrays, Arrays]:
    """Return what to train on and what to test on."""
    (x, y), test = data.load(settings.dataset, data_dir)
    if settings.classes is not None:
        (x, y), _ = by_class(x, y, settings.classes)
        test, _ = by_class(*test, settings.classes)
    if settings.limit is not None:
        x, y = x[: settings.limit], y[: settings.limit]
        test = tuple(part[: settings.limit] for part in test)
    if not settings.validation:
        return (x, y), test
    return data.validation_split(x, y, settings.validation, seed=_SPLIT_SEED)


def _network(settings: Settings, images: np.ndarray) -> keras.Model:
    if settings.pretrained is not None:
        model = read_model(Path(settings.pretrained), settings.dataset, settings.classes)
        if stochastic_layers(model):
            raise RunError(f"{settings.pretrained} has a posterior: give a deterministic network.")
        if settings.posterior in models.POSTERIORS and model.name != settings.network()[0]:
            raise RunError(
                f"{settings.pretrained} is {model.name!r}, not {settings.model!r}: say which "
                "`model` it is, or give the posteriors of its layers in a file."
            )
        if settings.precision not in {layer.dtype_policy.name for layer in model.layers}:
            raise RunError(f"{settings.pretrained} does not compute in {settings.precision}.")
        return model
    name, options = settings.network()
    # Four pixels for 32, the custom for CIFAR-10, and in proportion for others.
    padding = max(1, images.shape[1] // 8)
    front = data.preprocessing(
        images, augment=settings.augments, padding=padding, seed=settings.seed
    )
    classes = settings.classes or len(data.DATASETS[settings.dataset].classes)
    return getattr(models, name)(
        images.shape[1:], classes, preprocessing=front, dropout=settings.dropout, **options
    )


def _stochastic(model: keras.Model, settings: Settings, train_size: int) -> keras.Model:
    """Return a copy with the posteriors of the settings, or the model itself without any."""
    if not settings.is_stochastic:
        return model
    plain = settings.deterministic_layers
    if plain is not None and not any(re.fullmatch(plain, layer.name) for layer in model.layers):
        raise ValueError(f"`deterministic_layers` {plain!r} matches no layer of {model.name}.")
    copy = to_stochastic(
        model,
        settings.posteriors(),
        train_size,
        noise=settings.noise,
        kl_reduction=settings.kl_reduction,
        train_samples=settings.train_samples,
        seed=settings.seed,
    )
    if settings.freeze_network:
        freeze(copy, "deterministic")
    return copy


def _fit(
    model: keras.Model,
    settings: Settings,
    stage: Stage,
    train: Arrays,
    test: Arrays,
    folder: RunFolder,
    say: Say,
    devices: Devices,
) -> float:
    """Train a model to the end of a stage; return the seconds that it took, over all parts."""
    batches = data.ShuffledBatches(
        *train, settings.batch_size, settings.seed, drop_remainder=True, shard=devices.shard
    )
    with devices.building():
        model.compile(
            _optimizer(model, settings, stage, stage.epochs * len(batches)),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=devices.jit_compile,
        )
        # TensorFlow would trace the first step twice for an optimizer without variables.
        model.optimizer.build(model.trainable_variables)
    due = _Due(settings.log_every, stage.epochs)
    checkpoint = _Checkpoint(folder / f"{stage.name}.npz", due)
    try:
        done = devices.restore(checkpoint, model)
    except CheckpointError as error:
        raise RunError(str(error)) from error
    history = folder / f"{stage.name}.csv"
    if done and devices.is_first:
        # A run that was killed right after its checkpoint lacks a line here.
        _write_history(checkpoint, history)
    if 0 < done < stage.epochs:
        say(f"{stage.name}: going on after epoch {done} of {stage.epochs}.")
    # Before all that saves: of a run that has diverged nothing is kept.
    guard = TerminateOnNonFinite(every=None, raises=True)
    interrupts = Interrupts()
    callbacks: list[keras.callbacks.Callback] = [interrupts, batches.follow(), guard, _Clock()]
    if stochastic_layers(model):
        if settings.kl_warmup:
            callbacks.append(KLAnnealing(settings.kl_warmup))
        callbacks.append(_PosteriorLog(due))
    if devices.is_first:
        if settings.evaluate_every:
            callbacks.append(_Evaluation(settings, test, devices))
        callbacks += [checkpoint, _Log(checkpoint, history, stage, say)]
        # Keras writes TensorBoard's files with TensorFlow, whichever backend computes.
        if all(importlib.util.find_spec(name) for name in ("tensorflow", "tensorboard")):
            callbacks.append(keras.callbacks.TensorBoard(folder / f"tensorboard/{stage.name}"))
    if done < stage.epochs:
        try:
            # One device only: on several, Keras deals out each batch by itself.
            jit = devices.jit_compile is not False
            one_call = jit and devices.count == 1 and can_scan(batches)
            in_one_call = scanned(model, batches) if one_call else nullcontext()
            with interrupts, devices.training(), in_one_call:
                model.fit(
                    batches,
                    shuffle=False,
                    epochs=stage.epochs,
                    initial_epoch=done,
                    callbacks=callbacks,
                    verbose=0,
                )
        except NonFiniteError as error:
            raise RunError(
                f"{stage.name} diverged: {error} Try a smaller learning rate."
            ) from error
    return sum(row["seconds"] for row in checkpoint.logs)


def _optimizer(
    model: keras.Model, settings: Settings, stage: Stage, steps: int
) -> keras.optimizers.Optimizer:
    rate = _rate(stage.learning_rate, settings, stage, steps)
    decay = settings.weight_decay or None
    if stage.optimizer == "adam":
        optimizer = keras.optimizers.Adam(rate, weight_decay=decay)
    else:
        nesterov = stage.optimizer == "nesterov"
        optimizer = keras.optimizers.SGD(rate, 0.9, nesterov=nesterov, weight_decay=decay)
    if not stochastic_layers(model):
        return optimizer
    stochastic = settings.stochastic_learning_rate or stage.learning_rate
    if settings.warmup_epochs:  # `two_speed` cannot scale a schedule that begins at 0
        stochastic = _rate(stochastic, settings, stage, steps)
    return two_speed(optimizer, stochastic)


def _rate(
    rate: float, settings: Settings, stage: Stage, steps: int
) -> float | keras.optimizers.schedules.LearningRateSchedule:
    """Return a learning rate as the settings have it change over the steps of a stage."""
    cosine = keras.optimizers.schedules.CosineDecay
    if settings.warmup_epochs:
        rising = steps // stage.epochs * settings.warmup_epochs
        # With alpha 1 the cosine is flat.
        alpha = 0.0 if settings.schedule == "cosine" else 1.0
        return cosine(0.0, max(1, steps - rising), alpha, warmup_target=rate, warmup_steps=rising)
    return cosine(rate, steps) if settings.schedule == "cosine" else rate


class _Due:
    """Tells the epochs, counted from 0, at whose end what costs time is done."""

    def __init__(self, every: int, epochs: int) -> None:
        self.every, self.epochs = every, epochs

    def __call__(self, epoch: int) -> bool:
        return (epoch + 1) % self.every == 0 or epoch + 1 == self.epochs


class _Checkpoint(Checkpoint):
    """Writes the file at some epochs only, but keeps the history of all."""

    def __init__(self, path: Path, due: _Due) -> None:
        super().__init__(path)
        self.due = due

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self.due(epoch):
            super().on_epoch_end(epoch, logs)
            return
        row = {key: float(value) for key, value in logs.items()}
        finite = {key: value for key, value in row.items() if math.isfinite(value)}
        self.logs = [*self.logs[:epoch], finite]


class _PosteriorLog(PosteriorLog):
    """Logs the posteriors at some epochs only."""

    def __init__(self, due: _Due) -> None:
        super().__init__()
        self.due = due

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self.due(epoch):
            super().on_epoch_end(epoch, logs)


class _Clock(keras.callbacks.Callback):
    """Logs the seconds of each epoch, the first one's compilation included."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.last = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        now = time.perf_counter()
        logs["seconds"], self.last = now - self.last, now


class _Evaluation(keras.callbacks.Callback):
    """Logs the scores of the averaged prediction every few epochs."""

    def __init__(self, settings: Settings, test: Arrays, devices: Devices) -> None:
        super().__init__()
        self.settings, self.test, self.devices = settings, test, devices

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        model = self.devices.on_one(self.model)
        with self.devices.alone():
            self.scorer = Scorer(model, self.settings.evaluation_samples, self.settings.seed)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if (epoch + 1) % self.settings.evaluate_every == 0:
            with self.devices.alone():
                self.devices.update(self.scorer.model, self.model)
                found = self.scorer.score(*self.test).summary()
            logs.update({f"test_{name}": found[name] for name in ("accuracy", "nll", "ece")})


class _Log(keras.callbacks.Callback):
    """Writes the history as CSV, and says how it goes."""

    def __init__(self, checkpoint: Checkpoint, path: Path, stage: Stage, say: Say) -> None:
        super().__init__()
        self.checkpoint, self.path, self.stage, self.say = checkpoint, path, stage, say

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        _write_history(self.checkpoint, self.path)
        shown = [
            name for name in ("loss", "nll", "kl", "accuracy", "test_accuracy") if name in logs
        ]
        parts = ", ".join(f"{name} {logs[name]:.4g}" for name in shown)
        seconds = sum(row["seconds"] for row in self.checkpoint.logs)
        self.say(
            f"{self.stage.name}: epoch {epoch + 1}/{self.stage.epochs}, {parts}, {seconds:.0f} s"
        )


def _write_history(checkpoint: Checkpoint, path: Path) -> None:
    """Write all that was logged so far as CSV.

    Written from the checkpoint and not appended: a run that was killed leaves no line twice.
    """
    rows = checkpoint.logs
    names = list(dict.fromkeys(name for row in rows for name in row))
    with (
        files.replacing(path) as temporary,
        temporary.open("w", encoding="utf-8", newline="") as file,
    ):
        writer = csv.DictWriter(file, ["epoch", *names])
        writer.writeheader()
        writer.writerows({"epoch": number, **row} for number, row in enumerate(rows, start=1))


def _write(
    folder: RunFolder,
    metrics: dict[str, Any],
    scores: Scores,
    scorer: Scorer,
    test: Arrays,
    keep_models: bool,
    say: Say,
) -> None:
    """Write what a finished run leaves; `metrics.json`, which makes it finished, comes last."""
    with files.replacing(folder / "probabilities.npz") as temporary:
        np.savez_compressed(temporary, **scores.arrays())
    if keep_models:
        with files.replacing(folder / "model.keras") as temporary:
            scorer.model.save(temporary)
        metrics["saved_model"] = _export(scorer, folder / "saved_model", say)
    write_report(folder.path, metrics, scores, test)
    files.write_json(folder / "metrics.json", metrics)
    for stage in ("pretraining", "training"):
        (folder / f"{stage}.npz").unlink(missing_ok=True)


def _export(scorer: Scorer, path: Path, say: Say) -> bool:
    """Write a SavedModel, where there is TensorFlow to write it."""
    if backend.NAME != "tensorflow":
        say("No SavedModel: that takes TensorFlow. `scripts/export.py` makes one there.")
        return False
    scorer.export(path, overwrite=True)
    return True
