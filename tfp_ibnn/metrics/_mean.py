"""Streaming means, for scores of regressions."""

from typing import Any

import keras
from keras import ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.metrics._base import spread
from tfp_ibnn.metrics._running_sum import RunningSum


class RunningMean(keras.metrics.Metric):
    """Weighted mean of values of any shape; the first axes of the weights are those of the values.

    Keras's own `Mean` adds in float32 alone, and is wrong by percents after millions of batches.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.total = RunningSum.of(self, "total", ())
        self.weight = RunningSum.of(self, "weight", ())

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Count a batch.

        Args:
            values: (...), what the mean is of.
            sample_weight: a shape that broadcasts to that of the values; None is 1.
        """
        values = ops.cast(values, self.dtype)
        if sample_weight is None:
            sample_weight = 1
        weight = ops.cast(sample_weight, self.dtype)
        weight = spread(ops, weight, ops.shape(values), "sample_weight")
        weighted = weight * values
        self.total.add(ops.sum(weighted))
        self.weight.add(ops.sum(weight))

    def result(self) -> Tensor:
        """Return the mean over all batches so far; 0 before the first."""
        total = self.total.value()
        weight = self.weight.value()
        return ops.divide_no_nan(total, weight)


class RootMeanSquaredError(RunningMean):
    """Square root of the mean squared difference of targets and predictions (..., D)."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count a batch.

        Args:
            y_true: (..., D), targets.
            y_pred: (..., D), predictions.
            sample_weight: (...), or a shape that broadcasts to it; None is 1.
        """
        squares = ops.square(y_true - y_pred)
        means = ops.mean(squares, axis=-1)
        super().update_state(means, sample_weight)

    def result(self) -> Tensor:
        return ops.sqrt(super().result())
