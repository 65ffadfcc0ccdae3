"""Proper scoring rules: the expected score is best for the true probabilities."""

from types import ModuleType
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.metrics._base import NAMES, ClassificationMetric, Examples, checked, prepare


def brier_score(
    probabilities: Any, labels: Any, *, sample_weight: Any = None, from_logits: bool = False
) -> float:
    """Return the Brier score, the mean of sum_k (p_k - y_k)^2.

    Args:
        probabilities: (..., classes) or (..., 1), as for `reliability`.
        labels: (...), (..., 1) or one-hot, as for `reliability`.
        sample_weight: (...), or a shape that broadcasts to it; 0 leaves an example out, unchecked.
        from_logits: whether `probabilities` are logits.

    Returns:
        The score, from 0 to 2; lower is better.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> ibnn.metrics.brier_score([[0.8, 0.2], [0.8, 0.2]], [0, 1])
        0.68
    """
    examples = checked(probabilities, labels, sample_weight, from_logits)
    scores = BrierScore._score(np, examples)
    mean = np.average(scores, weights=examples.weight)
    return float(mean)


def negative_log_likelihood(
    probabilities: Any, labels: Any, *, sample_weight: Any = None, from_logits: bool = False
) -> float:
    """Return the mean over examples of -log p_y.

    A probability of 0 counts as the smallest normal float of its dtype: an example costs 87.3 at
    most in float32 and 708.4 in float64. From logits the cost is exact, and has no bound.

    Args:
        probabilities: (..., classes) or (..., 1), as for `reliability`.
        labels: (...), (..., 1) or one-hot, as for `reliability`.
        sample_weight: (...), or a shape that broadcasts to it; 0 leaves an example out, unchecked.
        from_logits: whether `probabilities` are logits.

    Returns:
        The mean in nats; lower is better.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> ibnn.metrics.negative_log_likelihood([[0.8, 0.2], [0.8, 0.2]], [0, 1])
        0.9163
    """
    examples = checked(probabilities, labels, sample_weight, from_logits)
    scores = NegativeLogLikelihood._score(np, examples)
    mean = np.average(scores, weights=examples.weight)
    return float(mean)


class _MeanScore(ClassificationMetric):
    """Weighted mean of one score for each example, `_score`, by numpy or keras.ops."""

    sums = ("total", "weight")

    def _count(self, examples: Examples) -> None:
        scores = self._score(ops, examples)
        weighted = examples.weight * scores
        self.total.add(ops.sum(weighted))
        self.weight.add(ops.sum(examples.weight))

    def _value(self) -> Tensor:
        total = self.total.value()
        weight = self.weight.value()
        return ops.divide_no_nan(total, weight)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class BrierScore(_MeanScore):
    """Brier score: the squared distance of the probabilities from the truth.

    BS = 1 / N * sum_n sum_k (p_nk - y_nk)^2, between 0 and 2; with two classes it is twice
    scikit-learn's `brier_score_loss`. Arguments are as in `ExpectedCalibrationError`. Reference:
    Brier, Verification of Forecasts, Monthly Weather Review 78, 1950.
    """

    default_name = "brier"

    @staticmethod
    def _score(xp: ModuleType, examples: Examples) -> Any:
        distance = examples.probabilities - examples.targets
        return xp.sum(xp.square(distance), axis=-1)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class NegativeLogLikelihood(_MeanScore):
    """Negative log-likelihood of the labels, in nats.

    NLL = -1 / N * sum_n log p_n,y(n). A probability of 0 counts as the smallest normal float of its
    dtype (at most 87.3 in float32), unless from logits. Arguments: see `ExpectedCalibrationError`.
    Reference: Gneiting and Raftery, Strictly Proper Scoring Rules, JASA 102, 2007.
    """

    default_name = "nll"

    @staticmethod
    def _score(xp: ModuleType, examples: Examples) -> Any:
        # Not a product: an impossible class has the logarithm -inf.
        is_label = examples.targets > 0
        of_label = xp.where(is_label, examples.log_probabilities, 0)
        return -xp.sum(of_label, axis=-1)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Accuracy(_MeanScore):
    """Fraction of examples whose most probable class is the label's."""

    default_name = "accuracy"

    @staticmethod
    def _score(xp: ModuleType, examples: Examples) -> Any:
        _, is_right = examples.top_label(xp)
        return is_right[:, 0]


def negative_log_prob(y_true: Any, y_pred: Tensor) -> Tensor:
    """Return minus the log of each label's probability, as `NegativeLogLikelihood` does.

    Args:
        y_true: labels, in any form that `reliability` takes.
        y_pred: (..., classes), probabilities.

    Returns:
        Costs (examples,) in nats.
    """
    labels = ops.convert_to_tensor(y_true)
    prepared = prepare(ops, y_pred, labels, ops.ones(()), False, NAMES)
    return NegativeLogLikelihood._score(ops, prepared.examples)
