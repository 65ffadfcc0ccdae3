"""Sums over many batches, as exact in float32 as the numbers that go into them."""

from typing import NamedTuple

import keras
from keras import ops

from tfp_ibnn._core.backend import Tensor


class RunningSum(NamedTuple):
    """A sum that keeps what rounding takes from it (Knuth's two-sum), for many small addends.

    A plain sum in float32 loses a part of every addend once it is large: 16,777,216 + 1 is
    16,777,216.

    Attributes:
        rounded: the sum, as a plain one.
        rest: what rounding took from it.
    """

    rounded: keras.Variable
    rest: keras.Variable

    @classmethod
    def of(cls, metric: keras.metrics.Metric, name: str, shape: tuple[int, ...]) -> "RunningSum":
        """Return a sum whose two variables belong to a metric, which sets them to 0.

        Args:
            metric: the owner of the variables, whose dtype they have.
            name: of the sum; the rest is called "{name}_rest".
            shape: of what is added.

        Returns:
            The sum, of 0.
        """
        dtype = metric.dtype
        rounded = metric.add_variable(shape, "zeros", dtype, name=name)
        rest = metric.add_variable(shape, "zeros", dtype, name=f"{name}_rest")
        return cls(rounded, rest)

    def add(self, addend: Tensor) -> None:
        """Add a tensor of the shape of the sum."""
        before = ops.convert_to_tensor(self.rounded.value)
        after = before + addend
        rounded_addend = after - before
        rounded_sum = after - rounded_addend
        lost_of_sum = before - rounded_sum
        lost = lost_of_sum + (addend - rounded_addend)
        # Infinity less infinity is NaN, but an infinite sum has no rest.
        is_finite = ops.isfinite(after)
        lost = ops.where(is_finite, lost, ops.zeros_like(lost))
        self.rest.assign_add(lost)
        self.rounded.assign(after)

    def value(self) -> Tensor:
        """Return the sum."""
        rounded = ops.convert_to_tensor(self.rounded)
        return rounded + ops.convert_to_tensor(self.rest)
