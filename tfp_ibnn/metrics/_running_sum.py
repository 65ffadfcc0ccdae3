"""Sums over many batches, as exact in float32 as the numbers that go into them."""

from typing import NamedTuple

import keras
from keras import ops

from tfp_ibnn._core.backend import Tensor


class RunningSum(NamedTuple):
    """A sum that keeps what rounding takes from it (Knuth's two-sum), for many small addends.

    A plain sum in float32 loses a part of every addend once it is large: 16,777,216 + 1 is
    16,777,216.
    """

    rounded: keras.Variable
    rest: keras.Variable

    @classmethod
    def of(cls, metric: keras.metrics.Metric, name: str, shape: tuple[int, ...]) -> "RunningSum":
        """Return a sum whose two variables belong to a metric, which sets them to 0."""
        names = name, f"{name}_rest"
        return cls(*(metric.add_variable(shape, "zeros", metric.dtype, name=n) for n in names))

    def add(self, addend: Tensor) -> None:
        """Add a tensor of the shape of the sum."""
        before = ops.convert_to_tensor(self.rounded.value)
        after = before + addend
        rounded_addend = after - before
        lost = (before - (after - rounded_addend)) + (addend - rounded_addend)
        # Infinity less infinity is NaN, but an infinite sum has no rest.
        lost = ops.where(ops.isfinite(after), lost, ops.zeros_like(lost))
        self.rest.assign_add(lost)
        self.rounded.assign(after)

    def value(self) -> Tensor:
        """Return the sum."""
        return ops.convert_to_tensor(self.rounded) + ops.convert_to_tensor(self.rest)
