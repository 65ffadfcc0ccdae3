"""One of several classes."""

from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops
from scipy.special import softmax

from tfp_ibnn import metrics
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.likelihoods import arrays
from tfp_ibnn.likelihoods.arrays import check_each, or_nan
from tfp_ibnn.likelihoods.base import Likelihood
from tfp_ibnn.likelihoods.class_scaling import ClassScaling, best_isotonic, best_vector
from tfp_ibnn.likelihoods.temperature import DOUBT, best_temperature
from tfp_ibnn.metrics._base import TOLERANCE
from tfp_ibnn.metrics.calibration import ece_floor
from tfp_ibnn.metrics.scoring import Accuracy, negative_log_prob

_CLASS_SCALINGS = {"vector": best_vector, "isotonic": best_isotonic}
_ENDS = {"softmax": arrays.softmax, "log_softmax": ops.log_softmax, "sigmoid": ops.sigmoid}


class Categorical(Likelihood):
    """One of several classes, on the last axis: a softmax.

        log p(y) = log softmax(logits)_y
        S has the columns sqrt(p_c) (e_c - p)

    Targets are classes (examples,), from labels (N,), (N, 1) or, one-hot, (N, width). A draw holds
    class probabilities; the uncertainty within it is their entropy, and its divergence from the
    mean is KL[draw || mean], whose average over draws is the mutual information of label and
    network. The loss is minus the log-probability of the label under the mean.

    `calibrate` fits a temperature T, which divides the logits of every draw: outputs become
    logits / T, or softmax(log p / T) of probabilities. A weak prior keeps it
    above 0 where every prediction is right. One draw can also have parameters for each class, a
    `ClassScaling`. The prediction is the probabilities (examples, classes); the evidence is
    accuracy, NLL, Brier score, and ECE with its floor, the ECE of a perfectly calibrated network on
    as many examples.

    Args:
        from_logits: whether the outputs are logits, not probabilities.
        width: number of classes; None if it is unknown.
        end: the last activation; None is "linear" for logits, else "softmax".
        one_hot: whether labels are one-hot; None takes either form.
    """

    is_classifier = True
    is_softmax = True
    variants: ClassVar[dict[str, bool]] = {"": False, " + temperature": True}
    variants_as_it_is: ClassVar[dict[str, str]] = {
        " + vector scaling": "vector",
        " + isotonic": "isotonic",
    }
    column = "T"
    ignored: int | None = None
    """The class whose labels `calibrate` leaves out: the `ignore_class` of the loss."""

    def __init__(
        self,
        from_logits: bool,
        width: int | None = None,
        end: str | None = None,
        one_hot: bool | None = None,
    ) -> None:
        super().__init__(width)
        self.from_logits = from_logits
        self.end = end or ("linear" if from_logits else "softmax")
        self.one_hot = one_hot

    # One network

    def targets(self, y: Any, *, what: str = "`y`") -> np.ndarray:
        return classes(y, self.width, what, self.one_hot).astype("int32")

    def outputs(self, logits: Tensor) -> Tensor:
        return _ENDS[self.end](logits) if self.end in _ENDS else logits

    def log_prob(self, logits: Tensor, y: Tensor) -> Tensor:
        log_p = ops.log_softmax(logits, axis=-1)
        width = logits.shape[-1]
        is_label = ops.one_hot(y, width, dtype=logits.dtype)
        return ops.sum(is_label * log_p, axis=-1)

    def hessian_factors(self, logits: Tensor) -> Tensor:
        p = arrays.softmax(logits)
        root = ops.sqrt(p)
        identity = ops.eye(logits.shape[-1], dtype=p.dtype)
        from_mean = identity - p[:, :, None]
        return from_mean * root[:, None, :]

    # Many networks

    def draws(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return class probabilities, and their entropies."""
        if outputs.shape[-1] == 1:
            raise ValueError("One number is not a distribution over classes: give head='sigmoid'.")
        if self.from_logits:
            probabilities = arrays.softmax(outputs)
        else:
            total = ops.sum(outputs, axis=-1, keepdims=True)
            is_one = ops.abs(total - 1) < TOLERANCE
            is_positive = ops.all(outputs >= 0, axis=-1, keepdims=True)
            is_distribution = ops.logical_and(is_positive, is_one)
            probabilities = or_nan(outputs, is_distribution)
        return probabilities, entropy(probabilities)

    def divergence(self, draw: Tensor, mean: Tensor) -> Tensor:
        is_positive = ops.logical_and(draw > 0, mean > 0)
        draw_or_one = ops.where(is_positive, draw, 1)
        mean_or_one = ops.where(is_positive, mean, 1)
        log_ratio = ops.log(draw_or_one / mean_or_one)
        return ops.sum(draw * log_ratio, axis=-1)

    def statistics(self, summary: Any) -> dict[str, Tensor]:
        """Return mean, variance, and the entropies."""
        variance = self.public(summary.squares / summary.count)
        return {
            "mean": self.public(summary.mean),
            "variance": variance,
            "entropy": entropy(summary.mean),
            "aleatoric": summary.within / summary.count,
            "epistemic": summary.between / summary.count,
            "total_variance": ops.sum(variance, axis=-1),
        }

    # Scores

    def scores(self) -> list[keras.metrics.Metric]:
        """Return accuracy, NLL, Brier score and ECE."""
        return [
            Accuracy(),
            metrics.NegativeLogLikelihood(),
            metrics.BrierScore(),
            metrics.ExpectedCalibrationError(),
        ]

    def pair(self, y_true: Any, prediction: dict[str, Tensor]) -> tuple[Any, Tensor]:
        return y_true, prediction["mean"]

    def loss(self, y_true: Any, prediction: dict[str, Tensor]) -> Tensor:
        target, probabilities = self.pair(y_true, prediction)
        loss = negative_log_prob(target, probabilities)
        positions = ops.shape(probabilities)[:-1]
        return ops.reshape(loss, positions)

    # Calibration

    @property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"outputs": (self.width,), "y": (), "prediction": (self.width,)}

    @property
    def head(self) -> dict[str, Any]:
        return {"head": "softmax", "from_logits": self.from_logits}

    def scaled(self, outputs: Tensor, parameter: Any) -> Tensor:
        if self.from_logits:
            return outputs / parameter
        return arrays.softmax(log_of(outputs) / parameter)

    def fit(self, outputs: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None) -> float:
        log_p = self.log_probabilities(outputs)
        return best_temperature(log_p, y, weight, DOUBT)

    def parameter(
        self,
        outputs: np.ndarray,
        y: np.ndarray,
        fitted: bool | str,
        weight: np.ndarray | None = None,
    ) -> float | ClassScaling:
        if fitted not in _CLASS_SCALINGS:
            return super().parameter(outputs, y, fitted, weight)
        best = _CLASS_SCALINGS[fitted]
        log_p = self.log_probabilities(outputs)
        (of_one_draw,) = np.moveaxis(log_p, 1, 0)
        return best(of_one_draw, y, weight)

    def predict(self, outputs: np.ndarray, parameter: float | ClassScaling) -> np.ndarray:
        log_p = self.log_probabilities(outputs)
        if isinstance(parameter, ClassScaling):
            p = parameter.probabilities(log_p)
            return np.mean(p, axis=1)
        scaled = log_p / np.float32(parameter)
        p = softmax(scaled, axis=-1)
        return np.mean(p, axis=1)

    def log_probabilities(self, outputs: np.ndarray) -> np.ndarray:
        """Return log-probabilities up to a constant, (examples, draws, classes)."""
        if self.from_logits:
            return outputs
        check_probabilities(outputs)
        return np.log(np.maximum(outputs, np.finfo(outputs.dtype).tiny))

    def nll(self, prediction: np.ndarray, y: np.ndarray) -> np.ndarray:
        p = np.take_along_axis(prediction, y[:, None], axis=1)
        p = p[:, 0]
        p = np.maximum(p, np.finfo("float32").tiny)
        return -np.log(p).astype("float64")

    def evidence(
        self,
        prediction: np.ndarray,
        y: np.ndarray,
        seed: int,
        weight: np.ndarray | None = None,
    ) -> dict[str, float]:
        total = prediction.sum(axis=1, keepdims=True)
        p = prediction / total
        is_right = p.argmax(axis=1) == y
        return {
            "accuracy": float(np.average(is_right, weights=weight)),
            "NLL": float(np.average(self.nll(p, y), weights=weight)),
            "Brier": metrics.brier_score(p, y, sample_weight=weight),
            "ECE": metrics.expected_calibration_error(p, y, sample_weight=weight),
            "ECE floor": ece_floor(p, seed, weight),
        }

    def strata(self, y: np.ndarray) -> np.ndarray:
        """Return the classes."""
        return y


def classes(y: Any, count: int, what: str, one_hot: bool | None = None) -> np.ndarray:
    """Return classes (examples,) of labels, checked.

    Args:
        y: labels (N,), (N, 1) or (N, count).
        count: number of classes.
        what: what the user calls the labels, for errors.
        one_hot: whether they must be one-hot, or must not be; None takes either form.

    Raises:
        ValueError: for other shapes, and for values that are not classes.
    """
    y = np.asarray(y)
    if one_hot is not False and y.shape[1:] == (count,):
        check_each(y, lambda y: np.sort(y)[:, ::-1] == np.eye(1, count), what, "one-hot")
        return y.argmax(axis=1)
    if y.shape[1:] == (1,):
        y = y[:, 0]
    if one_hot:
        raise ValueError(
            f"{what} must have the shape (N, {count}); got {y.shape}: give "
            f"keras.utils.to_categorical(y, {count})."
        )
    if y.ndim != 1 and one_hot is None:
        raise ValueError(
            f"{what} must have the shape (N,) or, one-hot, (N, {count}); got {y.shape}."
        )
    if y.shape[1:] == (count,):
        raise ValueError(f"{what} must have the shape (N,); got {y.shape}: give y.argmax(axis=1).")
    if y.ndim != 1:
        raise ValueError(f"{what} must have the shape (N,); got {y.shape}.")
    is_class = lambda y: np.isin(y, np.arange(count))  # noqa: E731
    known = "0 or 1" if count == 2 else f"whole numbers from 0 to {count - 1}"
    check_each(y, is_class, what, known)
    return y.astype(int)


def entropy(probabilities: Tensor) -> Tensor:
    """Return the entropy over the last axis, in nats."""
    p_or_one = ops.where(probabilities > 0, probabilities, 1)
    return -ops.sum(probabilities * ops.log(p_or_one), axis=-1)


def log_of(probabilities: Tensor) -> Tensor:
    """Return logarithms; of 0, that of the smallest normal number."""
    dtype = keras.backend.standardize_dtype(probabilities.dtype)
    tiny = float(np.finfo(dtype).tiny)
    return ops.log(ops.maximum(probabilities, tiny))


def check_probabilities(outputs: np.ndarray) -> None:
    """Raise if outputs cannot be probabilities."""
    if outputs.min() < 0 or outputs.max() > 1.001:
        raise ValueError(
            "The outputs of `model` are not probabilities, as its loss expects: end it in a "
            "softmax or sigmoid, or give a loss that has from_logits=True."
        )
