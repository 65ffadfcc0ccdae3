"""Doubts about the given network, and about the chosen candidate."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.text import with_strings
from tfp_ibnn.calibration.candidates import behind
from tfp_ibnn.calibration.examples import Examples
from tfp_ibnn.calibration.rows import Rows, groups_of
from tfp_ibnn.calibration.trials import Setting, Trial
from tfp_ibnn.likelihoods import Likelihood
from tfp_ibnn.likelihoods.several import named_outputs

LARGE_GAP = 0.2
"""There is a doubt if the validation error exceeds the training error by more than this."""
LARGE_LAG = 0.1
"""There is a doubt if inference is worse than batch statistics by more than this."""
MARGIN = 1.96
"""A 95% margin, in standard errors."""

_BATCH = 256  # the batch whose statistics batch normalization takes


class _Part(NamedTuple):
    """What a network returns for the rows of one output, and the targets."""

    name: str
    output: Likelihood
    outputs: np.ndarray
    y: np.ndarray
    weight: np.ndarray | None
    groups: np.ndarray | None  # the example of each row, if examples have several

    @property
    def subject(self) -> str:
        """The subject of a sentence."""
        return f"Output {self.name!r} of `model`" if self.name else "`model`"


def _parts(output: Likelihood, outputs: np.ndarray, examples: Examples) -> list[_Part]:
    """Return the rows of each output.

    Args:
        output: what the outputs mean.
        outputs: of a network, (rows, draws, width).
        examples: with their targets and weights.
    """
    rows = output.split_rows(
        outputs=outputs,
        y=examples.y,
        weight=examples.weight,
        groups=groups_of(examples),
    )
    parts = []
    for name, part in output.parts.items():
        arrays = rows[name]
        arrays.pop("rows", None)
        parts.append(_Part(name, part, **arrays))
    return parts


def errors_of(output: Likelihood, prediction: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the error of each point prediction.

    Args:
        output: what the predictions mean.
        prediction: from `output.predict`.
        y: targets, as `output.targets` gives them.

    Returns:
        (examples,), or (rows,): 1 for a wrong class and 0 for a right one; of a regression the
        squared error, averaged over its outputs.
    """
    errors = np.empty(len(y))
    for name, rows in output.split_rows(prediction=prediction, y=y).items():
        part = output.parts[name]
        is_row = rows.get("rows", slice(None))
        if part.is_classifier:
            errors[is_row] = rows["prediction"].argmax(axis=1) != rows["y"]
        else:
            means = rows["prediction"][:, 0]
            errors[is_row] = np.square(rows["y"] - means).mean(axis=1)
    return errors


def losses(
    output: Likelihood,
    errors: tuple[np.ndarray, np.ndarray],
    prediction: np.ndarray,
    weight: np.ndarray | None,
    groups: np.ndarray | None,
) -> str:
    """Return which outputs have a larger error than before, beyond a 95% margin, in words.

    Args:
        output: what the predictions mean.
        errors: those before and those now, from `errors_of`.
        prediction: that of now, from `output.predict`.
        weight: how often each row counts; None is once.
        groups: the example of each row, if examples have several.

    Returns:
        Accuracies or RMSEs, such as "accuracy 0.90 against 0.92"; "" if there are none.
    """
    before, now = errors
    rows = output.split_rows(
        prediction=prediction,
        before=before,
        now=now,
        weight=weight,
        groups=groups,
    )
    found = []
    for name, part in output.parts.items():
        loss = _loss(part, rows[name])
        if loss:
            found.append(f"{name} {loss}".strip())
    return "; ".join(found)


def _loss(output: Likelihood, rows: Mapping[str, Any]) -> str:
    weight = rows["weight"]
    errors = [rows["before"], rows["now"]]
    distance, error = behind(errors, weight, best=0, groups=rows["groups"])
    more = distance[1]
    margin = MARGIN * error[1]
    if more <= margin:
        return ""
    before, now = np.average(errors, axis=1, weights=weight)
    if output.is_classifier:
        return f"accuracy {1 - now:.4f} against {1 - before:.4f}, {more:.4f} ± {margin:.4f} less"
    return f"RMSE {math.sqrt(now):.4f} against {math.sqrt(before):.4f}"


def doubts_about(trial: Trial, setting: Setting) -> list[str]:
    """Return what is wrong with the given network.

    It may be no better than chance on validation data; much worse there than on training data; or,
    on training data, much worse in inference than with the statistics of a batch, which batch
    normalization uses in training. The last problem causes the others, so it is reported alone.
    Each of several outputs is judged by itself.

    Args:
        trial: the network as it is, which has been watched.
        setting: its data, and what its outputs mean.

    Returns:
        Sentences for the user; none for a good network.
    """
    output = setting.output
    sample = setting.training.sample
    sample_outputs = trial.engine.draw(trial.state, sample.x)
    lags = _lags(trial, output, sample, sample_outputs)
    if lags:
        return lags
    known_parts = _parts(output, sample_outputs, sample)
    new_parts = _parts(output, trial.watched(), setting.data.fit)
    doubts = []
    for known, new in zip(known_parts, new_parts, strict=True):
        doubts.append(_chance(new))
        error = _relative_error(new)
        training_error = _relative_error(known)
        if error - training_error > LARGE_GAP:
            doubts.append(
                f"{new.subject} is much worse on the validation data than on its training data: "
                f"{_words(new, error)} against {_words(known, training_error)}. It is overfitted, "
                "or the two are preprocessed differently."
            )
    return [doubt for doubt in doubts if doubt]


