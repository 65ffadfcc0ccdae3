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
"""There is a doubt if the error on validation data is above that on training data by more."""
LARGE_LAG = 0.1
"""There is a doubt if, on the same examples, inference is worse than batch statistics by more."""
MARGIN = 1.96
"""A 95 % margin, in standard errors."""

_BATCH = 256  # whose statistics batch normalization takes


def errors_of(output: Likelihood, prediction: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the error of each point prediction.

    Args:
        output: what the predictions mean.
        prediction: from `output.predict`.
        y: targets, as `output.targets` gives them.

    Returns:
        (examples,): 1 for a wrong class and 0 for a right one; of a regression the squared error,
        averaged over its outputs.
    """
    if output.is_classifier:
        is_wrong = prediction.argmax(axis=1) != y
        return is_wrong.astype("float64")
    means = prediction[:, 0]
    return np.square(y - means).mean(axis=1)


def doubts_about(trial: Trial, setting: Setting) -> list[str]:
    """Return what is wrong with the network that is given.

    That is: no better than chance on validation data; much worse there than on training data; or,
    on training data, much worse in inference than with the statistics of a batch, which batch
    normalization uses while it trains. The last one causes the others, so it is reported alone.

    Args:
        trial: the network as it is, which has been watched.
        setting: its data, and what its outputs mean.

    Returns:
        Sentences for the user; none for a good network.
    """
    output = setting.output
    sample = setting.training.sample
    sample_raw = trial.engine.draw(trial.state, sample.x)
    lag = _lag(trial, output, sample, sample_raw)
    if lag:
        return [lag]
    validation = setting.data.fit
    validation_raw = trial.watched()
    doubts = [_chance(output, validation_raw, validation)]
    error = _relative_error(output, validation_raw, validation)
    training_error = _relative_error(output, sample_raw, sample)
    if error - training_error > LARGE_GAP:
        doubts.append(
            f"`model` is much worse on the validation data than on its training data: "
            f"{_words(output, error)} against {_words(output, training_error)}. It is overfitted, "
            "or the two are not preprocessed alike."
        )
    return [doubt for doubt in doubts if doubt]


def _chance(output: Likelihood, raw: np.ndarray, examples: Examples) -> str:
    """Return a sentence if predictions are no better than a constant one, else ""."""
    parameter = output.fit(raw, examples.y, examples.weight)
    nll = output.nll(output.predict(raw, parameter), examples.y)
    gain = _constant_nll(output, examples) - nll
    count = np.float64(len(examples.y))
    if examples.weight is not None:
        count = np.float64(examples.weight.sum())
    mean = np.average(gain, weights=examples.weight)
    variance = np.average(np.square(gain - mean), weights=examples.weight)
    margin = MARGIN * np.sqrt(variance / (count - 1))
    if mean > margin:
        return ""
    score = _words(output, _relative_error(output, raw, examples))
    return (
        f"`model` is at chance on the validation data ({score}): at its best temperature or scale "
        f"it gains {mean:.4f} ± {margin:.4f} nats over one constant prediction for all "
        "examples. Check that they are preprocessed as in its training, and what the labels mean."
    )


def _constant_nll(output: Likelihood, examples: Examples) -> np.ndarray:
    """Return the NLL (examples,) of the classes' shares, or of the targets' mean and variance."""
    if output.is_classifier:
        classes = max(output.width, 2)
        counts = np.bincount(examples.y, weights=examples.weight, minlength=classes)
        counts = counts + 1.0  # so that no class has the probability 0
        nll = -np.log(counts / counts.sum())
        return nll[examples.y]
    mean, variance = _moments(examples)
    count, width = examples.y.shape
    constant = np.broadcast_to(np.stack([mean, variance]), (count, 2, width))
    return output.nll(constant, examples.y)


def _moments(examples: Examples) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the variance of the targets, (width,) each."""
    mean = np.average(examples.y, axis=0, weights=examples.weight)
    squares = np.square(examples.y - mean)
    return mean, np.average(squares, axis=0, weights=examples.weight)


def _lag(trial: Trial, output: Likelihood, examples: Examples, in_inference: np.ndarray) -> str:
    """Return a sentence if the running averages of batch normalization lag behind, else "".

    Args:
        trial: the network as it is.
        output: what its outputs mean.
        examples: of its training data.
        in_inference: its outputs for these, (examples, draws, width).
    """
    network = trial.engine.network
    layers = keras_internals.nested_layers(network)
    if not any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers):
        return ""
    part = slice(_BATCH)
    batch = examples.take(part)
    outputs = ops.convert_to_numpy(network(with_strings(batch.x), training=True))
    in_training = outputs.reshape(len(batch.y), 1, output.width).astype("float32")
    training_error = _relative_error(output, in_training, batch)
    error = _relative_error(output, in_inference[part], batch)
    # Written so that NaN does not count as a lag.
    if not error - training_error > LARGE_LAG:
        return ""
    return (
        f"`model` is much worse in inference than in training, on the same examples: "
        f"{_words(output, error)} against {_words(output, training_error)}. The running averages "
        "of its batch normalization lag behind: its momentum is too high for so few steps. Train "
        "it for longer, or with keras.layers.BatchNormalization(momentum=0.9)."
    )


def _relative_error(output: Likelihood, raw: np.ndarray, examples: Examples) -> float:
    """Return the share of wrong classes, or the RMSE over the deviation of the targets."""
    prediction = output.predict(raw, 1.0)
    errors = errors_of(output, prediction, examples.y)
    error = np.average(errors, weights=examples.weight)
    if output.is_classifier:
        return float(error)
    _, variances = _moments(examples)
    variance = max(variances.mean(), np.finfo("float64").tiny)
    return float(np.sqrt(error / variance))


def _words(output: Likelihood, error: float) -> str:
    if output.is_classifier:
        return f"accuracy {1 - error:.3f}"
    return f"an RMSE of {error:.3f} standard deviations of the targets"
