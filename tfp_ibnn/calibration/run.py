"""From a trained model to a calibrated one, in one call."""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from tfp_ibnn._core import checks
from tfp_ibnn._core.progress import Heartbeat, printer, silent
from tfp_ibnn.calibration.doubts import doubts_about
from tfp_ibnn.calibration.efforts import GAINS, METHODS, up_to
from tfp_ibnn.calibration.examples import Training, Validation, prepare
from tfp_ibnn.calibration.fine_tuning import (
    HALF,
    epochs_of,
    epochs_of_fine_tuning,
    fine_tuning_optimizer,
)
from tfp_ibnn.calibration.fresh_networks import FreshNetworks, check_build
from tfp_ibnn.calibration.network import as_network, posteriors_of, warn_of_own_training
from tfp_ibnn.calibration.report import Report
from tfp_ibnn.calibration.rows import described, groups_of
from tfp_ibnn.calibration.speed import announce_times, in_words
from tfp_ibnn.calibration.stages import mark_untried, run_stages
from tfp_ibnn.calibration.trials import Setting, Trial, deadline, posterior_engine
from tfp_ibnn.likelihoods.infer import likelihood_for_calibration


def calibrate(
    model: keras.Model,
    train: Any,
    validation: Any = None,
    *,
    effort: str = "seconds",
    minutes: float | None = None,
    candidates: Mapping[str, Any] | None = None,
    build: Callable[[], keras.Model] | None = None,
    epochs: int | None = None,
    optimizer: Any = None,
    loss: Any = None,
    samples: int = 32,
    batch_size: int | None = None,
    seed: int = 0,
    verbose: bool = True,
) -> Report:
    """Calibrate a trained model's probabilities by the cheapest method that is as good as the best.

    What is compared depends on the effort; each candidate is also tried with a temperature:

    - "seconds" trains nothing: the model as it is, for classifiers also with a scaling of each
        class; your own candidates; MC dropout and MC batch normalization if the model has such
        layers; noise of one scale in all layers; and `Laplace` of the last layer;
    - "minutes" also fine-tunes the model for at most a sixth of its epochs, as a control, and a
        Gaussian posterior of z (`NormalAffine`), whose steps take twice the time, for as long, each
        with a learning rate that decays to 0; and fits `Laplace` of all weights, if all this takes
        no more than half a training;
    - "trainings" also trains fresh networks for as long as the model: ensembles of 2, 3 and 5 that
        include the model itself, SWAG along the first of these trainings, and a network trained
        with noise from scratch.

    Half of the validation data is used to fit temperatures and Laplace's prior precision, and to
    choose the best epoch; the other half to choose the cheapest candidate whose NLL is within one
    standard error, or 0.001 nats, of the best. With fewer than 1,000 validation examples, all of
    them are used for both, by five-fold cross-fitting.

    A regression with a squared loss becomes Gaussian, with a fitted standard deviation; one with a
    `GaussianHead` gets a factor for its standard deviations. The model itself is not changed.
    Ctrl-C ends the training, not the comparison. A candidate that fails is skipped with a warning.

    Args:
        model: a trained model with one output or several, (N, K) or (N, ..., K).
        train: arrays (x, y) or (x, y, weight), a `tf.data.Dataset` or a `PyDataset`. For several
            outputs, y is a dict by name or a list in their order, and so may be the weights.
            For class weights, give each example the weight of its class.
        validation: the same, with examples that the model was not trained on; one of weight 2
            counts as two. None takes a fifth of the training arrays, which is second best.
        effort: "seconds" (the default), "minutes" or "trainings"; how long each takes on this
            machine is printed first.
        minutes: time after which nothing more is fitted or trained; None sets no limit. It does not
            raise the effort. Candidates left untried are printed, and listed in `report.dropped`.
        candidates: your own candidates by name: posteriors over weights such as `DeepEnsemble`,
            fitted to training data only, or Keras models, with the inputs and outputs of `model`.
        build: for "trainings", a function that returns a compiled, untrained network like `model`,
            for what a copy with new weights and a copy of its optimizer cannot repeat, such as
            pretrained weights. None makes such copies.
        epochs: number of epochs of fine-tuning; it raises the effort to at least "minutes". None
            takes a tenth of the model's epochs, at least 3 and at most a sixth of them; below one
            epoch, a part of its steps.
        optimizer: for fine-tuning; it also raises the effort to at least "minutes". None takes the
            model's own at a tenth of its learning rate, or of the largest one of its schedule. The
            posterior uses five times that rate.
        loss: a Keras loss; None takes the one that the model is compiled with.
        samples: number of draws of a posterior, or of MC dropout, per prediction.
        batch_size: of training arrays; None takes that of the model's last `fit`, or 32 if that is
            unknown, as with a model from a file.
        seed: of the splits, the order of the examples, new weights and the draws.
        verbose: print progress, at least every ten seconds.

    A warning names a model that is at chance on the validation data or much worse there than on its
    training data, batch normalization whose averages lag behind, and a chosen candidate that is
    less accurate than the model as it is.

    Returns:
        A `Report`. `model` is the chosen `MonteCarlo`, `model_of(name)` that of any candidate;
        `table()` has the scores of all candidates, `evaluate(test)` those on new data. It also has
        `plot()` and `save(folder)`.

    Raises:
        ValueError: for a model, data or candidates that cannot be used; the message says why.

    Example:
        >>> import keras, numpy as np, tfp_ibnn as ibnn
        >>> random = np.random.default_rng(0)
        >>> x = random.normal(size=(300, 2)).astype("float32")
        >>> y = (x[:, 0] + random.normal(size=300) > 0).astype(int)
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, "softmax")])
        >>> model.compile("adam", "sparse_categorical_crossentropy")
        >>> train, validation = (x[:200], y[:200]), (x[200:], y[200:])
        >>> report = ibnn.calibrate(model, train, validation, samples=4, verbose=False)
        >>> type(report.model).__name__
        'MonteCarlo'
    """
    start = time.monotonic()
    effort = _effort(model, effort, epochs, optimizer, build)
    samples = checks.positive_integer("samples", samples, least=2)
    end = deadline(minutes)
    batch_size = None if batch_size is None else checks.positive_integer("batch_size", batch_size)
    seed = checks.whole("seed", seed)
    model = as_network(model)
    output, loss = likelihood_for_calibration(model, loss)
    posteriors = posteriors_of(candidates or {}, model)
    if effort != "seconds":
        optimizer = fine_tuning_optimizer(model, optimizer)
    say = printer(verbose)

    with Heartbeat("reading the data", say):
        training, data = prepare(train, validation, model, output, batch_size, seed)
    model_epochs = epochs_of(model, training)
    if effort == "trainings":
        check_build(build, model_epochs)
    _announce(training, data, say)
    setting = Setting(
        model=model,
        output=output,
        optimizer=optimizer,
        loss=loss,
        training=training,
        data=data,
        samples=samples,
        seed=seed,
        end=end,
        say=say,
        epochs=epochs or epochs_of_fine_tuning(model_epochs),
        model_epochs=model_epochs,
        effort=effort,
        most=math.inf if epochs else HALF,
    )
    # Candidates that cannot be used raise here, before any work is done.
    engines = {name: posterior_engine(setting, each) for name, each in posteriors.items()}
    setting = setting._replace(candidates=engines)
    report = _compare(setting, minutes, build, start)
    if report.lost():
        warnings.warn(f"Chosen: {report.chosen.name}. {report.lost()}", stacklevel=2)
    return report


