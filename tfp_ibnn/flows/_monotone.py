"""The scalar root finder that gives planar and Sylvester flows their inverse."""

from keras import ops

from tfp_ibnn._core.backend import Tensor, tanh

__all__ = ["solve_monotone"]

_BISECTIONS = 60


def solve_monotone(slope: Tensor, offset: Tensor, target: Tensor) -> Tensor:
    """Solve a + slope * tanh(a + offset) = target for a, element by element.

    For slope > -1 the left side increases strictly in a, and |tanh| < 1 puts the one root within
    |slope| of the target. Bisection finds it to rounding. Loops carry no gradient, so the root is
    then held fixed and one Newton step, in which only the arguments are differentiated, gives both
    the last digits and the exact first derivative (the implicit function theorem).

    Args:
        slope: greater than -1; broadcasts against `target`.
        offset: broadcasts against `target`.
        target: any shape.
    """
    held_slope, held_offset = ops.stop_gradient(slope), ops.stop_gradient(offset)
    held_target = ops.stop_gradient(target)
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
