"""The comparison, effort by effort: trials are made, scored and trained."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from tfp_ibnn._core.progress import Heartbeat
from tfp_ibnn.calibration.fine_tuning import fine_tune
from tfp_ibnn.calibration.trials import Method, Setting, Trial
from tfp_ibnn.likelihoods import Likelihood


def run_stages(
    stages: Mapping[str, Sequence[Method]], trials: list[Trial], setting: Setting
) -> bool:
    """Add the trials of all methods, score those that are not trained, and train the rest.

    Args:
        stages: the methods of each effort, in order, except the very first one.
        trials: that of the first method, which has been scored; the others are appended.
        setting: what they are made of.

    Returns:
        Whether Ctrl-C ended the comparison; what was done before is kept.
    """
    data = setting.data
    try:
        parameter = setting.output.fit(trials[0].watched(), data.fit.y, data.fit.weight)
        setting = setting._replace(parameter=parameter)
        for stage, methods in stages.items():
            added = []
            for trial in _with_heartbeat(methods, setting):
                _check_name(trial, trials, setting.output, stage)
                trials.append(trial)
                added.append(trial)
                _try(trial, setting)
            fine_tune([trial for trial in added if trial.trained and not trial.fate], setting)
    except KeyboardInterrupt:
        setting.say("Interrupted: what has been tried and trained so far is compared.")
        return True
    return False


def mark_untried(
    trials: Iterable[Trial], minutes: float | None, say: Callable[[str], None]
) -> None:
    """Drop the trials that were never scored, and report those that `minutes` left out.

    Args:
        trials: all that were made.
        minutes: the time limit; None if there was none, or if Ctrl-C ended the run.
        say: prints a line.
    """
    untried = [trial for trial in trials if math.isinf(trial.nll) and not trial.fate]
    for trial in untried:
        trial.fate = "there was no time for it"
    if untried and minutes is not None:
        names = ", ".join(trial.name for trial in untried)
        say(f"`minutes={minutes:g}` left untried: {names}. Give more to compare them.")


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


def _try(trial: Trial, setting: Setting) -> None:
    """Score a trial that is not trained, and warn of one that is left out."""
    if not trial.trained and not trial.fate:
        with Heartbeat(trial.name, setting.say):
            trial.try_states(setting.data, setting.output, setting.end)
    if trial.fate:
        # The warning points at the line that calls `calibrate`.
        warnings.warn(f"{trial.name}: left out, since {trial.fate}", stacklevel=5)
    elif math.isfinite(trial.nll):
        setting.say(f"{trial.name}: NLL {trial.nll:.4f}")


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
