"""What a model's output predicts: its one free parameter, its scores, and the model it becomes."""

import functools
from typing import Any

import keras
import numpy as np
from keras import losses
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp, ndtr, softmax

from tfp_ibnn import metrics
from tfp_ibnn.layers import GaussianNLL
from tfp_ibnn.metrics.calibration import ece_floor
from tfp_ibnn.prediction import MonteCarlo, TemperatureScaling
from tfp_ibnn.prediction.head import activation_of, is_loss
from tfp_ibnn.weights import ScaledPosterior, WeightPosterior
from tfp_ibnn.weights.features import check_rows
from tfp_ibnn.weights.likelihood import classes, numbers

_DOUBT = 2.0
"""What a temperature of e or 1 / e must gain on all examples together, in nats."""


Weight = np.ndarray | None


class Output:
    """What a kind of output predicts; the base of both kinds.

    `raw` is what sampled networks return, (examples, draws, width). With a parameter, `predict`
    makes of it a prediction, an array with a row per example; `fit` finds the parameter of the
    least NLL, and `scaling` is a model that does to each draw what the parameter says. `targets`
    checks labels, and `strata` groups those that are spread evenly over all parts of the data.
    Weights (examples,) say how often each example counts; None is once.
    """

    width: int
    head: dict[str, Any]  # what networks return, in the words of `MonteCarlo` and `Laplace`
    scaled_head: dict[str, Any]  # what `scaling` returns
    variants: dict[str, bool]  # what is added to a name, and whether the parameter is fitted
    column: str  # the heading of the parameter in a table

    def parameter(self, raw: np.ndarray, y: np.ndarray, fitted: bool, weight: Weight = None) -> Any:
        """Return the parameter of one of the variants."""
        return self.fit(raw, y, weight) if fitted else 1.0

    def best_nll(self, raw: np.ndarray, y: np.ndarray, weight: Weight = None) -> float:
        """Return the mean NLL with the parameter fitted to these examples."""
        prediction = self.predict(raw, self.fit(raw, y, weight))
        return float(np.average(self.nll(prediction, y), weights=weight))

    def noise_scale(self, parameter: Any) -> float | None:
        """Return the standard deviation of the noise, if the loss leaves it open."""
        return None

    def wrap(self, inner: Any, parameter: Any, **options: Any) -> MonteCarlo:
        """Return the model that averages scaled draws of a network or a posterior over weights."""
        scaling = self.scaling(keras.Input((self.width,)), parameter)
        if isinstance(inner, WeightPosterior):
            inner = ScaledPosterior(inner, scaling)
        else:
            inner = keras.Model(inner.input, scaling(inner.outputs[0]), name=inner.name)
        return MonteCarlo(inner, **self.scaled_head, **options)


