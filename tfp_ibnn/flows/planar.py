"""Planar flow."""

from typing import ClassVar

import keras
from keras import ops

from tfp_ibnn._core import constraints
from tfp_ibnn._core.backend import Tensor, tanh
from tfp_ibnn.flows._rows import column, total
from tfp_ibnn.flows.bijector import FlowBijector
from tfp_ibnn.flows.flow import Flow

_BISECTIONS = 60


def solve_monotone(slope: Tensor, offset: Tensor, target: Tensor) -> Tensor:
    """Solve a + slope * tanh(a + offset) = target for a, element by element.

    The left side increases strictly in a, and |tanh| < 1 puts the one root within |slope| of the
    target. Bisection finds it to rounding. Loops carry no gradient, so the root is then held fixed
    and one Newton step, in which only the arguments are differentiated, gives both the last digits
    and the exact first derivative (the implicit function theorem).

    Args:
        slope: tensor, above -1.
        offset: tensor.
        target: tensor; the shapes of all three broadcast.

    Returns:
        Tensor, the roots.
    """
    held_slope = ops.stop_gradient(slope)
    held_offset = ops.stop_gradient(offset)
    held_target = ops.stop_gradient(target)
    root = _bisect(held_slope, held_offset, held_target)
    bend = tanh(root + held_offset)
    derivative = 1 + held_slope * (1 - bend * bend)
    derivative = ops.stop_gradient(derivative)
    value = root + slope * tanh(root + offset)
    residual = value - target
    return root - residual / derivative


def _bisect(slope: Tensor, offset: Tensor, target: Tensor) -> Tensor:
    radius = ops.abs(slope) + ops.zeros_like(target + offset)

    def halve(_: Tensor, bracket: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        low, high = bracket
        middle = 0.5 * (low + high)
        bend = tanh(middle + offset)
        value = middle + slope * bend
        is_above = value > target
        low = ops.where(is_above, low, middle)
        high = ops.where(is_above, middle, high)
        return low, high

    lowest = target - radius
    highest = target + radius
    low, high = ops.fori_loop(0, _BISECTIONS, halve, (lowest, highest))
    middle = 0.5 * (low + high)
    return ops.stop_gradient(middle)


class PlanarBijector(FlowBijector):
    """y = x + u * tanh(w.x + b).

    Log-determinant: log(1 + w.u * (1 - tanh^2(w.x + b))). Invertible for w.u > -1. The product w.u
    is given too, since recomputing it from long vectors in float32 may round below -1.

    Inverse: the product with w gives one equation for a = w.x,
        a + w.u * tanh(a + b) = w.y,
    which has one root; then x = y - u * tanh(a + b).

    Cost: O(channels) per draw; the inverse adds some 60 scalar steps per draw.

    Args:
        u: tensor (..., channels).
        w: tensor (..., channels).
        b: tensor (...,).
        slope: tensor (...,), the product w.u, greater than -1.
    """

    parameter_ndims: ClassVar[dict[str, int]] = {"u": 1, "w": 1, "b": 0, "slope": 0}

    def _inverse(self, y: Tensor) -> Tensor:
        mapped_product = total(y * self.w)
        product = solve_monotone(self.slope, self.b, mapped_product)
        bend = tanh(product + self.b)
        shift = column(bend) * self.u
        return y - shift

    def forward_and_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        product = total(x * self.w)
        bend = tanh(product + self.b)
        shift = column(bend) * self.u
        slope = 1 - bend * bend
        log_det = ops.log1p(self.slope * slope)
        return x + shift, log_det


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Planar(Flow):
    """Planar flow, y = x + u * tanh(w.x + b): bends the space across one hyperplane.

    The free vector u' is corrected along w so that w.u = m(w.u') > -1, where m is the identity for
    positive arguments (`constraints.above_minus_one`); u' = 0 is the identity, where it starts.
    Log-determinant: log(1 + w.u * (1 - tanh^2(w.x + b))). Always invertible: one scalar equation
    gives w.x. Cost: O(channels) per draw; the inverse adds some 60 scalar steps. The arguments are
    those of `Flow`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> flow = ibnn.flows.Planar()
        >>> flow.build((None, 3))
        >>> y, log_det = flow.forward_and_log_det(keras.ops.ones((2, 3)))
        >>> float(y[0, 0]), float(log_det[0])
        (1.0, 0.0)

    References:
        Rezende and Mohamed, Variational Inference with Normalizing Flows, arXiv 1505.05770.
    """

    stackable = True

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        size = (self.channels,)
        spread = self.channels**-0.5
        normal = keras.initializers.RandomNormal(stddev=spread)
        self.u = self.add_parameter("u", size, "zeros")
        self.w = self.add_parameter("w", size, normal)
        self.b = self.add_parameter("b", (), "zeros")

    def bijector_of(self, u: Tensor, w: Tensor, b: Tensor) -> PlanarBijector:
        product = total(w * u)
        slope = constraints.above_minus_one(product)
        # The correction vanishes to second order with w; the addend only guards against 0 / 0.
        square = total(w * w) + 1e-12
        factor = (slope - product) / square
        correction = column(factor) * w
        return PlanarBijector(u=u + correction, w=w, b=b, slope=slope)
