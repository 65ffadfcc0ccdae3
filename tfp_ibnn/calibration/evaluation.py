"""The predictions of candidates on new examples, as far as time and failures allow."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tfp_ibnn._core.progress import Heartbeat
from tfp_ibnn.calibration.candidates import Candidate, predict
from tfp_ibnn.calibration.examples import Examples
from tfp_ibnn.calibration.trials import Trial
from tfp_ibnn.likelihoods import Likelihood


class Evaluation(NamedTuple):
    """What was predicted, and what was not.

    Args:
        predictions: of candidates, by name.
        missing: why others have none, with their names, as parts of a sentence.
    """

    predictions: Mapping[str, np.ndarray]
    missing: Sequence[str]


def evaluation(
    candidates: Sequence[Candidate],
    chosen: Candidate,
    output: Likelihood,
    examples: Examples,
    end: float,
    say: Callable[[str], None],
) -> Evaluation:
    """Return the predictions of candidates, without those that fail or come after Ctrl-C.

    The chosen one and the first are predicted first, even after the time limit.

    Args:
        candidates: all of them.
        chosen: the chosen one.
        output: what they predict.
        examples: the new examples.
        end: the `time.monotonic` after which no other candidate starts.
        say: prints progress.

    Raises:
        Exception: that of the first candidate, or of Ctrl-C, if none has a prediction.
    """
    always = [chosen.trial, candidates[0].trial]
    others = [candidate.trial for candidate in candidates]
    order = list(dict.fromkeys([*always, *others]))  # each once
    predictions: dict[str, np.ndarray] = {}
    missing = []
    errors: list[BaseException] = []
    stopped_by = ""
    for place, trial in enumerate(order):
        try:
            if trial not in always and time.monotonic() > end:
                stopped_by = "`minutes`"
            else:
                predictions |= _scored(trial, candidates, output, examples, say)
        except KeyboardInterrupt as interrupt:
            stopped_by = "Ctrl-C"
            errors.append(interrupt)
        except Exception as error:  # it costs only this one
            errors.append(error)
            reason = (str(error) or type(error).__name__).splitlines()[0]
            missing.append(f"{_names(candidates, [trial])} failed: {reason}")
            say(missing[-1])
        if stopped_by:
            names = _names(candidates, order[place:])
            missing.append(f"{stopped_by} left out {names}")
            say(f"{stopped_by} ended the evaluation: {names} are not scored.")
            break
    if not predictions:
        raise errors[0]
    return Evaluation(predictions, missing)


def _names(candidates: Sequence[Candidate], trials: Sequence[Trial]) -> str:
    return ", ".join(x.name for x in candidates if x.trial in trials)


def _scored(
    trial: Trial,
    candidates: Sequence[Candidate],
    output: Likelihood,
    examples: Examples,
    say: Callable[[str], None],
) -> dict[str, np.ndarray]:
    """Return the predictions of a trial's candidates by name, and report their NLLs."""
    own = [candidate for candidate in candidates if candidate.trial is trial]
    parameters = [candidate.parameter for candidate in own]
    with Heartbeat(f"scoring {trial.name}", say):
        arrays = predict(trial, output, examples, parameters)
    predictions = {}
    for candidate, prediction in zip(own, arrays, strict=True):
        nll = output.nll(prediction, examples.y)
        say(f"{candidate.name}: NLL {np.average(nll, weights=examples.weight):.4f}")
        predictions[candidate.name] = prediction
    return predictions