def _effort(model: Any, effort: Any, epochs: Any, optimizer: Any, build: Any) -> str:
    """Return the effort, at least "minutes" if epochs or an optimizer are given, or raise.

    Warn if the model has a training of its own, which is not repeated.
    """
    effort = checks.one_of("effort", effort, tuple(METHODS))
    if epochs is not None:
        checks.positive_integer("epochs", epochs)
    is_fine_tuned = epochs is not None or optimizer is not None
    if is_fine_tuned and effort == "seconds":
        effort = "minutes"
    if build is not None and effort != "trainings":
        raise ValueError(f"`build` is for effort='trainings'; got effort={effort!r}.")
    if effort != "seconds":
        warn_of_own_training(model, build)
    return effort


def _announce(training: Training, data: Validation, say: Callable[[str], None]) -> None:
    """Print how many examples there are, and what the next lines mean."""
    say(f"Training examples: {training.size:,}. Validation examples: {data.shares}.")
    if training.is_assumed:
        say("Batches of 32 are assumed: give `batch_size`, as in the training of `model`.")
    say("Each NLL is on the examples to fit, at the temperature or scale that suits it best.")
    say("The first prediction and the first epoch of each kind take longer: they are compiled.")


def _compare(
    setting: Setting,
    minutes: float | None,
    build: Callable[[], keras.Model] | None,
    start: float,
) -> Report:
    """Compare everything that an effort tries, and report it.

    Args:
        setting: what the candidates are made of, and the effort.
        minutes: the time limit, for a message.
        build: makes fresh networks; None copies the model with new weights.
        start: the `time.monotonic` at the start.
    """
    say = setting.say
    effort = setting.effort
    begun = time.monotonic()
    # The model as it is comes first: all others are compared with it, and timed by it.
    first_method, *others = METHODS["seconds"]
    trials = list(first_method(setting))
    _watch_as_it_is(trials[0], setting)
    first_seconds = time.monotonic() - begun
    doubts = _doubts(trials[0], setting)
    seconds = 0.0
    if say is not silent or effort == "trainings":
        seconds = announce_times(trials[0], setting, start, first_seconds)
    if effort == "trainings":  # only now is it known how long a training takes
        fresh = FreshNetworks(setting, build, seconds)
        setting = setting._replace(fresh=fresh)
    stages = {name: METHODS[name] for name in up_to(effort)}
    stages["seconds"] = others
    is_interrupted = run_stages(stages, trials, setting)
    mark_untried(trials, None if is_interrupted else minutes, say)

    report = _report(trials, setting, doubts, is_interrupted)
    report.notes["effort"] = effort
    say(report.why())
    spent = in_words(time.monotonic() - start)
    gain = GAINS.get(effort, "")
    say(f"This took {spent}. {gain}".strip())
    return report


