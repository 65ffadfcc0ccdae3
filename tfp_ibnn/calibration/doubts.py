"""Doubts about the network that is given, and about what is chosen in its place."""

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.text import with_strings
from tfp_ibnn.calibration.examples import Examples
from tfp_ibnn.calibration.trials import Setting, Trial
from tfp_ibnn.likelihoods import Likelihood

LARGE_GAP = 0.2
"""The error on validation data less that on training data from which on there is a doubt."""
LARGE_LAG = 0.1
"""The error in inference less that with the statistics of a batch, on the same examples."""
MARGIN = 1.96
"""A 95 % margin, in standard errors."""

_BATCH = 256  # whose statistics batch normalization takes


def errors_of(output: Likelihood, prediction: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the error (examples,) of point predictions: 0 or 1 of classes, squared of numbers."""
    if output.is_classifier:
        return (prediction.argmax(axis=1) != y).astype("float64")
    return np.square(y - prediction[:, 0]).mean(axis=1)


def doubts_about(trial: Trial, setting: Setting) -> list[str]:
    """Return what is wrong with a network, `trial`, that has been watched as it is.

    That is: no better than chance on validation data; much worse there than on training data; or,
    on training data, much worse in inference than with the statistics of a batch, which batch
    normalization uses while it trains. The last one is the cause of the others, and named alone.
    """
    output, known = setting.output, setting.data.fit
    raw = trial.watched()
    found = [_chance(output, raw, known)]
    examples = setting.training.sample
    raw_of_training = trial.engine.draw(trial.state, examples.x)
    there = _relative_error(output, raw_of_training, examples)
    here = _relative_error(output, raw, known)
    if here - there > LARGE_GAP:
        found.append(
            f"`model` is much worse on the validation data than on its training data: "
            f"{_words(output, here)} against {_words(output, there)}. It is overfitted, or the two "
            "are not preprocessed alike."
        )
    lag = _lag(trial, output, examples, raw_of_training)
    return [lag] if lag else [doubt for doubt in found if doubt]


def _chance(output: Likelihood, raw: np.ndarray, known: Examples) -> str:
    """Return that predictions are no better than a constant one, or nothing."""
    y, weight = known.y, known.weight
    parameter = output.fit(raw, y, weight)
    own = output.nll(output.predict(raw, parameter), y)
    gain = _constant_nll(output, known) - own
    count = np.float64(len(y) if weight is None else weight.sum())
    mean = np.average(gain, weights=weight)
    error = np.sqrt(np.average(np.square(gain - mean), weights=weight) / (count - 1))
    if mean > MARGIN * error:
        return ""
    scored = _words(output, _relative_error(output, raw, known))
    return (
        f"`model` is at chance on the validation data ({scored}): at its best temperature or scale "
        f"it gains {mean:.4f} ± {MARGIN * error:.4f} nats over one constant prediction for all "
        "examples. Check that they are preprocessed as in its training, and what the labels mean."
    )


def _constant_nll(output: Likelihood, known: Examples) -> np.ndarray:
    """Return the NLL (examples,) of the classes' shares, or of the targets' mean and deviation."""
    y, weight = known.y, known.weight
    if output.is_classifier:
        counts = np.bincount(y, weights=weight, minlength=max(output.width, 2)) + 1.0
        return -np.log(counts / counts.sum())[y]
    mean = np.average(y, axis=0, weights=weight)
    variance = np.average(np.square(y - mean), axis=0, weights=weight)
    constant = np.broadcast_to(np.stack([mean, variance]), (len(y), 2, y.shape[1]))
    return output.nll(constant, y)


def _lag(trial: Trial, output: Likelihood, examples: Examples, in_inference: np.ndarray) -> str:
    """Return that the running averages of batch normalization lag behind, or nothing."""
    network = trial.engine.network
    kind = keras.layers.BatchNormalization
    if not any(isinstance(layer, kind) for layer in keras_internals.nested_layers(network)):
        return ""
    part = slice(_BATCH)
    batch = examples.take(part)
    outputs = ops.convert_to_numpy(network(with_strings(batch.x), training=True))
    raw = outputs.reshape(len(batch.y), 1, output.width).astype("float32")
    own = _relative_error(output, raw, batch)
    found = _relative_error(output, in_inference[part], batch)
    if not found - own > LARGE_LAG:
        return ""
    return (
        f"`model` is much worse in inference than in training, on the same examples: "
        f"{_words(output, found)} against {_words(output, own)}. The running averages of its batch "
        "normalization lag behind: its momentum is too high for so few steps. Train it for longer, "
        "or with keras.layers.BatchNormalization(momentum=0.9)."
    )


def _relative_error(output: Likelihood, raw: np.ndarray, known: Examples) -> float:
    """Return the share of wrong classes, or the RMSE over the deviation of the targets."""
    y, weight = known.y, known.weight
    errors = errors_of(output, output.predict(raw, 1.0), y)
    error = np.average(errors, weights=weight)
    if output.is_classifier:
        return float(error)
    mean = np.average(y, axis=0, weights=weight)
    variance = np.average(np.square(y - mean), axis=0, weights=weight).mean()
    return float(np.sqrt(error / max(variance, np.finfo("float64").tiny)))


def _words(output: Likelihood, error: float) -> str:
    if output.is_classifier:
        return f"accuracy {1 - error:.3f}"
    return f"an RMSE of {error:.3f} standard deviations of the targets"
