"""Estimates of the time of each effort on this machine, from a few timed batches."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.progress import Heartbeat
from tfp_ibnn.calibration.engine import copy_of_optimizer
from tfp_ibnn.calibration.examples import Examples
from tfp_ibnn.calibration.fine_tuning import NOISE
from tfp_ibnn.calibration.fresh import SIZES
from tfp_ibnn.calibration.rows import Rows, groups_of
from tfp_ibnn.calibration.trials import Setting, Trial
from tfp_ibnn.calibration.untrained import EXAMPLES, PRIOR_FACTORS, too_slow
from tfp_ibnn.calibration.untrained_noise import SCALES, SCREENED, SCREENING_DRAWS
from tfp_ibnn.conversion.copying import copy_of

TIMED = 1.0
"""About how many seconds the timed steps and the timed passes take."""

_NOISY = (keras.layers.Dropout, keras.layers.BatchNormalization)
"""Layers whose training noise is a candidate."""
VARIANTS = 2
"""How often a candidate is scored: without a temperature, and with one."""
ROWS = 256
"""The number of examples in a batch of a timed prediction."""


class Work(NamedTuple):
    """The amount of each kind of work; or, for a machine, the seconds of one unit of each."""

    predictions: float = 0.0  # that are compiled
    calls: float = 0.0  # of such predictions, beside their passes
    passes: float = 0.0  # of one example
    fitted: float = 0.0  # outputs that a temperature is fitted to
    scored: float = 0.0  # outputs whose NLL is taken
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


class Part(NamedTuple):
    """Examples to fit, or those to score."""

    examples: float
    outputs: float  # of all of them: one each, or one for each pixel
    at_once: int = 0  # examples that a call may predict with one draw; 0 for no limit

    @classmethod
    def of(cls, examples: Examples) -> "Part":
        """Return the sizes of some examples."""
        groups = groups_of(examples)
        if groups is None:
            return cls(examples.size, examples.size)
        return cls(len(np.unique(groups)), examples.size, examples.x.most_at_once(1))

    def calls(self, draws: int) -> float:
        """Return in how many calls some draws of all examples are predicted."""
        if not self.examples or not self.at_once:
            return min(1, self.examples)
        at_once = min(ROWS, max(1, self.at_once // draws))
        return -(-self.examples // at_once)


class Sizes(NamedTuple):
    """How large a comparison is."""

    fit: Part
    score: Part  # without examples, if those to fit are scored by cross-fitting
    draws: int
    train: int  # examples
    steps: int  # in an epoch
    epochs: float  # of the fine-tuning
    model_epochs: float
    width: int  # of the output
    noisy: int = 0  # candidates whose draws are passes, with nothing to train
    given: int = 0  # passes of all candidates of the user together
    has_laplace: bool = True  # of all weights

    def watched(self, draws: int, states: float = 1.0, part: Part | None = None) -> Work:
        """Return the work of comparing states on the examples to fit.

        Args:
            draws: passes of the network in a prediction.
            states: how many are compared; 1 by default.
            part: the examples, if not all that there are to fit.
        """
        part = part or self.fit
        return Work(
            predictions=1,
            calls=states * part.calls(draws),
            passes=states * draws * part.examples,
            fitted=states * draws * part.outputs,
        )

    def predicted(self, draws: int, states: float = 1.0) -> Work:
        """Return the work of a candidate: its best state is also scored, at a temperature.

        Args:
            draws: passes of its network in a prediction.
            states: how many of them are compared on the examples to fit; 1 by default.
        """
        score = self.score
        selection = Work(
            calls=score.calls(draws),
            passes=draws * score.examples,
            fitted=draws * self.fit.outputs,
            scored=VARIANTS * draws * score.outputs,
        )
        return self.watched(draws, states).plus(selection)

    def trained(self, epochs: float) -> Work:
        """Return the work of a training.

        Args:
            epochs: its length.
        """
        return Work(trainings=1, epochs=max(1.0, epochs), steps=epochs * self.steps)


def sizes_of(setting: Setting) -> Sizes:
    """Return the sizes of a comparison."""
    data = setting.data
    layers = keras_internals.nested_layers(setting.model)
    score = Part.of(data.score)
    return Sizes(
        fit=Part.of(data.fit),
        score=score if data.folds is None else score._replace(examples=0),
        draws=setting.samples,
        train=setting.training.size,
        steps=setting.training.steps,
        epochs=setting.epochs,
        model_epochs=setting.model_epochs,
        width=setting.output.width,
        noisy=sum(any(isinstance(layer, kind) for layer in layers) for kind in _NOISY),
        given=sum(engine.samples for engine in setting.candidates.values()),
        has_laplace=not too_slow(setting),
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
    # The model as it is has been watched already.
    as_it_is = sizes.predicted(1, states=0)._replace(predictions=0)
    work = as_it_is.plus(sizes.predicted(sizes.draws), sizes.noisy)
    if sizes.given:
        work = work.plus(sizes.predicted(sizes.given))
    noise = sizes.predicted(sizes.draws)  # on the inputs of layers
    return work.plus(_screened(sizes)).plus(noise).plus(_laplace_of_the_last_layer(sizes))


def _screened(sizes: Sizes) -> Work:
    """Return the work of comparing scales of noise, by few draws of a part of the examples."""
    part = sizes.fit
    share = 1.0
    if sizes.score.examples:
        share = min(1.0, SCREENED / part.examples)
    part = part._replace(examples=share * part.examples, outputs=share * part.outputs)
    return sizes.watched(min(sizes.draws, SCREENING_DRAWS), len(SCALES), part)


def _laplace_of_the_last_layer(sizes: Sizes) -> Work:
    """Return the work of a pass for its Hessian, and of one pass for all draws."""
    states = len(PRIOR_FACTORS)
    prediction = sizes.predicted(sizes.draws, states)
    of_one_draw = sizes.predicted(1, states)
    hessian = min(sizes.train, EXAMPLES)
    return prediction._replace(predictions=2, passes=of_one_draw.passes + hessian)


def _fine_tuned(sizes: Sizes) -> Work:
    epochs = sizes.epochs
    training = sizes.trained(epochs)
    watched = max(1, int(epochs))
    control = training.plus(sizes.predicted(1, watched))
    posterior = sizes.predicted(sizes.draws, watched).plus(training, NOISE)
    work = control.plus(posterior)
    if sizes.has_laplace:
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
    output = setting.output
    data = setting.data
    raw = trial.watched()
    prediction = _seconds_of_prediction(trial, setting)
    fitting = _timed(lambda: data.best_nlls(raw, output))
    scoring = _timed(lambda: output.nll(output.predict(raw, 1.0), data.fit.y))
    training = _seconds_of_training(setting)
    work = prediction._replace(
        fitted=fitting / data.fit.size,
        scored=scoring / data.fit.size,
    )
    sizes = sizes_of(setting)
    compiling = max(0.0, first_seconds - sizes.watched(1).seconds(work))
    return training.plus(work)._replace(
        # The first prediction of a process takes longer; a step is never compiled in less time.
        predictions=min(compiling, training.trainings),
    )


def _seconds_of_prediction(trial: Trial, setting: Setting) -> Work:
    """Return the times of a call and of a pass of one example."""
    x = setting.data.fit.x
    engine = trial.engine
    size = ROWS
    if isinstance(x, Rows):
        size = x.batch_size(1)
        x = x.inputs

    def draw(batches: int) -> float:
        return _timed(lambda: engine.outputs(x, batches * size, size))

    draw(1)  # which may have to be compiled for this size
    one = draw(1)
    if one > TIMED / 2:
        return Work(passes=one / size)
    further = 4
    passes = max(0.0, draw(1 + further) - one) / further
    return Work(calls=max(0.0, one - passes), passes=passes / size)


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
