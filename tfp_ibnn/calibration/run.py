"""From a trained model to a calibrated one, in one call."""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfp_ibnn._core import checks
from tfp_ibnn._core.progress import Heartbeat, printer
from tfp_ibnn.calibration.candidates import Candidate, predict
from tfp_ibnn.calibration.doubts import doubts_about, errors_of
from tfp_ibnn.calibration.examples import Training, Validation, prepare
from tfp_ibnn.calibration.fine_tuning import fine_tune, fine_tuning_optimizer
from tfp_ibnn.calibration.report import Report
from tfp_ibnn.calibration.trials import METHODS, Method, Setting, Trial, deadline
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.conversion.wrappers import PredictionWrapper
from tfp_ibnn.likelihoods import Likelihood
from tfp_ibnn.likelihoods.infer import likelihood_for_calibration
from tfp_ibnn.likelihoods.last_layer import activation_of
from tfp_ibnn.weights import WeightPosterior, WeightSets
from tfp_ibnn.weights.features import check_network, check_rows


def calibrate(
    model: keras.Model,
    train: Any,
    validation: Any = None,
    *,
    candidates: Mapping[str, Any] | None = None,
    epochs: int | None = None,
    minutes: float | None = None,
    optimizer: Any = None,
    loss: Any = None,
    samples: int = 32,
    batch_size: int | None = None,
    seed: int = 0,
    verbose: bool = True,
) -> Report:
    """Calibrate a trained model's probabilities by the cheapest method that is as good as the best.

    The candidates are the model as it is, MC dropout where it has dropout, the model fine-tuned,
    `Laplace` of the last layer and of all weights, Gaussian posteriors of z (`NormalAffine`) of two
    prior scales and three weights of the KL, and your own; each also with a temperature. Half of
    the validation data serves to fit temperatures and Laplace's prior precision, to stop training
    and to drop Gaussian posteriors on the way; the other half to choose the cheapest candidate
    whose NLL is within one standard error of the best. Below 1,000 validation examples both are
    done on all of them, by five-fold cross-fitting.

    A regression with a squared loss becomes Gaussian, with a fitted standard deviation; one with a
    `GaussianHead` gets a factor for its standard deviations. The model itself is not changed.
    Ctrl-C ends the training, not the comparison.

    Args:
        model: a trained Functional or Sequential model with one output.
        train: arrays (x, y) or (x, y, weight), a `tf.data.Dataset` or a `PyDataset`.
        validation: the same, of examples that the model was not trained on; one of weight 2 counts
            as two. None takes a fifth of the training arrays, which is second best.
        candidates: further ones by name: posteriors over weights such as `DeepEnsemble`, fitted to
            training data only, or Keras models, with the inputs and outputs of `model`.
        epochs: of fine-tuning; None takes 3, or a tenth of those of the model if that is more.
        minutes: after which no further fit or epoch starts; without `epochs` the only limit. What
            is left untried is printed, and listed in `report.dropped`.
        optimizer: None is the model's own at a tenth of its rate. Posteriors use five times that.
        loss: None takes the one that the model is compiled with.
        samples: draws of a posterior, or of MC dropout, in a prediction.
        batch_size: of training arrays; None is 32.
        seed: of the splits, the order of the examples and the draws.
        verbose: print progress, at least every ten seconds.

    A warning names a model that is at chance on the validation data or much worse there than on its
    training data, batch normalization whose averages lag behind, and a chosen candidate that is
    less accurate than the model as it is.

    Returns:
        A `Report`: `model`, the `MonteCarlo` that was chosen, or `model_of(name)`; `table()`, the
        scores of all candidates, or `evaluate(test)` on new data; `plot()`; `save(folder)`.

    Raises:
        ValueError: for a model, data or candidates that cannot be used; the message says why.

    Example:
        >>> import keras, numpy as np, tfp_ibnn as ibnn
        >>> random = np.random.default_rng(0)
        >>> x = random.normal(size=(300, 2)).astype("float32")
        >>> y = (x[:, 0] + random.normal(size=300) > 0).astype(int)
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, "softmax")])
        >>> model.compile("adam", "sparse_categorical_crossentropy")
        >>> options = {"epochs": 1, "samples": 4, "verbose": False}
        >>> report = ibnn.calibrate(model, (x[:200], y[:200]), (x[200:], y[200:]), **options)
        >>> type(report.model).__name__
        'MonteCarlo'
    """
    samples = checks.positive_integer("samples", samples, least=2)
    if epochs is not None:
        epochs = checks.positive_integer("epochs", epochs)
    end = deadline(minutes)
    if batch_size is not None:
        batch_size = checks.positive_integer("batch_size", batch_size)
    seed = checks.whole("seed", seed)
    _check_model(model)
    output, loss = likelihood_for_calibration(model, loss)
    posteriors = _posteriors(candidates or {}, model)
    optimizer = fine_tuning_optimizer(model, optimizer)
    say = printer(verbose)

    with Heartbeat("reading the data", say):
        training, data = prepare(train, validation, model, output, batch_size, seed)
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
        candidates=posteriors,
        end=end,
        say=say,
    )

    first_method, *methods = METHODS
    trials = list(first_method(setting))
    doubts = _watch_as_it_is(trials[0], setting)
    if epochs is None and minutes is None:
        epochs = _default_epochs(model, training)
    is_interrupted = _run_trials(methods, trials, setting, epochs)
    _mark_untried(trials, None if is_interrupted else minutes, say)

    report = _report(trials, setting, doubts, is_interrupted)
    say(report.why())
    if report.lost():
        warnings.warn(f"Chosen: {report.chosen.name}. {report.lost()}", stacklevel=2)
    return report


