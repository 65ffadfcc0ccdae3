"""Calibration of arrays: do predictions of confidence c come true with frequency c?"""

from typing import Any, NamedTuple

import numpy as np

from tfp_ibnn._core import checks
from tfp_ibnn.metrics._base import checked

__all__ = [
    "Reliability",
    "adaptive_calibration_error",
    "classwise_calibration_error",
    "expected_calibration_error",
    "maximum_calibration_error",
    "reliability",
]


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
        filled = self.count > 0
        return float(np.sum(self.count[filled] * self._gap[filled]) / np.sum(self.count))

    @property
    def mce(self) -> float:
        """The maximum calibration error, max_i |accuracy_i - confidence_i|."""
        return float(np.nanmax(self._gap))

    @property
    def _gap(self) -> np.ndarray:
        return np.abs(self.accuracy - self.confidence)


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
        sample_weight: (...), or a shape that can be broadcast to it along the last axes. Examples
            of weight 0 are neither counted nor checked.
        from_logits: whether `probabilities` are logits.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> bins = ibnn.metrics.reliability([[0.8, 0.2], [0.8, 0.2]], [0, 1])
        >>> round(bins.ece, 4)
        0.3
    """
    bins = checks.positive_integer("bins", bins)
    examples = checked(probabilities, labels, sample_weight, from_logits)
    count, confident, right = _sums(*examples.top_label(np), examples.weight, bins)
    with np.errstate(invalid="ignore"):
        return Reliability(bin_edges(bins), count, confident / count, right / count)


def expected_calibration_error(
    probabilities: Any,
    labels: Any,
    bins: int = 15,
    *,
    sample_weight: Any = None,
    from_logits: bool = False,
) -> float:
    """Return the expected calibration error; the arguments are those of `reliability`.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> ibnn.metrics.expected_calibration_error([[0.8, 0.2], [0.8, 0.2]], [0, 1])
        0.3
    """
    return reliability(
        probabilities, labels, bins, sample_weight=sample_weight, from_logits=from_logits
    ).ece


def maximum_calibration_error(
    probabilities: Any,
    labels: Any,
    bins: int = 15,
    *,
    sample_weight: Any = None,
    from_logits: bool = False,
) -> float:
    """Return the largest error of a filled bin; the arguments are those of `reliability`.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> ibnn.metrics.maximum_calibration_error([[0.8, 0.2], [0.6, 0.4]], [0, 1])
        0.6
    """
    return reliability(
        probabilities, labels, bins, sample_weight=sample_weight, from_logits=from_logits
    ).mce


def adaptive_calibration_error(
    probabilities: Any,
    labels: Any,
    bins: int = 15,
    *,
    sample_weight: Any = None,
    from_logits: bool = False,
) -> float:
    """Return the calibration error over bins of equal mass; the arguments are `reliability`'s.

    An example on the boundary of two bins, or several of the same confidence, count in both in
    proportion. The order of the examples does not matter.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> ibnn.metrics.adaptive_calibration_error([[0.8, 0.2], [0.6, 0.4]], [0, 1], bins=2)
        0.4
    """
    bins = checks.positive_integer("bins", bins)
    examples = checked(probabilities, labels, sample_weight, from_logits)
    confidence, correct = (part[:, 0] for part in examples.top_label(np))
    level, which = np.unique(confidence, return_inverse=True)
    mass, right = (
        np.concatenate([[0.0], np.cumsum(np.bincount(which, weights=weight))])
        for weight in (examples.weight, examples.weight * (correct - confidence))
    )
    # Linear between two levels: that is the split in proportion.
    gap = np.diff(np.interp(mass[-1] * bin_edges(bins), mass, right))
    return float(np.sum(np.abs(gap)) / mass[-1])


def classwise_calibration_error(
    probabilities: Any,
    labels: Any,
    bins: int = 15,
    *,
    sample_weight: Any = None,
    from_logits: bool = False,
) -> float:
    """Return the calibration error of all classes' probabilities, averaged over the classes.

    The arguments are those of `reliability`.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> ibnn.metrics.classwise_calibration_error([[0.8, 0.2], [0.8, 0.2]], [0, 1])
        0.3
    """
    bins = checks.positive_integer("bins", bins)
    examples = checked(probabilities, labels, sample_weight, from_logits)
    count, frequency, mean = _sums(examples.probabilities, examples.targets, examples.weight, bins)
    return float(np.sum(np.abs(frequency - mean)) / np.sum(count))


def bin_edges(bins: int) -> np.ndarray:
    """Return the edges of equal-width bins, (bins + 1,)."""
    # Each correctly rounded, as linspace's are not: 0.8 lies on the edge 12 / 15.
    return np.arange(bins + 1) / bins


def _sums(
    confidence: np.ndarray, success: np.ndarray, weight: np.ndarray, bins: int
) -> list[np.ndarray]:
    """Return the sums of weight, confidence and success by bin, one column after another."""
    columns = confidence.shape[-1]
    # In the precision of the predictions: 0.8 lies on the edge 0.8 in float32 too.
    edges = bin_edges(bins)[1:-1].astype(confidence.dtype)
    which = np.searchsorted(edges, confidence, side="left") + bins * np.arange(columns)
    return [
        np.bincount(which.ravel(), (weight[:, None] * part).ravel(), minlength=bins * columns)
        for part in (np.ones_like(confidence), confidence, success)
    ]