def _watch_as_it_is(trial: Trial, setting: Setting) -> None:
    with Heartbeat(trial.name, setting.say):
        nll = trial.watch(setting.data, setting.output)
    setting.say(f"{trial.name}: NLL {nll:.4f}")


def _doubts(trial: Trial, setting: Setting) -> list[str]:
    """Return what is wrong with the model as it is, and warn about that."""
    with Heartbeat(trial.name, setting.say):
        doubts = doubts_about(trial, setting)
    for doubt in doubts:
        warnings.warn(doubt, stacklevel=4)
    return doubts


def _report(
    trials: Sequence[Trial], setting: Setting, doubts: Sequence[str], is_interrupted: bool
) -> Report:
    """Choose one of the candidates, which have been scored on the examples of the selection.

    Args:
        trials: all that were made.
        setting: what they are made of.
        doubts: what is wrong with the model as it is.
        is_interrupted: whether Ctrl-C ended the comparison.
    """
    score = setting.data.score
    candidates = []
    dropped = {}
    for trial in trials:
        candidates += trial.candidates
        dropped |= trial.dropped
        if trial.fate:
            dropped[trial.name] = trial.fate
    tried = [trial for trial in trials if not trial.fate]
    notes = _notes(tried, setting, doubts, is_interrupted)
    return Report(
        candidates=candidates,
        dropped=dropped,
        output=setting.output,
        y=score.y,
        notes=notes,
        seed=setting.seed,
        weight=score.weight,
        groups=groups_of(score),
        scored=described(score, "validation examples"),
    )


def _notes(
    tried: Sequence[Trial], setting: Setting, doubts: Sequence[str], is_interrupted: bool
) -> dict[str, Any]:
    """Return what the model card says about the run; `_report` has the arguments."""
    best_epochs = [f"{trial.name}: {trial.epochs}" for trial in tried if trial.trained]
    return {
        "training examples": setting.training.size,
        "validation examples": setting.data.shares,
        "best epochs": ", ".join(best_epochs) or "none",
        "interrupted": "yes" if is_interrupted else "no",
        "doubts": " ".join(doubts) or "none",
        "draws": setting.samples,
        "seed": setting.seed,
    }
