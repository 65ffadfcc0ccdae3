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
_FLOOR_BINS = 15
_MOST_SUMS = 2**14  # of a batch, all bins together
_FEWEST_LANES = 16  # sums of each bin


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
        gap_sum = np.nansum(self.count * gap)
        total = np.sum(self.count)
        return float(gap_sum / total)

    @property
    def mce(self) -> float:
        """The maximum calibration error, max_i |accuracy_i - confidence_i|."""
        gap = np.abs(self.accuracy - self.confidence)
        return float(np.nanmax(gap))


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

    Returns:
        A `Reliability`: `edges`, `count`, `confidence` and `accuracy` of the bins, and by these
        the errors `ece` and `mce`.

    Raises:
        ValueError: if shapes do not go together, or values are not what they should be.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> ibnn.metrics.reliability([[0.8, 0.2], [0.8, 0.2]], [0, 1]).ece
        0.3
    """
    bins = checks.positive_integer("bins", bins)
    examples = checked(probabilities, labels, sample_weight, from_logits)
    confidence, is_right = examples.top_label(np)
    count, confident, right = _sums(confidence, is_right, examples.weight, bins)
    with np.errstate(invalid="ignore"):
        return Reliability(
            edges=_bin_edges(bins),
            count=count,
            confidence=confident / count,
            accuracy=right / count,
        )


def expected_calibration_error(
    probabilities: Any,
    labels: Any,
    bins: int = 15,
    *,
    sample_weight: Any = None,
    from_logits: bool = False,
) -> float:
    """Return the expected calibration error over equal-width bins of confidence.

    Args:
        probabilities: (..., classes) or (..., 1), as for `reliability`.
        labels: (...), (..., 1) or one-hot, as for `reliability`.
        bins: number of bins.
        sample_weight: (...), or a shape that broadcasts to it; 0 leaves an example out, unchecked.
        from_logits: whether `probabilities` are logits.

    Returns:
        The error, from 0 to 1.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> ibnn.metrics.expected_calibration_error([[0.8, 0.2], [0.8, 0.2]], [0, 1])
        0.3
    """
    diagram = reliability(
        probabilities,
        labels,
        bins,
        sample_weight=sample_weight,
        from_logits=from_logits,
    )
    return diagram.ece


def adaptive_calibration_error(
    probabilities: Any,
    labels: Any,
    bins: int = 15,
    *,
    sample_weight: Any = None,
    from_logits: bool = False,
) -> float:
    """Return the calibration error over bins of equal mass.

    Examples on the boundary of two bins count in both in proportion, whatever their order.

    Args:
        probabilities: (..., classes) or (..., 1), as for `reliability`.
        labels: (...), (..., 1) or one-hot, as for `reliability`.
        bins: number of bins.
        sample_weight: (...), or a shape that broadcasts to it; 0 leaves an example out, unchecked.
        from_logits: whether `probabilities` are logits.

    Returns:
        The error, from 0 to 1.
    """
    bins = checks.positive_integer("bins", bins)
    examples = checked(probabilities, labels, sample_weight, from_logits)
    confidence, is_right = examples.top_label(np)
    confidence = confidence[:, 0]
    is_right = is_right[:, 0]
    gaps = examples.weight * (is_right - confidence)
    _, level = np.unique(confidence, return_inverse=True)
    mass_below = _cumulative(level, examples.weight)
    gap_below = _cumulative(level, gaps)
    # Linear between two levels: that is the split in proportion.
    total = mass_below[-1]
    edges = total * _bin_edges(bins)
    at_edges = np.interp(edges, mass_below, gap_below)
    by_bin = np.diff(at_edges)
    gap = np.sum(np.abs(by_bin))
    return float(gap / total)


def _cumulative(level: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the sums (levels + 1,) of values below each level of confidence, from 0 to all."""
    by_level = np.bincount(level, values)
    return np.append(0.0, np.cumsum(by_level))


def classwise_calibration_error(
    probabilities: Any,
    labels: Any,
    bins: int = 15,
    *,
    sample_weight: Any = None,
    from_logits: bool = False,
) -> float:
    """Return the mean calibration error of the classes, over equal-width bins.

    Args:
        probabilities: (..., classes) or (..., 1), as for `reliability`.
        labels: (...), (..., 1) or one-hot, as for `reliability`.
        bins: number of bins.
        sample_weight: (...), or a shape that broadcasts to it; 0 leaves an example out, unchecked.
        from_logits: whether `probabilities` are logits.

    Returns:
        The error, from 0 to 1.
    """
    bins = checks.positive_integer("bins", bins)
    examples = checked(probabilities, labels, sample_weight, from_logits)
    return _mean_gap(examples.probabilities, examples.targets, examples.weight, bins)


