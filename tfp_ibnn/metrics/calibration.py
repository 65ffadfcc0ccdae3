"""Calibration: do predictions of confidence c come true with frequency c? Bins are left-open."""

from types import ModuleType
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.metrics._base import ClassificationMetric, Examples, checked

_SIMULATIONS = 50
_MOST_SUMS, _FEWEST_LANES = 2**14, 16
"""How many sums a batch makes, all bins together, and at least for each of them."""


class Reliability(NamedTuple):
    """What a reliability diagram shows, by bin of confidence; empty bins hold NaN.

    Attributes:
        edges: (bins + 1,), the bins are (edges[i], edges[i + 1]], and the first holds 0 too.
        count: (bins,), examples in each bin, or the sum of their weights.
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
        gap = np.abs(self.accuracy - self.confidence)
        return float(np.nansum(self.count * gap) / np.sum(self.count))

    @property
    def mce(self) -> float:
        """The maximum calibration error, max_i |accuracy_i - confidence_i|."""
        return float(np.nanmax(np.abs(self.accuracy - self.confidence)))


def reliability(
    probabilities: Any,
    labels: Any,
    bins: int = 15,
    *,
    sample_weight: Any = None,
    from_logits: bool = False,
) -> Reliability:
    """Sort predictions into equal-width bins of confidence and compare it with accuracy.

    Args:
        probabilities: (..., classes) that sum to 1; or (..., 1), those of class 1 of two.
        labels: (...) or (..., 1) integers, or (..., classes) one-hot.
        bins: number of bins.
        sample_weight: (...), or a shape that broadcasts to it; 0 leaves an example out, unchecked.
        from_logits: whether `probabilities` are logits.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> ibnn.metrics.reliability([[0.8, 0.2], [0.8, 0.2]], [0, 1]).ece
        0.3
    """
    bins = checks.positive_integer("bins", bins)
    examples = checked(probabilities, labels, sample_weight, from_logits)
    count, confident, right = _sums(examples.top_label(np), examples.weight, bins)
    with np.errstate(invalid="ignore"):
        return Reliability(_bin_edges(bins), count, confident / count, right / count)


def expected_calibration_error(
    probabilities: Any, labels: Any, bins: int = 15, **options: Any
) -> float:
    """Return the expected calibration error; the arguments are those of `reliability`."""
    return reliability(probabilities, labels, bins, **options).ece


def adaptive_calibration_error(
    probabilities: Any, labels: Any, bins: int = 15, **options: Any
) -> float:
    """Return the calibration error over bins of equal mass; the arguments are `reliability`'s.

    Examples on the boundary of two bins count in both in proportion, whatever their order.
    """
    bins = checks.positive_integer("bins", bins)
    examples = checked(probabilities, labels, **options)
    confidence, correct = (part[:, 0] for part in examples.top_label(np))
    _, which = np.unique(confidence, return_inverse=True)
    parts = examples.weight, examples.weight * (correct - confidence)
    mass, right = (np.append(0.0, np.cumsum(np.bincount(which, part))) for part in parts)
    # Linear between two levels: that is the split in proportion.
    gap = np.diff(np.interp(mass[-1] * _bin_edges(bins), mass, right))
    return float(np.sum(np.abs(gap)) / mass[-1])


def classwise_calibration_error(
    probabilities: Any, labels: Any, bins: int = 15, **options: Any
) -> float:
    """Return the mean calibration error of the classes; the arguments are `reliability`'s."""
    bins = checks.positive_integer("bins", bins)
    examples = checked(probabilities, labels, **options)
    outcomes = examples.probabilities, examples.targets
    count, mean, frequency = _sums(outcomes, examples.weight, bins)
    return float(np.sum(np.abs(frequency - mean)) / np.sum(count))