class Classes(Output):
    """A classifier; the parameter is a temperature that divides the logits of every draw."""

    variants = {"": False, " + temperature": True}
    column = "T"

    def __init__(self, width: int, from_logits: bool, one_hot: bool = False) -> None:
        self.width, self.from_logits, self.one_hot = width, from_logits, one_hot
        kind = "sigmoid" if width == 1 else "softmax"
        self.head = self.scaled_head = {"head": kind, "from_logits": from_logits}

    def targets(self, y: Any, name: str) -> np.ndarray:
        """Return classes (N,) of labels in the form that the loss takes."""
        return classes(y, max(self.width, 2), f"With this loss, labels of `{name}`", self.one_hot)

    def strata(self, y: np.ndarray) -> np.ndarray:
        """Return the classes."""
        return y

    def _log_p(self, raw: np.ndarray) -> np.ndarray:
        """Return log-probabilities up to a constant, (examples, draws, classes)."""
        if self.from_logits:
            return np.concatenate([np.zeros_like(raw), raw], -1) if self.width == 1 else raw
        if raw.min() < 0 or raw.max() > 1.001:
            problem = "The outputs of `model` are not probabilities, as its loss expects"
            remedy = "end it in a softmax or sigmoid, or give a loss that has from_logits=True"
            raise ValueError(f"{problem}: {remedy}.")
        p = np.concatenate([1 - raw, raw], axis=-1) if self.width == 1 else raw
        return np.log(np.maximum(p, np.finfo(p.dtype).tiny))

    def fit(self, raw: np.ndarray, y: np.ndarray, weight: Weight = None) -> float:
        """Return the temperature, between 0.05 and 20.

        It is not quite that of the least NLL: where every prediction is right, that would be 0.
        """
        log_p, label = self._log_p(raw), y[:, None, None]
        count = len(y) if weight is None else weight.sum()

        def loss(log_temperature: float) -> float:
            scaled = log_p * np.float32(np.exp(-log_temperature))
            chosen = np.take_along_axis(scaled, label, axis=-1)[..., 0] - logsumexp(scaled, axis=-1)
            log_likelihoods = logsumexp(chosen.astype("float64"), axis=1)
            fit = -float(np.average(log_likelihoods, weights=weight))
            return fit + _DOUBT * log_temperature**2 / count

        return _least(loss, (-np.log(20), np.log(20)), 1e-3)

    def predict(self, raw: np.ndarray, parameter: float) -> np.ndarray:
        """Return class probabilities (N, classes)."""
        return np.mean(softmax(self._log_p(raw) / np.float32(parameter), axis=-1), axis=1)

    def nll(self, prediction: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return minus the log-probabilities of the labels."""
        chosen = np.take_along_axis(prediction, y[:, None], axis=1)[:, 0]
        return -np.log(np.maximum(chosen, np.finfo("float32").tiny)).astype("float64")

    def scores(
        self, prediction: np.ndarray, y: np.ndarray, seed: int, weight: Weight = None
    ) -> dict[str, float]:
        """Return accuracy, NLL, Brier score, and ECE with its floor."""
        prediction = prediction / prediction.sum(axis=1, keepdims=True)
        return {
            "accuracy": float(np.average(prediction.argmax(axis=1) == y, weights=weight)),
            "NLL": float(np.average(self.nll(prediction, y), weights=weight)),
            "Brier": metrics.brier_score(prediction, y, sample_weight=weight),
            "ECE": metrics.expected_calibration_error(prediction, y, sample_weight=weight),
            "ECE floor": ece_floor(prediction, seed, weight),
        }

    def scaling(self, outputs: Any, parameter: float) -> keras.Model:
        """Return what divides the logits by the temperature."""
        identity = keras.Model(outputs, keras.layers.Identity(dtype="float32")(outputs))
        scaled = TemperatureScaling(identity, from_logits=self.from_logits, dtype="float32")
        scaled.temperature.assign(parameter)
        return keras.Model(outputs, scaled(outputs))


class Numbers(Output):
    """A regression; the parameter is the standard deviation of each output, or a factor for it.

    The prediction is a Gaussian with the mean of the draws and their total variance, (N, 2, D). A
    network that `has_scales` returns standard deviations, those of a `GaussianHead`, too.
    """

    scaled_head = {"head": "gaussian"}

    def __init__(self, width: int, has_scales: bool) -> None:
        self.width, self.has_scales = width, has_scales
        self.size = width // 2 if has_scales else width
        self.variants = {"": False, " + scale": True} if has_scales else {"": True}
        self.column = "factor" if has_scales else "scale"
        self.head = {"head": "gaussian" if has_scales else "point"}

    def targets(self, y: Any, name: str) -> np.ndarray:
        """Return finite numbers (N, D)."""
        return numbers(y, self.size, f"The targets of `{name}`").astype("float64")

    def strata(self, y: np.ndarray) -> np.ndarray:
        """Return blocks of ten examples of like first targets."""
        return np.argsort(np.argsort(y[:, 0])) // 10

    def _moments(self, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return mean and variance of the draws, and the variance that the parameter scales."""
        raw = raw.astype("float64")
        draws, scales = raw[..., : self.size], raw[..., self.size :]
        own = np.square(scales) if self.has_scales else np.ones_like(draws)
        return draws.mean(axis=1), draws.var(axis=1), own.mean(axis=1)

    def fit(self, raw: np.ndarray, y: np.ndarray, weight: Weight = None) -> Any:
        """Return the factor of the scales, or the scale of each output."""
        mean, spread, own = self._moments(raw)
        error = np.square(y - mean)

        def best(column: Any, start: float) -> float:
            def loss(log_parameter: float) -> float:
                variance = spread[:, column] + np.exp(2 * log_parameter) * own[:, column]
                each = np.log(variance) + error[:, column] / variance
                return np.average(each.reshape(len(y), -1).mean(axis=1), weights=weight)

            return _least(loss, (np.log(start) - 7, np.log(start) + 5), 1e-6)

        if self.has_scales:
            return best(slice(None), 1.0)
        starts = np.sqrt(np.maximum(np.average(error, axis=0, weights=weight), 1e-12))
        return np.array([best(column, start) for column, start in enumerate(starts)])

    def predict(self, raw: np.ndarray, parameter: Any) -> np.ndarray:
        """Return means and variances (N, 2, D)."""
        mean, spread, own = self._moments(raw)
        return np.stack([mean, spread + np.square(parameter) * own], axis=1)

    def nll(self, prediction: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return minus the log-density, summed over the outputs."""
        mean, variance = prediction[:, 0], prediction[:, 1]
        distance = np.square(y - mean) / variance
        return np.sum(np.log(2 * np.pi * variance) + distance, axis=1) / 2

    def scores(
        self, prediction: np.ndarray, y: np.ndarray, seed: int, weight: Weight = None
    ) -> dict[str, float]:
        """Return RMSE, NLL, CRPS, and the coverage of 90 % intervals."""
        scale = np.sqrt(prediction[:, 1])
        z = (y - prediction[:, 0]) / scale
        density = np.exp(-np.square(z) / 2) / np.sqrt(2 * np.pi)
        crps = scale * (z * (2 * ndtr(z) - 1) + 2 * density - 1 / np.sqrt(np.pi))
        squares = np.square(y - prediction[:, 0])
        return {
            "RMSE": float(np.sqrt(np.average(squares.mean(axis=1), weights=weight))),
            "NLL": float(np.average(self.nll(prediction, y), weights=weight)),
            "CRPS": float(np.average(crps.mean(axis=1), weights=weight)),
            "90 % coverage": float(self.coverage(prediction, y, np.array([0.9]), weight)[0]),
        }

    def coverage(
        self, prediction: np.ndarray, y: np.ndarray, levels: np.ndarray, weight: Weight = None
    ) -> np.ndarray:
        """Return the share of targets in central intervals of each probability."""
        z = np.abs(y - prediction[:, 0]) / np.sqrt(prediction[:, 1])
        of_each = None if weight is None else np.repeat(weight, z.shape[1])
        is_inside = 2 * ndtr(z.ravel()) - 1 <= levels[:, None]
        return np.average(is_inside, axis=1, weights=of_each)

    def scaling(self, outputs: Any, parameter: Any) -> keras.Model:
        """Return what multiplies the standard deviations, or adds them."""
        # In full precision, and of Keras's own layers: the file needs no class for it.
        rescaling = functools.partial(keras.layers.Rescaling, dtype="float32")
        if self.has_scales:
            factors = np.repeat([1.0, float(parameter)], self.size).tolist()
            return keras.Model(outputs, rescaling(factors)(outputs))
        scale = rescaling(0.0, np.asarray(parameter).tolist())(outputs)
        return keras.Model(outputs, keras.layers.Concatenate(dtype="float32")([outputs, scale]))

    def noise_scale(self, parameter: Any) -> float | None:
        return None if self.has_scales else float(np.sqrt(np.mean(np.square(parameter))))


def _least(loss: Any, ends: tuple[float, float], precision: float) -> float:
    """Return e to the number of the least loss."""
    found = minimize_scalar(loss, bounds=ends, method="bounded", options={"xatol": precision})
    return float(np.exp(found.x))


def output_of(model: keras.Model, loss: Any) -> tuple[Output, Any]:
    """Return what a model's output predicts, by a loss or the model's own, and that loss."""
    given = keras.tree.flatten(model.loss if loss is None and model.compiled else loss)
    given = given[0] if len(given) == 1 else None
    if given is None:
        remedy = "loss='sparse_categorical_crossentropy' or loss='mse'"
        raise ValueError(f"`model` is not compiled with one loss: give one, such as {remedy}.")
    shape = model.output_shape
    check_rows(shape)
    width, known = shape[-1], losses.get(given)
    from_logits = bool(getattr(known, "from_logits", False))
    if from_logits and activation_of(model) in ("softmax", "sigmoid"):
        but = f"`model` ends in a {activation_of(model)}, but its loss has from_logits=True"
        raise ValueError(f"{but}: give one without, as loss='sparse_categorical_crossentropy'.")
    one_hot = is_loss(known, losses.CategoricalCrossentropy)
    if width > 1 and (one_hot or is_loss(known, losses.SparseCategoricalCrossentropy)):
        return Classes(width, from_logits, one_hot), given
    if width == 1 and is_loss(known, losses.BinaryCrossentropy):
        return Classes(1, from_logits), given
    has_scales = is_loss(known, GaussianNLL) and width % 2 == 0
    if has_scales or is_loss(known, losses.MeanSquaredError):
        return Numbers(width, has_scales), given
    name = getattr(known, "__name__", type(known).__name__)
    good = "a categorical crossentropy, a binary one for one output, ibnn.layers.GaussianNLL, 'mse'"
    raise ValueError(f"The loss {name} with {width} outputs cannot be calibrated; give {good}.")