def _check_model(model: Any) -> None:
    """Raise if a model is not a network with one output of shape (N, K)."""
    if isinstance(model, PredictionWrapper):
        raise ValueError(
            f"`model` is a {type(model).__name__} already: give the network inside it."
        )
    check_network(model)
    check_rows(model.output_shape)


def _posteriors(candidates: Mapping[str, Any], model: keras.Model) -> dict[str, WeightPosterior]:
    """Return the candidates of the user as posteriors over weights, or raise.

    Args:
        candidates: posteriors over weights or Keras models, by name.
        model: the one whose inputs and outputs they must have.
    """
    posteriors = {}
    for name, candidate in dict(candidates).items():
        is_posterior = isinstance(candidate, WeightPosterior)
        network = candidate.network if is_posterior else candidate
        if isinstance(network, PredictionWrapper) or not isinstance(network, keras.Model):
            raise ValueError(
                f"`candidates[{name!r}]` must be a posterior over weights, such as "
                "ibnn.DeepEnsemble(models), or a plain Keras model; "
                f"got {type(candidate).__name__}."
            )
        ends = _ends(functional_graph(network))
        expected_ends = _ends(functional_graph(model))
        if ends != expected_ends:
            raise ValueError(
                f"`candidates[{name!r}]` has {ends}; `model` has {expected_ends}, "
                "and they must be alike."
            )
        posteriors[name] = candidate if is_posterior else WeightSets([candidate])
    return posteriors


def _ends(graph: keras.Model | None) -> str:
    """Describe the shapes of a model's inputs and outputs, and whether these are probabilities."""
    if graph is None:
        return "no graph: it is not built, or not a Functional or Sequential model"
    inputs = [tuple(tensor.shape[1:]) for tensor in graph.inputs]
    outputs = [tuple(tensor.shape[1:]) for tensor in graph.outputs]
    if activation_of(graph) in ("softmax", "sigmoid"):
        return f"inputs {inputs} and outputs {outputs}, probabilities"
    return f"inputs {inputs} and outputs {outputs}, not probabilities"


def _announce(training: Training, data: Validation, say: Callable[[str], None]) -> None:
    """Report how many examples there are, and what the next lines mean."""
    say(f"Training examples: {training.size:,}. Validation examples: {data.shares}.")
    say("Each NLL is of those to fit, at the temperature or scale that suits it best.")
    say("The first prediction and the first epoch of each kind take longer: they are compiled.")


def _watch_as_it_is(trial: Trial, setting: Setting) -> list[str]:
    """Score the model as it is; return what is wrong with it, and warn about that."""
    with Heartbeat(trial.name, setting.say):
        nll = trial.watch(setting.data, setting.output)
        doubts = doubts_about(trial, setting)
    setting.say(f"{trial.name}: NLL {nll:.4f}")
    for doubt in doubts:
        warnings.warn(doubt, stacklevel=3)
    return doubts


def _default_epochs(model: keras.Model, training: Training) -> int:
    """Return a tenth of the epochs that the model was trained for, and at least 3."""
    if not model.compiled or model.optimizer is None:
        return 3
    steps = float(model.optimizer.iterations)
    return max(3, round(steps / training.steps / 10))


def _run_trials(
    methods: Sequence[Method], trials: list[Trial], setting: Setting, epochs: int | None
) -> bool:
    """Add the trials of the other methods, score what is not trained, and train the rest.

    Args:
        methods: all but the first one.
        trials: those of the first one, which has been scored; the others are added to it.
        setting: what they are made of.
        epochs: of the fine-tuning; None is limited by the time alone.

    Returns:
        Whether Ctrl-C ended it; what was done before stays.
    """
    data = setting.data
    output = setting.output
    try:
        parameter = output.fit(trials[0].watched(), data.fit.y, data.fit.weight)
        setting = setting._replace(parameter=parameter)
        for trial in _with_heartbeat(methods, setting):
            _check_name(trial, trials, output)
            trials.append(trial)
            if trial.trained:
                continue
            with Heartbeat(trial.name, setting.say):
                trial.try_states(data, output)
            if not trial.fate:
                setting.say(f"{trial.name}: NLL {trial.nll:.4f}")
        fine_tune([trial for trial in trials if trial.trained], setting, epochs)
    except KeyboardInterrupt:
        setting.say("Interrupted: what has been trained so far is compared.")
        return True
    return False


