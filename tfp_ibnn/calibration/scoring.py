"""Trials become candidates: they are scored on the examples of the selection."""

import time
from collections.abc import Mapping

import numpy as np

from tfp_ibnn._core.progress import Heartbeat
from tfp_ibnn.calibration.candidates import Candidate, predict
from tfp_ibnn.calibration.doubts import errors_of
from tfp_ibnn.calibration.examples import Validation
from tfp_ibnn.calibration.trials import Setting, Trial
from tfp_ibnn.likelihoods import Likelihood


def candidates_of(
    trial: Trial, variants: Mapping[str, bool | str], setting: Setting
) -> list[Candidate]:
    """Return the candidates of a trial, with and without a fitted parameter.

    Args:
        trial: one that has been watched.
        variants: the suffix of each name, and which parameter is fitted; see `Likelihood`.
        setting: what the outputs mean, and the examples to fit and to score.
    """
    start = time.monotonic()
    output = setting.output
    data = setting.data
    kinds = variants.values()
    with Heartbeat(f"scoring {trial.name}{next(iter(variants))}", setting.say):
        raw = trial.watched()
        weight = data.fit.weight
        parameters = [output.parameter(raw, data.fit.y, fitted, weight) for fitted in kinds]
        if data.folds is None:
            predictions = predict(trial, output, data.score, parameters)
        else:
            predictions = [cross_fitted(trial, output, data, fitted) for fitted in kinds]
    candidates = []
    rows = zip(variants.items(), parameters, predictions, strict=True)
    for (suffix, is_fitted), parameter, prediction in rows:
        # The time of a fit counts for those alone that have a fitted parameter.
        seconds = time.monotonic() - start if is_fitted else 0.0
        candidate = Candidate(
            name=trial.name + suffix,
            trial=trial,
            parameter=parameter,
            seconds=trial.seconds + seconds,
            prediction=prediction,
            nll=output.nll(prediction, data.score.y),
            errors=errors_of(output, prediction, data.score.y),
        )
        candidates.append(candidate)
    return candidates


def cross_fitted(
    trial: Trial, output: Likelihood, data: Validation, fitted: bool | str
) -> np.ndarray:
    """Return predictions for all examples, by epochs and parameters chosen without their fold.

    Args:
        trial: one that has been watched.
        output: what its outputs mean.
        data: the examples, with their folds.
        fitted: which parameter is fitted; see `Likelihood`.
    """
    parts = []
    for fold, is_kept in enumerate(data.without_each_fold()):
        raw = trial.watched(fold)
        weight = data.fit.weight_of(is_kept)
        parameter = output.parameter(raw[is_kept], data.fit.y[is_kept], fitted, weight)
        parts.append(output.predict(raw[~is_kept], parameter))
    by_fold = np.argsort(data.folds, kind="stable")
    original_order = np.argsort(by_fold)
    return np.concatenate(parts)[original_order]
