"""From a trained model to a calibrated one, in one call."""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from tfp_ibnn._core import checks
from tfp_ibnn._core.progress import Heartbeat, printer
from tfp_ibnn.calibration.doubts import doubts_about, errors_of
from tfp_ibnn.calibration.examples import FOLDS, Validation, prepare
from tfp_ibnn.calibration.report import Candidate, Report, predict
from tfp_ibnn.calibration.trials import METHODS, Setting, Trial, fine_tune, fine_tuning_optimizer
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
        candidates: more of them by name: posteriors over weights such as `DeepEnsemble`, fitted to
            training data only, or Keras models, with the inputs and outputs of `model`.
        epochs: of fine-tuning; None takes 3, or a tenth of those of the model if that is more.
        minutes: after which no further fit or epoch starts; without `epochs` the only limit. What
            is left untried is printed, and listed in `report.dropped`.
        optimizer: None takes the model's own at a tenth of its rate. Posteriors have five times it.
        loss: None takes the one that the model is compiled with.
        samples: draws of a posterior, or of MC dropout, in a prediction.
        batch_size: of training arrays.
        seed: of the splits, the order of the examples and the draws.
        verbose: print progress, at least every ten seconds.

    A warning names a model that is at chance on the validation data or much worse there than on its
    training data, batch normalization whose averages lag behind, and a chosen candidate that is
    less accurate than the model as it is.

    Returns:
        A `Report`: `model`, the `MonteCarlo` that was chosen, or `model_of(name)`; `table()`, the
        scores of all candidates, or `evaluate(test)` on new data; `plot()`; `save(folder)`.

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
    epochs = None if epochs is None else checks.positive_integer("epochs", epochs)
    limit = math.inf if minutes is None else checks.positive("minutes", minutes)
    end = time.monotonic() + 60 * limit
    batch_size = None if batch_size is None else checks.positive_integer("batch_size", batch_size)
    seed = checks.whole("seed", seed)
    if isinstance(model, PredictionWrapper):
        kind = type(model).__name__
        raise ValueError(f"`model` is a {kind} already: give the network that it is made of.")
    check_network(model)
    check_rows(model.output_shape)
    output, loss = likelihood_for_calibration(model, loss)
    own = {name: _posterior(name, x, model) for name, x in dict(candidates or {}).items()}
    optimizer = fine_tuning_optimizer(model, optimizer)
    say = printer(verbose)
    with Heartbeat("reading the data", say):
        training, data = prepare(train, validation, model, output, batch_size, seed)
    choose = "cross-fitted" if data.folds is not None else f"{len(data.score.y):,} to choose"
    how = f"{len(data.fit.y):,} to fit, {choose}"
    say(f"Training examples: {training.size:,}. Validation examples: {how}.")
    say("Each NLL is of those to fit, at the temperature or scale that suits it best.")
    say("The first prediction and the first epoch of each kind take longer: they are compiled.")
    rest = (samples, seed, own, end, say)
    setting = Setting(model, output, optimizer, loss, training, data, *rest)
    first, *others = METHODS
    trials = list(first(setting))
    with Heartbeat(trials[0].name, say):
        nll = trials[0].watch(data, output)
        doubts = doubts_about(trials[0], setting)
    say(f"{trials[0].name}: NLL {nll:.4f}")
    for doubt in doubts:
        warnings.warn(doubt, stacklevel=2)
    if epochs is None and minutes is None:
        steps = float(model.optimizer.iterations) if model.compiled and model.optimizer else 0.0
        epochs = max(3, round(steps / training.steps / 10))
    interrupted = False
    try:
        parameter = output.fit(trials[0].watched(), data.fit.y, data.fit.weight)
        setting = setting._replace(parameter=parameter)
        for trial in _with_heartbeat(others, setting):
            if trial.name in {x.name + suffix for x in trials for suffix in output.variants}:
                raise ValueError(f"`candidates` must have other names than {trial.name!r}.")
            trials.append(trial)
            if not trial.trained:
                with Heartbeat(trial.name, say):
                    trial.try_states(data, output)
                if not trial.fate:
                    say(f"{trial.name}: NLL {trial.nll:.4f}")
        fine_tune([trial for trial in trials if trial.trained], setting, epochs)
    except KeyboardInterrupt:
        interrupted = True
        say("Interrupted: what has been trained so far is compared.")
    untried = [trial for trial in trials if math.isinf(trial.nll) and not trial.fate]
    for trial in untried:
        trial.fate = "there was no time for it"
    if untried and minutes is not None and not interrupted:
        names = ", ".join(trial.name for trial in untried)
        say(f"`minutes={minutes:g}` left untried: {names}. Give more to compare them.")
    kept = [trial for trial in trials if not trial.fate]
    found = []
    for trial in kept:
        with Heartbeat(f"scoring {trial.name}", say):
            found += _candidates(trial, output, data)
    notes = {
        "training examples": training.size,
        "validation examples": how,
        "best epochs": ", ".join(f"{x.name}: {x.epochs}" for x in kept if x.trained) or "none",
        "interrupted": "yes" if interrupted else "no",
        "doubts": " ".join(doubts) or "none",
        "draws": samples,
        "seed": seed,
    }
    dropped = {trial.name: trial.fate for trial in trials if trial.fate}
    report = Report(found, dropped, output, data.score.y, notes, seed, data.score.weight)
    say(report.why())
    if report.lost():
        warnings.warn(f"Chosen: {report.chosen.name}. {report.lost()}", stacklevel=2)
    return report