def ece_floor(probabilities: np.ndarray, seed: int, weight: np.ndarray | None = None) -> float:
    """Return the mean ECE of a perfectly calibrated model with these probabilities.

    Args:
        probabilities: (examples, classes).
        seed: of the labels that are drawn from them.
        weight: (examples,), how often each counts; None is once.

    Returns:
        The mean over 50 sets of labels, with 15 bins.
    """
    if weight is None:
        weight = np.ones(len(probabilities))
    rng = np.random.default_rng(seed)
    limits = np.cumsum(probabilities, axis=1)
    limits = limits[:, :-1]
    predicted = np.argmax(probabilities, axis=1)
    columns = []
    for _ in range(_SIMULATIONS):
        uniform = rng.random((len(limits), 1))
        labels = np.sum(uniform > limits, axis=1)
        columns.append(labels == predicted)
    is_right = np.stack(columns, axis=1)
    confidence = np.max(probabilities, axis=1, keepdims=True)
    confidence = np.broadcast_to(confidence, is_right.shape)
    return _mean_gap(confidence, is_right, weight, _FLOOR_BINS)


def _mean_gap(confidence: np.ndarray, is_right: np.ndarray, weight: np.ndarray, bins: int) -> float:
    """Return the mean over columns of their expected calibration errors."""
    count, confident, right = _sums(confidence, is_right, weight, bins)
    gaps = np.abs(right - confident)
    gap = np.sum(gaps)
    total = np.sum(count)
    return float(gap / total)


def _bin_edges(bins: int) -> np.ndarray:
    # Each correctly rounded, as linspace's are not: 0.8 lies on the edge 12 / 15.
    return np.arange(bins + 1) / bins


def _bin_of(xp: ModuleType, confidence: Any, bins: int) -> Any:
    """Return the bin of each confidence, along one axis; `xp` is numpy or keras.ops."""
    # In the precision of the predictions: 0.8 lies on the edge 0.8 in float32 too.
    dtype = keras.backend.standardize_dtype(confidence.dtype)
    edges = _bin_edges(bins)
    inner_edges = edges[1:-1].astype(dtype)
    flat = xp.reshape(confidence, (-1,))
    return xp.searchsorted(inner_edges, flat, side="left")


def _sums(
    confidence: np.ndarray, is_right: np.ndarray, weight: np.ndarray, bins: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the sums of weight, confidence and success by bin, one column after another."""
    rows, columns = confidence.shape
    column = np.tile(np.arange(columns), rows)
    places = _bin_of(np, confidence, bins)
    places = places + bins * column
    weights = np.repeat(weight, columns)

    def by_bin(values: np.ndarray) -> np.ndarray:
        return np.bincount(places, values, minlength=bins * columns)

    return (
        by_bin(weights),
        by_bin(weights * confidence.ravel()),
        by_bin(weights * is_right.ravel()),
    )


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
        confidence, is_right = examples.top_label(ops)
        confidence = confidence[:, 0]
        is_right = is_right[:, 0]
        places = _bin_of(ops, confidence, self.bins)
        # A bin may hold millions, too many for one sum in float32: it has several.
        lanes = max(_FEWEST_LANES, _MOST_SUMS // self.bins)
        count = ops.shape(places)[0]
        lane = ops.arange(count, dtype=places.dtype) % lanes
        segments = places * lanes + lane
        # Of the differences, which are small where the sums of their parts are not.
        gaps = examples.weight * (is_right - confidence)
        sums = ops.segment_sum(
            gaps,
            segments,
            num_segments=self.bins * lanes,
        )
        by_bin = ops.reshape(sums, (self.bins, lanes))
        self.gap.add(ops.sum(by_bin, axis=1))
        self.weight.add(ops.sum(examples.weight))

    def _value(self) -> Tensor:
        # n_i * |accuracy_i - confidence_i| is |right_i - confident_i|: no bin is divided by.
        gaps = ops.abs(self.gap.value())
        weight = self.weight.value()
        return ops.divide_no_nan(ops.sum(gaps), weight)