def _with_heartbeat(methods: Iterable[Method], setting: Setting) -> Iterator[Trial]:
    """Yield the trials of methods, some of which take long to make."""
    for method in methods:
        label = f"preparing {method.__name__.replace('_', ' ')}"
        remaining = iter(method(setting))
        while True:
            with Heartbeat(label, setting.say):
                trial = next(remaining, None)
            if trial is None:
                break
            yield trial


def _check_name(trial: Trial, trials: Iterable[Trial], output: Likelihood) -> None:
    """Raise if a candidate of another trial has the name of this one."""
    suffixes = [*output.variants, *output.variants_as_it_is]
    for other in trials:
        if trial.name in [other.name + suffix for suffix in suffixes]:
            raise ValueError(f"`candidates` must have other names than {trial.name!r}.")


def _mark_untried(
    trials: Iterable[Trial], minutes: float | None, say: Callable[[str], None]
) -> None:
    """Drop the trials that were never scored, and report those that `minutes` left out."""
    untried = [trial for trial in trials if math.isinf(trial.nll) and not trial.fate]
    for trial in untried:
        trial.fate = "there was no time for it"
    if untried and minutes is not None:
        names = ", ".join(trial.name for trial in untried)
        say(f"`minutes={minutes:g}` left untried: {names}. Give more to compare them.")


def _report(
    trials: Sequence[Trial], setting: Setting, doubts: Sequence[str], is_interrupted: bool
) -> Report:
    """Score the trials that are left on the examples of the selection, and choose one.

    Args:
        trials: all that were made.
        setting: what they are made of.
        doubts: what is wrong with the model as it is.
        is_interrupted: whether Ctrl-C has ended the training.
    """
    data = setting.data
    candidates = []
    dropped = {}
    best_epochs = []
    for trial in trials:
        if trial.fate:
            dropped[trial.name] = trial.fate
            continue
        if trial.trained:
            best_epochs.append(f"{trial.name}: {trial.epochs}")
        with Heartbeat(f"scoring {trial.name}", setting.say):
            variants = setting.output.variants
            if trial is trials[0]:
                variants = {**variants, **setting.output.variants_as_it_is}
            candidates += _candidates(trial, setting.output, data, variants)
    notes = {
        "training examples": setting.training.size,
        "validation examples": data.shares,
        "best epochs": ", ".join(best_epochs) or "none",
        "interrupted": "yes" if is_interrupted else "no",
        "doubts": " ".join(doubts) or "none",
        "draws": setting.samples,
        "seed": setting.seed,
    }
    return Report(
        candidates=candidates,
        dropped=dropped,
        output=setting.output,
        y=data.score.y,
        notes=notes,
        seed=setting.seed,
        weight=data.score.weight,
    )


def _candidates(
    trial: Trial, output: Likelihood, data: Validation, variants: Mapping[str, bool | str]
) -> list[Candidate]:
    """Return what a trial gives with and without a fitted parameter.

    Args:
        trial: what has been watched.
        output: what its outputs mean.
        data: the examples to fit, and those to score.
        variants: what is added to its name, and which parameter is fitted; see `Likelihood`.
    """
    start = time.monotonic()
    kinds = variants.values()
    raw = trial.watched()
    weight = data.fit.weight
    parameters = [output.parameter(raw, data.fit.y, fitted, weight) for fitted in kinds]
    if data.folds is None:
        predictions = predict(trial, output, data.score, parameters)
    else:
        predictions = [_cross_fitted(trial, output, data, fitted) for fitted in kinds]
    candidates = []
    seconds = trial.seconds
    for suffix, parameter, prediction in zip(variants, parameters, predictions, strict=True):
        candidate = Candidate(
            name=trial.name + suffix,
            trial=trial,
            parameter=parameter,
            seconds=seconds,
            prediction=prediction,
            nll=output.nll(prediction, data.score.y),
            errors=errors_of(output, prediction, data.score.y),
        )
        candidates.append(candidate)
        # Those after the first have a fitted parameter, whose time counts for them alone.
        seconds = trial.seconds + time.monotonic() - start
    return candidates


def _cross_fitted(
    trial: Trial, output: Likelihood, data: Validation, fitted: bool | str
) -> np.ndarray:
    """Return predictions for all examples, by epochs and parameters chosen without their fold."""
    parts = []
    for fold, is_kept in enumerate(data.without_each_fold()):
        raw = trial.watched(fold)
        weight = data.fit.weight_of(is_kept)
        parameter = output.parameter(raw[is_kept], data.fit.y[is_kept], fitted, weight)
        parts.append(output.predict(raw[~is_kept], parameter))
    by_fold = np.argsort(data.folds, kind="stable")
    original_order = np.argsort(by_fold)
    return np.concatenate(parts)[original_order]