def _chance(part: _Part) -> str:
    """Return a sentence if predictions are no better than a constant, else ""."""
    output = part.output
    parameter = output.fit(part.outputs, part.y, part.weight)
    prediction = output.predict(part.outputs, parameter)
    nll = output.nll(prediction, part.y)
    constant = _constant_nll(part, prediction.shape)
    distance, error = behind([nll, constant], part.weight, best=0, groups=part.groups)
    gain = distance[1]
    margin = MARGIN * error[1]
    if gain > margin:
        return ""
    score = _words(part, _relative_error(part))
    advice = (
        ", and the order of the labels"
        if output.is_classifier
        else ", and that it is trained on targets scaled to about 1"
    )
    return (
        f"{part.subject} is at chance on the validation data ({score}): at its best temperature or "
        f"scale it gains {gain:.4f} ± {margin:.4f} nats over one constant prediction for all "
        f"examples. Check that they are preprocessed as in training{advice}."
    )


def _constant_nll(part: _Part, shape: tuple[int, ...]) -> np.ndarray:
    """Return the NLL (rows,) of the classes' shares, or of the targets' mean and variance.

    Args:
        part: the targets.
        shape: of a prediction for them.
    """
    if part.output.is_classifier:
        counts = np.bincount(part.y, weights=part.weight, minlength=shape[1])
        counts = counts + 1.0  # so that no class has the probability 0
        nll = -np.log(counts / counts.sum())
        return nll[part.y]
    moments = np.stack(_moments(part))
    return part.output.nll(np.broadcast_to(moments, shape), part.y)


def _moments(part: _Part) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the variance of the targets, (width,) each."""
    mean = np.average(part.y, axis=0, weights=part.weight)
    squares = np.square(part.y - mean)
    return mean, np.average(squares, axis=0, weights=part.weight)


def _lags(
    trial: Trial, output: Likelihood, examples: Examples, in_inference: np.ndarray
) -> list[str]:
    """Return a sentence if the running averages of batch normalization lag behind.

    Args:
        trial: the network as it is.
        output: what its outputs mean.
        examples: of its training data.
        in_inference: its outputs for these, (rows, draws, width).
    """
    network = trial.engine.network
    layers = keras_internals.nested_layers(network)
    if not any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers):
        return []
    if not isinstance(examples.x, Rows):
        part = slice(_BATCH)
        examples = examples.take(part)
        in_inference = in_inference[part]
    in_training = _in_training(network, examples.x)
    lags = []
    pairs = zip(
        _parts(output, in_training, examples), _parts(output, in_inference, examples), strict=True
    )
    for trained, part in pairs:
        training_error = _relative_error(trained)
        error = _relative_error(part)
        # Written so that NaN does not count as a lag.
        if not error - training_error > LARGE_LAG:
            continue
        lags.append(
            f"{part.subject} is much worse in inference than in training, on the same examples: "
            f"{_words(part, error)} against {_words(part, training_error)}. The running averages "
            "of its batch normalization lag behind: its momentum is too high for so few steps. "
            "Train it for longer, or with keras.layers.BatchNormalization(momentum=0.9)."
        )
    return lags


def _in_training(network: keras.Model, x: Any) -> np.ndarray:
    """Return what a network returns in training, (rows, 1, width)."""

    def draw(inputs: Any) -> dict[str, np.ndarray]:
        outputs = network(with_strings(inputs), training=True)
        outputs = named_outputs(network, outputs)
        if not isinstance(outputs, dict):
            outputs = {"": outputs}
        drawn = {}
        for name, output in outputs.items():
            array = ops.convert_to_numpy(output)
            drawn[name] = array[:, None]
        return drawn

    if isinstance(x, Rows):
        return x.outputs(draw, 1)
    (outputs,) = draw(x).values()
    return outputs.astype("float32")


def _relative_error(part: _Part) -> float:
    """Return the share of wrong classes, or the RMSE over the deviation of the targets."""
    prediction = part.output.predict(part.outputs, 1.0)
    errors = errors_of(part.output, prediction, part.y)
    error = np.average(errors, weights=part.weight)
    if part.output.is_classifier:
        return float(error)
    _, variances = _moments(part)
    variance = max(variances.mean(), np.finfo("float64").tiny)
    return float(np.sqrt(error / variance))


def _words(part: _Part, error: float) -> str:
    if part.output.is_classifier:
        return f"accuracy {1 - error:.3f}"
    return f"an RMSE of {error:.3f} standard deviations of the targets"
