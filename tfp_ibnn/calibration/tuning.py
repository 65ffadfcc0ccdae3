"""The training of trials, epoch by epoch."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from tfp_ibnn.calibration.examples import Training
from tfp_ibnn.calibration.trials import Trial
from tfp_ibnn.training import Interrupts

PATIENCE = 2


def fine_tuning_optimizer(model: keras.Model, given: Any) -> keras.optimizers.Optimizer:
    """Return the optimizer given, or a copy of the model's own at a tenth of its rate.

    A schedule gives a tenth of its present value, and at least a thousandth of its largest so far,
    since many end at 0.
    """
    if given is not None:
        return keras.optimizers.get(given)
    own = getattr(model, "optimizer", None) if model.compiled else None
    if own is None:
        return keras.optimizers.Adam(1e-4)
    own = getattr(own, "inner_optimizer", own)  # of one that scales losses
    if isinstance(own, keras.optimizers.MultiOptimizer):
        raise ValueError(
            "`model` has several optimizers: give one, such as "
            "optimizer=keras.optimizers.Adam(1e-4)."
        )
    config = own.get_config()
    rate = float(keras.ops.convert_to_numpy(own.learning_rate))
    if isinstance(config["learning_rate"], dict):
        schedule = keras.optimizers.schedules.deserialize(config["learning_rate"])
        steps = np.linspace(0, int(keras.ops.convert_to_numpy(own.iterations)), 101)
        largest = max(float(keras.ops.convert_to_numpy(schedule(step))) for step in steps)
        rate = max(rate, largest / 100)
    return type(own).from_config({**config, "learning_rate": rate / 10})


def fine_tune(
    trials: Sequence[Trial],
    training: Training,
    watch: Callable[[Trial], float],
    epochs: int | None,
    end: float,
    say: Callable[[str], None],
) -> None:
    """Train all trials epoch by epoch; those that draw and are dropped get a `fate`.

    `watch` scores a trial, `say` prints a line, `end` is a time of `time.monotonic`. Without
    `epochs` the training ends there, or when nothing gets better.
    """
    running, round_time = list(trials), 0.0
    with Interrupts() as interrupts:
        for epoch in itertools.count(1):
            start = time.monotonic()
            if not running or (epochs is not None and epoch > epochs) or start + round_time > end:
                break
            for trial in running:
                if time.monotonic() > end:
                    return
                try:
                    _one_epoch(trial, training, epoch, watch, interrupts, say)
                except Exception:
                    if interrupts.came:  # and TensorFlow has raised something of its own
                        raise KeyboardInterrupt from None
                    raise
            round_time = time.monotonic() - start
            _drop_worse_half([x for x in trials if x.engine.samples > 1 and not x.fate], epoch, say)
            running = [x for x in running if not x.fate and not x.stopped]


def _one_epoch(
    trial: Trial,
    training: Training,
    epoch: int,
    watch: Callable[[Trial], float],
    interrupts: Interrupts,
    say: Callable[[str], None],
) -> None:
    start, before = time.monotonic(), trial.nll
    trial.state = trial.engine.train(trial.state, lambda x: training.epoch(x, epoch, interrupts))
    try:
        nll = watch(trial)
    except ValueError as error:  # of predictions that are not finite
        trial.stopped, trial.fate = True, "" if trial.epochs else str(error)
        say(f"epoch {epoch}: {trial.name} is stopped: {error}")
        return
    trial.epochs = epoch if nll < before else trial.epochs
    trial.stopped = epoch - trial.epochs >= PATIENCE
    trial.seconds += time.monotonic() - start
    say(f"epoch {epoch}: {trial.name}: NLL {nll:.4f}, {trial.seconds:.0f} s")


def _drop_worse_half(trials: list[Trial], epoch: int, say: Callable[[str], None]) -> None:
    keep = max(2, -(-len(trials) // 2))
    for trial in sorted(trials, key=lambda x: x.nll)[keep:]:
        trial.fate = f"NLL {trial.nll:.4f} after epoch {epoch}"
        trial.state = trial.best = []  # which take memory
        say(f"epoch {epoch}: {trial.name} is dropped")
