"""Calibration: do predictions of confidence c come true with frequency c?"""

from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from tfp_ibnn import _checks
from tfp_ibnn.backend import Tensor

__all__ = [
    "ExpectedCalibrationError",
    "Reliability",
    "expected_calibration_error",
    "reliability",
]


class Reliability(NamedTuple):
    """What a reliability diagram shows, by bin of confidence; empty bins hold NaN.

    Attributes:
        edges: (bins + 1,), the bins are (edges[i], edges[i + 1]], and the first holds 0 too.
        count: (bins,), examples in each bin.
        confidence: (bins,), their mean confidence.
        accuracy: (bins,), the fraction predicted correctly.
    """

    edges: np.ndarray
    count: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray

    @property
    def ece(self) -> float:
        """The expected calibration error, sum_i n_i / N * |accuracy_i - confidence_i|."""
        filled = self.count > 0
        gap = np.abs(self.accuracy[filled] - self.confidence[filled])
        return float(np.sum(self.count[filled] * gap) / np.sum(self.count))


def reliability(probabilities: Any, labels: Any, bins: int = 15) -> Reliability:
    """Sort predictions into equal-width bins of confidence and compare it with accuracy.

    Args:
        probabilities: (examples, classes), rows that sum to 1.
        labels: (examples,) integers, or (examples, classes) one-hot.
        bins: number of bins.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> bins = ibnn.metrics.reliability([[0.8, 0.2], [0.8, 0.2]], [0, 1])
        >>> round(bins.ece, 4)
        0.3
    """
    probabilities, labels = _checked(probabilities, labels)
    bins = _checks.positive_integer("bins", bins)
    edges = np.linspace(0, 1, bins + 1)
    confidence = probabilities.max(axis=-1)
    correct = probabilities.argmax(axis=-1) == labels
    which = np.searchsorted(edges[1:-1], confidence, side="left")
    count, confident, right = (
        np.bincount(which, weights=weights, minlength=bins)
        for weights in (np.ones(len(labels)), confidence, correct)
    )
    with np.errstate(invalid="ignore"):
        return Reliability(edges, count, confident / count, right / count)


def expected_calibration_error(probabilities: Any, labels: Any, bins: int = 15) -> float:
    """Return the expected calibration error; the arguments are those of `reliability`.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> ibnn.metrics.expected_calibration_error([[0.8, 0.2], [0.8, 0.2]], [0, 1])
        0.3
    """
    return reliability(probabilities, labels, bins).ece


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class ExpectedCalibrationError(keras.metrics.Metric):
    """Expected calibration error over equal-width bins, exact under any batching.

    ECE = sum_i n_i / N * |accuracy_i - confidence_i|, with left-open bins and the mean confidence
    of each bin.

    Args:
        bins: number of bins.
        from_logits: whether predictions are logits rather than probabilities.
        name: of the metric.
        dtype: of its state.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> ece = ibnn.ExpectedCalibrationError()
        >>> ece.update_state([0, 1], keras.ops.array([[0.8, 0.2], [0.8, 0.2]]))
        >>> round(float(ece.result()), 4)
        0.3

    References:
        Guo et al., On Calibration of Modern Neural Networks, arXiv 1706.04599.
    """

    def __init__(
        self, bins: int = 15, from_logits: bool = False, name: str = "ece", dtype: Any = None
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        self.bins = _checks.positive_integer("bins", bins)
        self.from_logits = bool(from_logits)
        self.count, self.confident, self.right = (
            self.add_variable(shape=(self.bins,), initializer="zeros", name=part)
            for part in ("count", "confident", "right")
        )

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count a batch.

        Args:
            y_true: (..., ) or (..., 1) integers, or (..., classes) one-hot.
            y_pred: (..., classes) probabilities or logits.
            sample_weight: (...,).
        """
        y_pred = ops.cast(y_pred, self.dtype)
        if self.from_logits:
            y_pred = ops.softmax(y_pred)
        y_true = ops.convert_to_tensor(y_true)
        if len(y_true.shape) == len(y_pred.shape):
            one_hot = y_true.shape[-1] == y_pred.shape[-1] and y_pred.shape[-1] > 1
            y_true = ops.argmax(y_true, axis=-1) if one_hot else y_true[..., 0]
        predicted = ops.argmax(y_pred, axis=-1)
        correct = ops.cast(ops.cast(y_true, predicted.dtype) == predicted, self.dtype)
        confidence = ops.max(y_pred, axis=-1)
        weight = ops.ones_like(confidence)
        if sample_weight is not None:
            given = ops.cast(sample_weight, self.dtype)
            weight = weight * ops.reshape(given, ops.shape(given)[: len(weight.shape)])
        edges = np.linspace(0, 1, self.bins + 1)[1:-1]
        which = ops.searchsorted(
            ops.cast(edges, self.dtype), ops.reshape(confidence, (-1,)), side="left"
        )
        member = ops.one_hot(which, self.bins, dtype=self.dtype)
        for total, values in (
            (self.count, weight),
            (self.confident, weight * confidence),
            (self.right, weight * correct),
        ):
            total.assign_add(ops.sum(ops.reshape(values, (-1, 1)) * member, axis=0))

    def result(self) -> Tensor:
        """Return the error over all batches so far; 0 before the first."""
        # n_i * |accuracy_i - confidence_i| is |right_i - confident_i|: no bin is divided by.
        gap = ops.sum(ops.abs(self.right - self.confident))
        total = ops.sum(self.count)
        return ops.where(total > 0, gap / ops.where(total > 0, total, 1), 0)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {**super().get_config(), "bins": self.bins, "from_logits": self.from_logits}


def _checked(probabilities: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities (examples, classes) and integer labels, or raise."""
    probabilities, labels = np.asarray(probabilities, dtype="float64"), np.asarray(labels)
    if probabilities.ndim != 2 or len(probabilities) == 0:
        raise ValueError(
            "`probabilities` must have the shape (examples, classes), with one example at least; "
            f"got {probabilities.shape}."
        )
    if not np.all(np.isfinite(probabilities)) or np.any(np.abs(probabilities.sum(-1) - 1) > 1e-3):
        raise ValueError(
            "`probabilities` must be finite, with rows that sum to 1; are they logits?"
        )
    classes = probabilities.shape[1]
    if labels.shape == probabilities.shape:
        labels = labels.argmax(axis=-1)
    if labels.shape != probabilities.shape[:1]:
        raise ValueError(
            f"`labels` must have the shape ({len(probabilities)},) or {probabilities.shape}, to "
            f"go with `probabilities`; got {labels.shape}."
        )
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(f"`labels` must lie between 0 and {classes - 1}; got {np.unique(labels)}.")
    return probabilities, labels
