"""The training of trials side by side, epoch by epoch, and its optimizer."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfp_ibnn._core import keras_optimizers
from tfp_ibnn._core.progress import Heartbeat
from tfp_ibnn.calibration.trials import Setting, Trial
from tfp_ibnn.training import Interrupts

PATIENCE = 2
"""The number of epochs without a lower NLL after which a training stops."""


def fine_tuning_optimizer(model: keras.Model, optimizer: Any) -> keras.optimizers.Optimizer:
    """Return the optimizer of the fine-tuning: the user's, or the model's at a tenth of its rate.

    A schedule gives a tenth of its present value, and at least a thousandth of its largest so far,
    since many end at 0.

    Args:
        model: the trained model.
        optimizer: what `keras.optimizers.get` takes; None takes a copy of the model's own, or
            Adam(1e-4) if the model is not compiled.

    Raises:
        ValueError: if the model has several optimizers, and `optimizer` is None.
    """
    if optimizer is not None:
        return keras.optimizers.get(optimizer)
    if not model.compiled or model.optimizer is None:
        return keras.optimizers.Adam(1e-4)
    trained_by = model.optimizer
    # A loss-scaling optimizer wraps the one that trains.
    trained_by = getattr(trained_by, "inner_optimizer", trained_by)
    if keras_optimizers.has_many_parts(trained_by):
        raise ValueError(
            "`model` has several optimizers: give one, such as "
            "optimizer=keras.optimizers.Adam(1e-4)."
        )
    config = trained_by.get_config()
    config["learning_rate"] = _present_rate(trained_by, config["learning_rate"]) / 10
    return type(trained_by).from_config(config)


def _present_rate(optimizer: keras.optimizers.Optimizer, configured: Any) -> float:
    """Return an optimizer's learning rate, and of a schedule at least 1 % of its largest so far.

    Args:
        optimizer: the one that has trained the model.
        configured: the learning rate of its config: a number, or the dict of a schedule.
    """
    rate = _number(optimizer.learning_rate)
    if not isinstance(configured, dict):
        return rate
    schedule = keras.optimizers.schedules.deserialize(configured)
    iterations = int(_number(optimizer.iterations))
    steps = np.linspace(0, iterations, 101)
    largest = max(_number(schedule(step)) for step in steps)
    return max(rate, largest / 100)


def _number(tensor: Any) -> float:
    return float(keras.ops.convert_to_numpy(tensor))


def fine_tune(trials: Sequence[Trial], setting: Setting, epochs: int | None) -> None:
    """Train trials epoch by epoch; after each, drop the worse half of those that draw.

    A trial that gets no better for `PATIENCE` epochs, or whose predictions are not finite, stops.
    After `setting.end` no epoch starts, and no trial's part of one.

    Args:
        trials: those to train; they are changed in place.
        setting: their data, and the end of the time.
        epochs: the largest number; None trains until all have stopped, or the time is up.
    """
    running = list(trials)
    seconds_per_epoch = 0.0
    with Interrupts() as interrupts:
        for epoch in itertools.islice(itertools.count(1), epochs):
            start = time.monotonic()
            if not running:
                break
            label = f"epoch {epoch}" if epochs is None else f"epoch {epoch} of {epochs}"
            if start + seconds_per_epoch > setting.end:
                _report_end(running, setting, f"{label} is not begun")
                break
            for number, trial in enumerate(running):
                if time.monotonic() > setting.end:
                    _report_end(running[number:], setting, f"{label} is not finished")
                    return
                with Heartbeat(f"{label}: {trial.name}", setting.say):
                    _train_one_epoch(trial, setting, epoch, interrupts)
            seconds_per_epoch = time.monotonic() - start
            _drop_worse_half(trials, setting, epoch)
            running = [trial for trial in running if not trial.fate and not trial.stopped]


def _train_one_epoch(trial: Trial, setting: Setting, epoch: int, interrupts: Interrupts) -> None:
    """Train a trial for one epoch, and note whether it was its best, or its last."""
    start = time.monotonic()
    previous = trial.nll

    def fit(network: keras.Model) -> None:
        setting.training.epoch(network, epoch, interrupts)

    trial.state = trial.engine.train(trial.state, fit)
    try:
        nll = trial.watch(setting.data, setting.output)
    except ValueError as error:  # predictions are not finite
        trial.stopped = True
        if not trial.epochs:  # otherwise its best epoch so far is compared
            trial.fate = str(error)
        setting.say(f"epoch {epoch}: {trial.name} is stopped: {error}")
        return
    if nll < previous:
        trial.epochs = epoch
    trial.stopped = epoch - trial.epochs >= PATIENCE
    trial.seconds += time.monotonic() - start
    setting.say(f"epoch {epoch}: {trial.name}: NLL {nll:.4f}, {trial.seconds:.0f} s")


def _drop_worse_half(trials: Sequence[Trial], setting: Setting, epoch: int) -> None:
    """Drop the worse half of the trials that draw, down to two."""
    rivals = [trial for trial in trials if trial.engine.samples > 1 and not trial.fate]
    rivals.sort(key=lambda trial: trial.nll)
    kept = max(2, -(-len(rivals) // 2))
    for trial in rivals[kept:]:
        trial.drop(f"NLL {trial.nll:.4f} after epoch {epoch}")
        setting.say(f"epoch {epoch}: {trial.name} is dropped")


def _report_end(untrained: Sequence[Trial], setting: Setting, what: str) -> None:
    """Report that `minutes` ended the training, and for which trials."""
    names = ", ".join(trial.name for trial in untrained)
    setting.say(f"`minutes` ended the training: {what} for {names}.")
