"""Radial flow."""

import math
from typing import ClassVar

import keras
from keras import ops

from tfp_ibnn._core import constraints
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.flows._rows import column
from tfp_ibnn.flows.bijector import FlowBijector
from tfp_ibnn.flows.flow import Flow


class RadialBijector(FlowBijector):
    """y = x + beta * (x - center) / (alpha + r), with r = |x - center|.

    With h = beta / (alpha + r), the log-determinant is (channels - 1) log(1 + h) +
    log(1 + alpha h / (alpha + r)). Invertible for alpha > 0 and beta >= -alpha.

    Inverse: with R = |y - center|, r solves r^2 + (alpha + beta - R) r - alpha R = 0 and is its one
    root that is not negative. With p = (alpha + beta - R) / 2 and q = sqrt(p^2 + alpha R) it is
    q - p = alpha R / (q + p).

    Cost: O(channels) per draw, both ways.

    Args:
        center: tensor (..., channels).
        alpha: tensor (...,), positive.
        beta: tensor (...,), at least -alpha.
    """

    parameter_ndims: ClassVar[dict[str, int]] = {"center": 1, "alpha": 0, "beta": 0}

    def _inverse(self, y: Tensor) -> Tensor:
        mapped_radius = _distance(y, self.center)
        alpha = column(self.alpha)
        p = alpha + column(self.beta) - mapped_radius
        p = 0.5 * p
        product = alpha * mapped_radius
        q = ops.sqrt(p * p + product)
        # Of the two equal forms of the root, each is used where it does not cancel.
        is_positive = p > 0
        divisor = ops.where(is_positive, p + q, 1)
        radius = ops.where(is_positive, product / divisor, q - p)
        stretch = 1 + self._pull(radius)
        offset = (y - self.center) / stretch
        return self.center + offset

    def forward_and_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        radius = _distance(x, self.center)
        pull = self._pull(radius)
        offset = x - self.center
        y = x + pull * offset
        alpha = column(self.alpha)
        slope = pull * alpha / (alpha + radius)
        across = ops.log1p(pull)
        along = ops.log1p(slope)
        dimensions_across = x.shape[-1] - 1
        log_det = dimensions_across * across + along
        return y, log_det[..., 0]

    def _pull(self, radius: Tensor) -> Tensor:
        """Return h, with the last axis kept."""
        reach = column(self.alpha) + radius
        return column(self.beta) / reach


def _distance(x: Tensor, center: Tensor) -> Tensor:
    """Return |x - center| with the last axis kept; its gradient at the center is 0, not NaN."""
    square = ops.square(x - center)
    square = ops.sum(square, axis=-1, keepdims=True)
    is_apart = square > 0
    positive = ops.where(is_apart, square, 1)
    return ops.where(is_apart, ops.sqrt(positive), 0)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Radial(Flow):
    """Radial flow: pulls draws towards a center, or pushes them away from it.

    alpha is kept positive by a softplus, and beta = alpha * m(raw) with m > -1
    (`constraints.above_minus_one`). It starts at beta = 0, the identity; alpha starts at the
    typical distance of a draw, sqrt(channels).

    y = x + h (x - center), with h = beta / (alpha + r) and r = |x - center|. Log-determinant:
    (channels - 1) log(1 + h) + log(1 + alpha h / (alpha + r)). Always invertible: r solves a
    quadratic equation. Cost: O(channels) per draw, both ways. The arguments are those of `Flow`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> flow = ibnn.flows.Radial()
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
        typical_distance = math.sqrt(self.channels)
        initial_raw_alpha = constraints.inverse_scale(typical_distance)
        normal = keras.initializers.RandomNormal(stddev=0.1)
        raw_alpha = keras.initializers.Constant(initial_raw_alpha)
        self.center = self.add_parameter("center", (self.channels,), normal)
        self.raw_alpha = self.add_parameter("raw_alpha", (), raw_alpha)
        self.raw_beta = self.add_parameter("raw_beta", (), "zeros")

    def bijector_of(self, center: Tensor, raw_alpha: Tensor, raw_beta: Tensor) -> RadialBijector:
        alpha = constraints.scale(raw_alpha)
        ratio = constraints.above_minus_one(raw_beta)
        return RadialBijector(center=center, alpha=alpha, beta=alpha * ratio)