def _with_heartbeat(
    methods: Iterable[Callable[[Setting], Iterator[Trial]]], setting: Setting
) -> Iterator[Trial]:
    """Yield the trials of methods, some of which take long to be made."""
    for method in methods:
        made = iter(method(setting))
        while True:
            with Heartbeat(f"preparing {method.__name__.replace('_', ' ')}", setting.say):
                trial = next(made, None)
            if trial is None:
                break
            yield trial


def _posterior(name: str, given: Any, model: keras.Model) -> WeightPosterior:
    """Return a candidate of the user as a posterior over weights, or raise."""
    what = f"`candidates[{name!r}]`"
    network = given.network if isinstance(given, WeightPosterior) else given
    if isinstance(network, PredictionWrapper) or not isinstance(network, keras.Model):
        want = "a posterior over weights, such as ibnn.DeepEnsemble(models), or a plain Keras model"
        raise ValueError(f"{what} must be {want}; got {type(given).__name__}.")
    own, wanted = (_ends(functional_graph(x)) for x in (network, model))
    if own != wanted:
        raise ValueError(f"{what} has {own}; `model` has {wanted}, and they must be alike.")
    return given if isinstance(given, WeightPosterior) else WeightSets([given])


def _ends(graph: keras.Model | None) -> str:
    """Return the shapes of a model's inputs and outputs, and what these are."""
    if graph is None:
        return "no graph: it is not built, or not a Functional or Sequential model"
    x, y = ([tuple(x.shape[1:]) for x in part] for part in (graph.inputs, graph.outputs))
    is_probability = activation_of(graph) in ("softmax", "sigmoid")
    return f"inputs {x} and outputs {y}, {'not ' * (not is_probability)}probabilities"


def _candidates(trial: Trial, output: Likelihood, data: Validation) -> list[Candidate]:
    """Return what a trial gives with and without a fitted parameter."""
    start, fitted = time.monotonic(), list(output.variants.values())
    raw, y, weight = trial.watched(), data.fit.y, data.fit.weight
    parameters = [output.parameter(raw, y, is_fitted, weight) for is_fitted in fitted]
    if data.folds is None:
        predictions = predict(trial, output, data.score, parameters)
    else:
        predictions = [_cross_fitted(trial, output, data, fit) for fit in fitted]
    seconds, found = trial.seconds, []
    for suffix, parameter, x in zip(output.variants, parameters, predictions, strict=True):
        nll = output.nll(x, data.score.y)
        errors = errors_of(output, x, data.score.y)
        found.append(Candidate(trial.name + suffix, trial, parameter, seconds, x, nll, errors))
        seconds = trial.seconds + time.monotonic() - start
    return found


def _cross_fitted(trial: Trial, output: Likelihood, data: Validation, fitted: bool) -> np.ndarray:
    """Return predictions for all examples, by epochs and parameters chosen without their fold."""
    parts = []
    for fold in range(FOLDS):
        raw, others = trial.watched(fold), data.folds != fold
        weight = data.fit.weight_of(others)
        parameter = output.parameter(raw[others], data.fit.y[others], fitted, weight)
        parts.append(output.predict(raw[~others], parameter))
    order = np.argsort(data.folds, kind="stable")
    return np.concatenate(parts)[np.argsort(order)]
