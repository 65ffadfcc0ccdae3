"""Fine-tuning of trials side by side, epoch by epoch: how long, and at which learning rate."""

import time
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfp_ibnn._core import keras_optimizers
from tfp_ibnn._core.progress import Heartbeat
from tfp_ibnn.calibration.engine import copy_of_optimizer
from tfp_ibnn.calibration.examples import Training
from tfp_ibnn.calibration.trials import Setting, Trial, first_line
from tfp_ibnn.training import Interrupts

FEWEST = 3
"""The number of epochs of fine-tuning, unless a tenth of the model's own is more."""
NOISE = 2.0
"""The factor by which noise on the inputs of layers slows training and its compilation."""
HALF = 0.5
"""The largest cost of all training for effort="minutes", in trainings of the model."""
MOST = HALF / (1 + NOISE)
"""The largest share of the model's epochs for each of two candidates, one of them with noise."""


class Limits(Interrupts):
    """Ends a training in the middle of an epoch, on Ctrl-C or when the time is up.

    Args:
        end: the `time.monotonic` after which no batch starts.

    Attributes:
        is_late: whether the time has ended a training.
    """

    def __init__(self, end: float) -> None:
        super().__init__()
        self.is_late = False
        self._end = end

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_train_batch_end(batch, logs)
        if self.are_passed():
            self.model.stop_training = True

    def are_passed(self) -> bool:
        """Return and record whether the time is up."""
        self.is_late = time.monotonic() > self._end
        return self.is_late


def epochs_of(model: keras.Model, training: Training) -> float:
    """Return how many epochs a model was trained for, by its optimizer; 0 if unknown.

    Args:
        model: the trained model.
        training: its data, in batches.
    """
    if not model.compiled or model.optimizer is None:
        return 0.0
    innermost = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    batches_per_step = innermost.gradient_accumulation_steps or 1
    batches = _number(model.optimizer.iterations) * batches_per_step
    return batches / training.steps


def epochs_of_fine_tuning(model_epochs: float) -> float:
    """Return a tenth of the model's epochs, or 3, but not more than a sixth of them.

    Below 1 it is the part of an epoch; otherwise it is a whole number.

    Args:
        model_epochs: those that the model was trained for; 0 if unknown.
    """
    if not model_epochs:
        return FEWEST
    wanted = max(FEWEST, round(model_epochs / 10))
    most = MOST * model_epochs
    return most if most < 1 else min(wanted, int(most))


def fine_tuning_optimizer(model: keras.Model, optimizer: Any) -> keras.optimizers.Optimizer:
    """Return the optimizer of the fine-tuning: the user's, or the model's at a tenth of its rate.

    A schedule gives a tenth of its largest value so far, since many schedules end at 0.

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
    config["learning_rate"] = _rate_of_training(trained_by, config["learning_rate"]) / 10
    return type(trained_by).from_config(config)


def _rate_of_training(optimizer: keras.optimizers.Optimizer, configured: Any) -> float:
    """Return an optimizer's learning rate; for a schedule, the largest so far.

    Args:
        optimizer: the one that trained the model.
        configured: the learning rate of its config: a number, or the dict of a schedule.
    """
    if not isinstance(configured, dict):
        return _number(optimizer.learning_rate)
    schedule = keras.optimizers.schedules.deserialize(configured)
    iterations = int(_number(optimizer.iterations))
    steps = np.linspace(0, iterations, 101)
    return max(_number(schedule(step)) for step in steps)


def _number(tensor: Any) -> float:
    return float(keras.ops.convert_to_numpy(tensor))


def decaying(optimizer: keras.optimizers.Optimizer, steps: int) -> keras.optimizers.Optimizer:
    """Return a copy of an optimizer whose rate decays to 0 by a cosine; its own schedule is kept.

    Args:
        optimizer: the one to copy.
        steps: after which the rate is 0.
    """
    config = optimizer.get_config()
    rate = config.get("learning_rate")
    if hasattr(optimizer, "inner_optimizer"):  # it scales the loss
        inner = decaying(optimizer.inner_optimizer, steps)
        config["inner_optimizer"] = keras.optimizers.serialize(inner)
        return type(optimizer).from_config(config)
    if not isinstance(rate, float):
        return copy_of_optimizer(optimizer)
    config["learning_rate"] = keras.optimizers.schedules.CosineDecay(rate, steps)
    return type(optimizer).from_config(config)


def fine_tune(trials: Sequence[Trial], setting: Setting) -> None:
    """Train trials side by side, epoch by epoch; each is compared in the state of its best epoch.

    A trial whose training or scoring fails stops. After `setting.end` no batch starts, and an
    unfinished epoch does not count.

    Args:
        trials: those to train; they are changed in place.
        setting: their data, the number of epochs, and the time limit.
    """
    running = list(trials)
    last = max(1, int(setting.epochs))
    seconds_per_epoch = 0.0
    with Limits(setting.end) as limits:
        for epoch in range(1, last + 1):
            if not running:
                break
            start = time.monotonic()
            label = f"epoch {epoch} of {last}"
            if start + seconds_per_epoch > setting.end:
                _report_end(running, setting, f"{label} is not begun")
                break
            for number, trial in enumerate(running):
                if not limits.are_passed():
                    with Heartbeat(f"{label}: {trial.name}", setting.say):
                        _train_one_epoch(trial, setting, epoch, limits)
                if limits.is_late:
                    _report_end(running[number:], setting, f"{label} is not finished")
                    return
            seconds_per_epoch = time.monotonic() - start
            running = [trial for trial in running if not trial.stopped]


def _train_one_epoch(trial: Trial, setting: Setting, epoch: int, limits: Limits) -> None:
    """Train a trial for one epoch, and note whether it was its best, or its last."""
    start = time.monotonic()
    previous = trial.nll

    def fit(network: keras.Model) -> None:
        with warnings.catch_warnings():
            # The first epoch may be a part of one.
            warnings.filterwarnings("ignore", message="`train_size` is")
            setting.training_part.epoch(network, epoch, limits)

    try:
        state = trial.engine.train(trial.state, fit)
        if limits.is_late:
            return
        trial.state = state
        nll = trial.watch(setting.data, setting.output)
    except Exception as error:
        if limits.came:  # TensorFlow may raise its own error after Ctrl-C
            raise
        _stop(trial, setting, epoch, error)
        return
    trial.seconds += time.monotonic() - start
    if nll < previous:
        trial.epochs = epoch
    # If the model's own epochs are unknown, the whole fine-tuning counts as one training.
    share = epoch * min(1.0, setting.epochs) / (setting.model_epochs or setting.epochs)
    trial.trainings = trial.slowdown * share
    setting.say(f"epoch {epoch}: {trial.name}: NLL {nll:.4f}, {trial.seconds:.0f} s")


def _stop(trial: Trial, setting: Setting, epoch: int, error: Exception) -> None:
    """End the training of a trial that fails; its best epoch so far is compared."""
    trial.stopped = True
    setting.say(f"epoch {epoch}: {trial.name} is stopped: {error}")
    if not trial.epochs:
        trial.leave_out(error)
        return
    # The warning points at the line that calls `calibrate`.
    warnings.warn(
        f"{trial.name}: its training ended in epoch {epoch}, since {first_line(error)} "
        f"Epoch {trial.epochs} is compared.",
        stacklevel=8,
    )


def _report_end(untrained: Sequence[Trial], setting: Setting, what: str) -> None:
    """Report that `minutes` ended the training, and for which trials."""
    names = ", ".join(trial.name for trial in untrained)
    setting.say(f"`minutes` ended the training: {what} for {names}.")
