"""Planar flow."""

from typing import ClassVar

import keras
from keras import ops

from tfp_ibnn._core import constraints
from tfp_ibnn._core.backend import Tensor, tanh
from tfp_ibnn.flows.flow import Flow, FlowBijector, column, total

_BISECTIONS = 60


def solve_monotone(slope: Tensor, offset: Tensor, target: Tensor) -> Tensor:
    """Solve a + slope * tanh(a + offset) = target for a, element by element, where slope > -1.

    The left side increases strictly in a, and |tanh| < 1 puts the one root within |slope| of the
    target. Bisection finds it to rounding. Loops carry no gradient, so the root is then held fixed
    and one Newton step, in which only the arguments are differentiated, gives both the last digits
    and the exact first derivative (the implicit function theorem).
    """
    held_slope, held_offset, held_target = map(ops.stop_gradient, (slope, offset, target))
    radius = ops.abs(held_slope) + ops.zeros_like(held_target + held_offset)

    def halve(_: Tensor, bracket: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        low, high = bracket
        middle = 0.5 * (low + high)
        above = middle + held_slope * tanh(middle + held_offset) > held_target
        return ops.where(above, low, middle), ops.where(above, middle, high)

    low, high = ops.fori_loop(0, _BISECTIONS, halve, (held_target - radius, held_target + radius))
    root = ops.stop_gradient(0.5 * (low + high))
    bend = tanh(root + held_offset)
    derivative = 1 + held_slope * (1 - bend * bend)
    residual = root + slope * tanh(root + offset) - target
    return root - residual / ops.stop_gradient(derivative)


class PlanarBijector(FlowBijector):
    """y = x + u * tanh(w.x + b).

    Log-determinant: log(1 + w.u * (1 - tanh^2(w.x + b))). Invertible for w.u > -1. The product w.u
    is given too, since recomputing it from long vectors in float32 may round below -1.

    Inverse: the product with w gives one equation for a = w.x,
        a + w.u * tanh(a + b) = w.y,
    which has one root; then x = y - u * tanh(a + b).

    Cost: O(channels) per draw; the inverse adds some 60 scalar steps per draw.

    Args:
        u: (..., channels)
        w: (..., channels)
        b: (...,)
        slope: (...,), the product w.u, greater than -1.
    """

    parameter_ndims: ClassVar[dict[str, int]] = {"u": 1, "w": 1, "b": 0, "slope": 0}

    def _inverse(self, y: Tensor) -> Tensor:
        along = solve_monotone(self.slope, self.b, total(y * self.w))
        return y - column(tanh(along + self.b)) * self.u

    def forward_and_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        bend = tanh(total(x * self.w) + self.b)
        return x + column(bend) * self.u, ops.log1p(self.slope * (1 - bend * bend))


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Planar(Flow):
    """Planar flow, y = x + u * tanh(w.x + b): bends the space across one hyperplane.

    The free vector u' is corrected along w so that w.u = m(w.u') > -1, where m is the identity for
    positive arguments (`constraints.above_minus_one`); u' = 0 is the identity, where it starts.

    References:
        Rezende and Mohamed, Variational Inference with Normalizing Flows, arXiv 1505.05770.
    """

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        spread = keras.initializers.RandomNormal(stddev=self.channels**-0.5)
        self.u = self.add_parameter("u", (self.channels,), "zeros")
        self.w = self.add_parameter("w", (self.channels,), spread)
        self.b = self.add_parameter("b", (), "zeros")

    def bijector_of(self, u: Tensor, w: Tensor, b: Tensor) -> PlanarBijector:
        product = total(w * u)
        slope = constraints.above_minus_one(product)
        # The correction vanishes to second order with w; the addend only guards against 0 / 0.
        correction = column((slope - product) / (total(w * w) + 1e-12)) * w
        return PlanarBijector(u=u + correction, w=w, b=b, slope=slope)
