"""The comparison, effort by effort: trials are made, scored and trained."""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from tfp_ibnn._core.progress import Heartbeat
from tfp_ibnn.calibration.fine_tuning import fine_tune
from tfp_ibnn.calibration.scoring import candidates_of
from tfp_ibnn.calibration.trials import NO_TIME, Method, Setting, Trial, first_line
from tfp_ibnn.likelihoods import Likelihood


def run_stages(
    stages: Mapping[str, Sequence[Method]], trials: list[Trial], setting: Setting
) -> bool:
    """Add the trials of all methods, train some of them, and score each as soon as it is ready.

    Args:
        stages: the methods of each effort, in order, except the very first one.
        trials: that of the first method, which has been watched; the others are appended.
        setting: what they are made of.

    Returns:
        Whether Ctrl-C ended the comparison; what was done before is kept.
    """
    first = trials[0]
    first.effort = next(iter(stages))
    for suffix in setting.output.variants_as_it_is:
        first.dropped[first.name + suffix] = NO_TIME
    try:
        _score_as_it_is(first, setting)
        data = setting.data
        parameter = setting.output.fit(first.watched(), data.fit.y, data.fit.weight)
        setting = setting._replace(parameter=parameter)
        for stage, methods in stages.items():
            _run_stage(stage, methods, trials, setting)
    except KeyboardInterrupt:
        setting.say("Interrupted: what has been tried and trained so far is compared.")
        _finish(stages, trials, setting)
        return True
    return False


def _run_stage(
    stage: str, methods: Sequence[Method], trials: list[Trial], setting: Setting
) -> None:
    """Add the trials of the methods of an effort, and train and score them."""
    trained = []
    for trial in _with_heartbeat(methods, setting):
        _check_name(trial, trials, setting.output, stage)
        trial.effort = trial.effort or stage
        trials.append(trial)
        if trial.trained and not trial.fate:
            trained.append(trial)
        else:
            _try(trial, setting)
    fine_tune(trained, setting)
    for trial in trained:
        _try(trial, setting)


def _finish(stages: Mapping[str, Sequence[Method]], trials: list[Trial], setting: Setting) -> None:
    """After Ctrl-C, score what has been trained, and add the trials that were never made."""
    try:
        first, *others = trials
        if not first.candidates:
            first.candidates += candidates_of(first, setting.output.variants, setting)
        for trial in others:
            if trial.trainings and not trial.candidates:
                _try(trial, setting)
        late = setting._replace(end=-math.inf)
        names = [trial.name for trial in trials]
        for methods in stages.values():
            untried = _with_heartbeat(methods, late)
            trials += [trial for trial in untried if trial.name not in names]
    except KeyboardInterrupt:  # a second one
        if not trials[0].candidates:
            raise


def mark_untried(
    trials: Iterable[Trial], minutes: float | None, say: Callable[[str], None]
) -> None:
    """Drop the trials that were never scored, and print their names.

    Args:
        trials: all that were made.
        minutes: the time limit; None if there was none, or if Ctrl-C ended the run.
        say: prints a line.
    """
    names = []
    for trial in trials:
        if not trial.candidates and not trial.fate:
            trial.fate = NO_TIME
        reasons = {**trial.dropped, trial.name: trial.fate}
        names += [name for name, reason in reasons.items() if reason == NO_TIME]
    if not names:
        return
    untried = ", ".join(names)
    if minutes is None:
        say(f"Ctrl-C left untried: {untried}.")
    else:
        say(f"`minutes={minutes:g}` left untried: {untried}. Give more to compare them.")


def _with_heartbeat(methods: Iterable[Method], setting: Setting) -> Iterator[Trial]:
    """Yield the trials of methods, some of which may take a long time to make, or fail."""
    for method in methods:
        label = method.__name__.replace("_", " ")
        remaining = _trials_of(method, label, setting)
        while True:
            with Heartbeat(f"preparing {label}", setting.say):
                trial = next(remaining, None)
            if trial is None:
                break
            yield trial


def _trials_of(method: Method, label: str, setting: Setting) -> Iterator[Trial]:
    """Yield the trials of a method; if it fails, yield one that is left out."""
    try:
        yield from method(setting)
    except Exception as error:
        yield Trial(label).leave_out(error)


def _score_as_it_is(trial: Trial, setting: Setting) -> None:
    """Score the model as it is, and its scalings of each class, one of which may fail."""
    trial.candidates += candidates_of(trial, setting.output.variants, setting)
    for suffix, kind in setting.output.variants_as_it_is.items():
        if time.monotonic() > setting.end:
            return
        name = trial.name + suffix
        try:
            trial.candidates += candidates_of(trial, {suffix: kind}, setting)
            del trial.dropped[name]
        except Exception as error:
            trial.dropped[name] = first_line(error)
            warnings.warn(f"{name}: left out, since {first_line(error)}", stacklevel=5)


def _try(trial: Trial, setting: Setting) -> None:
    """Watch a trial that is not trained, and score it; warn of one that is left out.

    What has been trained is scored even after the time limit.
    """
    end = math.inf if trial.trainings else setting.end
    if not trial.trained and not trial.fate:
        with Heartbeat(trial.name, setting.say):
            trial.try_states(setting.data, setting.output, end)
        if not trial.fate and math.isfinite(trial.nll):
            setting.say(f"{trial.name}: NLL {trial.nll:.4f}")
    if not trial.fate and math.isfinite(trial.nll) and time.monotonic() <= end:
        try:
            trial.candidates += candidates_of(trial, setting.output.variants, setting)
        except Exception as error:
            trial.leave_out(error)
    if trial.fate:
        # The warning points at the line that calls `calibrate`.
        warnings.warn(f"{trial.name}: left out, since {trial.fate}", stacklevel=6)


def _check_name(trial: Trial, trials: Iterable[Trial], output: Likelihood, stage: str) -> None:
    """Refuse a candidate of the user that has the name of another trial.

    After the first effort, the other trial is left out instead.
    """
    suffixes = [*output.variants, *output.variants_as_it_is]
    for other in trials:
        if trial.name not in [other.name + suffix for suffix in suffixes]:
            continue
        error = ValueError(f"`candidates` must have other names than {trial.name!r}.")
        if stage == "seconds":
            raise error
        trial.leave_out(error)