def ece_floor(probabilities: np.ndarray, seed: int, weight: np.ndarray | None = None) -> float:
    """Return the mean ECE of a perfectly calibrated model with these (examples, classes)."""
    weight = np.ones(len(probabilities)) if weight is None else weight
    random = np.random.default_rng(seed)
    limits, predicted = np.cumsum(probabilities, axis=1)[:, :-1], np.argmax(probabilities, axis=1)
    drawn = (np.sum(random.random((len(limits), 1)) > limits, axis=1) for _ in range(_SIMULATIONS))
    right = np.stack([labels == predicted for labels in drawn], axis=1)
    confidence = np.broadcast_to(np.max(probabilities, axis=1, keepdims=True), right.shape)
    count, mean, frequency = _sums((confidence, right), weight, 15)
    return float(np.sum(np.abs(frequency - mean)) / np.sum(count))


def _bin_edges(bins: int) -> np.ndarray:
    # Each correctly rounded, as linspace's are not: 0.8 lies on the edge 12 / 15.
    return np.arange(bins + 1) / bins


def _bin_of(xp: ModuleType, confidence: Any, bins: int) -> Any:
    """Return the bin of each confidence, along one axis; `xp` is numpy or keras.ops."""
    # In the precision of the predictions: 0.8 lies on the edge 0.8 in float32 too.
    dtype = keras.backend.standardize_dtype(confidence.dtype)
    edges = _bin_edges(bins)[1:-1].astype(dtype)
    return xp.searchsorted(edges, xp.reshape(confidence, (-1,)), side="left")


def _sums(
    outcomes: tuple[np.ndarray, np.ndarray], weight: np.ndarray, bins: int
) -> list[np.ndarray]:
    """Return the sums of weight, confidence and success by bin, one column after another."""
    rows, columns = outcomes[0].shape
    column = np.tile(np.arange(columns), rows)
    which = _bin_of(np, outcomes[0], bins) + bins * column
    parts = np.ones_like(outcomes[0]), *outcomes
    return [np.bincount(which, (weight[:, None] * x).ravel(), bins * columns) for x in parts]


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class ExpectedCalibrationError(ClassificationMetric):
    """Expected calibration error over equal-width bins.

    ECE = sum_i n_i / N * |accuracy_i - confidence_i|, with the mean confidence of each bin. Invalid
    input, most often logits without `from_logits=True`, makes it NaN, or raises if called eagerly.
    Reference: Guo et al., On Calibration of Modern Neural Networks, arXiv 1706.04599.

    Args:
        bins: number of bins.
        from_logits: whether predictions are logits rather than probabilities.
        dtype: of its state; half precision becomes float32.

    Example:
        >>> import numpy as np, tfp_ibnn as ibnn
        >>> float(ibnn.ExpectedCalibrationError()([0, 1], np.array([[0.8, 0.2], [0.8, 0.2]])))
        0.3
    """

    default_name = "ece"

    def __init__(
        self, bins: int = 15, from_logits: bool = False, name: str | None = None, dtype: Any = None
    ) -> None:
        super().__init__(from_logits, name, dtype)
        self.bins = checks.positive_integer("bins", bins, checks.LARGEST_SIZE)
        self._add_sums("weight")
        self._add_sums("gap", shape=(self.bins,))

    def _count(self, examples: Examples) -> None:
        confidence, right = (part[:, 0] for part in examples.top_label(ops))
        which = _bin_of(ops, confidence, self.bins)
        # A bin may hold millions, too many for one sum in float32: it has several.
        lanes = max(_FEWEST_LANES, _MOST_SUMS // self.bins)
        lane = ops.arange(ops.shape(which)[0], dtype=which.dtype) % lanes
        # Of the differences, which are small where the sums of their parts are not.
        gaps = examples.weight * (right - confidence)
        gaps = ops.segment_sum(gaps, which * lanes + lane, self.bins * lanes)
        self.gap.add(ops.sum(ops.reshape(gaps, (self.bins, lanes)), axis=1))
        self.weight.add(ops.sum(examples.weight))

    def _value(self) -> Tensor:
        # n_i * |accuracy_i - confidence_i| is |right_i - confident_i|: no bin is divided by.
        gap = ops.sum(ops.abs(self.gap.value()))
        return ops.divide_no_nan(gap, self.weight.value())
