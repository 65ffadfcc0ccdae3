"""Estimates of the time of each effort on this machine, from a few timed batches."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.progress import Heartbeat
from tfp_ibnn.calibration.engine import copy_of_optimizer
from tfp_ibnn.calibration.fine_tuning import NOISE
from tfp_ibnn.calibration.fresh import SIZES
from tfp_ibnn.calibration.trials import Setting, Trial
from tfp_ibnn.calibration.untrained import EXAMPLES, MOST_OUTPUTS, MOST_WEIGHTS, PRIOR_FACTORS
from tfp_ibnn.calibration.untrained_noise import SCALES
from tfp_ibnn.conversion.copying import copy_of

TIMED = 1.0
"""About how many seconds the timed steps and the timed passes take."""

_NOISY = (keras.layers.Dropout, keras.layers.BatchNormalization)
"""Layers whose training noise is a candidate."""
_ROWS = 256  # of the smallest prediction


class Work(NamedTuple):
    """The amount of each kind of work; or, for a machine, the seconds of one unit of each."""

    predictions: float = 0.0  # that are compiled
    rows: float = 0.0  # passes of one example
    scored: float = 0.0  # outputs that a temperature is fitted to
    trainings: float = 0.0  # steps that are compiled
    epochs: float = 0.0  # beside their steps
    steps: float = 0.0

    def seconds(self, of_one: "Work") -> float:
        """Return the time that all of it takes.

        Args:
            of_one: the seconds of one unit of each kind.
        """
        return sum(count * each for count, each in zip(self, of_one, strict=True))

    def plus(self, other: "Work", times: float = 1.0) -> "Work":
        """Return this work and some more.

        Args:
            other: the work to add.
            times: how often; 1 by default.
        """
        return Work(*[count + times * more for count, more in zip(self, other, strict=True)])


class Sizes(NamedTuple):
    """How large a comparison is."""

    fit: int  # examples
    score: int  # further examples, on which the choice is made
    draws: int
    train: int  # examples
    steps: int  # in an epoch
    epochs: float  # of the fine-tuning
    model_epochs: float
    width: int  # of the output
    weights: int
    noisy: int = 0  # candidates whose draws are passes, with nothing to train
    given: int = 0  # passes of all candidates of the user together

    def predicted(self, draws: float, states: float = 1.0) -> Work:
        """Return the work of a candidate that is scored.

        Args:
            draws: passes of its network in a prediction.
            states: how many of them are compared on the examples to fit; 1 by default.
        """
        rows = draws * (states * self.fit + self.score)
        return Work(predictions=1, rows=rows, scored=rows)

    def trained(self, epochs: float) -> Work:
        """Return the work of a training.

        Args:
            epochs: its length.
        """
        return Work(trainings=1, epochs=epochs, steps=epochs * self.steps)


def sizes_of(setting: Setting) -> Sizes:
    """Return the sizes of a comparison."""
    data = setting.data
    layers = keras_internals.nested_layers(setting.model)
    return Sizes(
        fit=data.fit.size,
        score=data.score.size if data.folds is None else 0,
        draws=setting.samples,
        train=setting.training.size,
        steps=setting.training.steps,
        epochs=setting.epochs,
        model_epochs=setting.model_epochs,
        width=setting.output.width,
        weights=setting.model.count_params(),
        noisy=sum(any(isinstance(layer, kind) for layer in layers) for kind in _NOISY),
        given=sum(engine.samples for engine in setting.candidates.values()),
    )


def work_of(sizes: Sizes) -> dict[str, Work]:
    """Return the work of each effort, including that of the efforts before.

    Without `model_epochs`, "trainings" is missing.
    """
    seconds = _untrained(sizes)
    minutes = seconds.plus(_fine_tuned(sizes))
    efforts = {"seconds": seconds, "minutes": minutes}
    if sizes.model_epochs:
        efforts["trainings"] = minutes.plus(_trained_anew(sizes))
    return efforts


def _untrained(sizes: Sizes) -> Work:
    as_it_is = Work(rows=sizes.score, scored=sizes.score)
    work = as_it_is.plus(sizes.predicted(sizes.draws), sizes.noisy)
    if sizes.given:
        work = work.plus(sizes.predicted(sizes.given))
    noise = sizes.predicted(sizes.draws, len(SCALES))  # on the inputs of layers
    return work.plus(noise).plus(_laplace_of_the_last_layer(sizes))


def _laplace_of_the_last_layer(sizes: Sizes) -> Work:
    """Return the work of a pass for its Hessian, and of one pass for all draws."""
    states = len(PRIOR_FACTORS)
    hessian = Work(predictions=1, rows=min(sizes.train, EXAMPLES))
    scored = Work(scored=(sizes.draws - 1) * (states * sizes.fit + sizes.score))
    prediction = sizes.predicted(1, states)
    return hessian.plus(scored).plus(prediction)


def _fine_tuned(sizes: Sizes) -> Work:
    epochs = sizes.epochs
    training = sizes.trained(epochs)
    control = training.plus(sizes.predicted(1, epochs))
    posterior = sizes.predicted(sizes.draws, epochs).plus(training, NOISE)
    work = control.plus(posterior)
    if sizes.weights <= MOST_WEIGHTS and sizes.width <= MOST_OUTPUTS:
        # Laplace of all weights: two passes per draw, and one back for each output.
        share = min(1.0, EXAMPLES / sizes.train)
        steps = sizes.width * share * sizes.steps
        laplace = sizes.predicted(2 * sizes.draws, len(PRIOR_FACTORS))
        work = work.plus(laplace).plus(Work(trainings=1, steps=steps))
    return work


def _trained_anew(sizes: Sizes) -> Work:
    epochs = max(1, round(sizes.model_epochs))
    networks = max(SIZES) - 1
    work = Work().plus(sizes.trained(epochs), networks + NOISE)
    for size in SIZES:
        work = work.plus(sizes.predicted(size))
    return work.plus(sizes.predicted(sizes.draws), 2)  # SWAG, and what is trained with noise


def seconds_of_one(trial: Trial, first_seconds: float, setting: Setting) -> Work:
    """Return the time of each kind of work on this machine, by timing some of it.

    Args:
        trial: the model as it is, which has been watched.
        first_seconds: the time that this took, including compilation.
        setting: the data, and how to train.
    """
    row = _seconds_of_row(trial, setting)
    examples = setting.data.fit
    fits = 1 + len(setting.data.without_each_fold())
    raw = trial.watched()
    scoring = fits * _timed(lambda: setting.output.best_nll(raw, examples.y, examples.weight))
    training = _seconds_of_training(setting)
    compiling = max(0.0, first_seconds - row * examples.size - scoring)
    return training._replace(
        # The first prediction of a process takes longer; a step is never compiled in less time.
        predictions=min(compiling, training.trainings),
        rows=row,
        scored=scoring / examples.size,
    )


def _seconds_of_row(trial: Trial, setting: Setting) -> float:
    """Return the time of a pass of one example, without the overhead of a prediction."""
    every = np.arange(setting.data.fit.size)

    def draw(count: int) -> float:
        rows = setting.data.fit.take(np.resize(every, count))
        return _timed(lambda: trial.engine.draw(trial.state, rows.x))

    one = draw(_ROWS)
    if one > TIMED / 2:
        return one / _ROWS
    further = 4 * _ROWS
    return max(0.0, draw(_ROWS + further) - one) / further


def _seconds_of_training(setting: Setting) -> Work:
    """Return the times of compiling a step, of a step, and of an epoch besides its steps."""
    network = copy_of(setting.model)
    optimizer = setting.optimizer or getattr(setting.model, "optimizer", None)
    if optimizer is None:
        optimizer = keras.optimizers.Adam()
    network.compile(copy_of_optimizer(optimizer), setting.loss)

    def fit(steps: int) -> float:
        training = setting.training.shortened(steps)
        return _timed(lambda: training.epoch(network, 1))

    first = fit(1)
    one = fit(1)
    steps = min(setting.training.steps, max(2, int(TIMED / one)))
    step = one
    if steps > 1:
        step = max(0.0, fit(steps) - one) / (steps - 1)
    return Work(trainings=max(0.0, first - one), epochs=max(0.0, one - step), steps=step)


def announce_times(trial: Trial, setting: Setting, start: float, first_seconds: float) -> float:
    """Print how long each effort would take, and return the seconds of a training of the model.

    Args:
        trial: the model as it is, which has been watched.
        setting: what the candidates are made of.
        start: the `time.monotonic` at the start.
        first_seconds: the time to make and watch the trial.
    """
    with Heartbeat("timing a few batches", setting.say):
        try:
            of_one = seconds_of_one(trial, first_seconds, setting)
        except Exception as error:  # anything may keep the model from being trained
            setting.say(f"What each effort takes is unknown, since a step failed: {error}")
            return 0.0
    sizes = sizes_of(setting)
    spent = time.monotonic() - start
    times = []
    for effort, work in work_of(sizes).items():
        seconds = spent + work.seconds(of_one)
        times.append(f"{effort} about {in_words(seconds)}")
    setting.say(f"On this machine: {', '.join(times)}.")
    return sizes.trained(sizes.model_epochs).seconds(of_one)


def _timed(function: Callable[[], Any]) -> float:
    start = time.monotonic()
    function()
    return time.monotonic() - start


def in_words(seconds: float) -> str:
    """Return a time in readable units: 20 s, 3 min, 2 h."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
