"""Radial flow."""

import math
from typing import ClassVar

import keras
from keras import ops

from tfp_ibnn._core import constraints
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.flows.flow import Flow, FlowBijector, column


class RadialBijector(FlowBijector):
    """y = x + beta * (x - center) / (alpha + r), with r = |x - center|.

    With h = beta / (alpha + r), the log-determinant is (channels - 1) log(1 + h) +
    log(1 + alpha h / (alpha + r)). Invertible for alpha > 0 and beta >= -alpha.

    Inverse: with R = |y - center|, r solves r^2 + (alpha + beta - R) r - alpha R = 0 and is its one
    root that is not negative.

    Cost: O(channels) per draw, both ways.

    Args:
        center: (..., channels)
        alpha: (...,), positive.
        beta: (...,), at least -alpha.
    """

    parameter_ndims: ClassVar[dict[str, int]] = {"center": 1, "alpha": 0, "beta": 0}

    def _inverse(self, y: Tensor) -> Tensor:
        far = _distance(y, self.center)
        alpha, beta = column(self.alpha), column(self.beta)
        half = 0.5 * (alpha + beta - far)
        root = ops.sqrt(half * half + alpha * far)
        # Of the two equal forms of the root, each is used where it does not cancel.
        positive = half > 0
        divisor = ops.where(positive, half + root, 1)
        near = ops.where(positive, alpha * far / divisor, root - half)
        return self.center + (y - self.center) / (1 + self._pull(near))

    def forward_and_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        r, alpha = _distance(x, self.center), column(self.alpha)
        pull = self._pull(r)
        around, along = ops.log1p(pull), ops.log1p(pull * alpha / (alpha + r))
        log_det = (x.shape[-1] - 1) * around + along
        return x + pull * (x - self.center), log_det[..., 0]

    def _pull(self, r: Tensor) -> Tensor:
        return column(self.beta) / (column(self.alpha) + r)


def _distance(x: Tensor, center: Tensor) -> Tensor:
    """Return |x - center| with the last axis kept; its gradient at the center is 0, not NaN."""
    square = ops.sum(ops.square(x - center), axis=-1, keepdims=True)
    apart = square > 0
    return ops.where(apart, ops.sqrt(ops.where(apart, square, 1)), 0)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Radial(Flow):
    """Radial flow: pulls draws towards a center, or pushes them away from it.

    alpha is kept positive by a softplus, and beta = alpha * m(raw) with m > -1
    (`constraints.above_minus_one`). It starts at beta = 0, the identity; alpha starts at the
    typical distance of a draw, sqrt(channels).

    References:
        Rezende and Mohamed, Variational Inference with Normalizing Flows, arXiv 1505.05770.
    """

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        spread = keras.initializers.RandomNormal(stddev=0.1)
        reach = constraints.inverse_scale(math.sqrt(self.channels))
        self.center = self.add_parameter("center", (self.channels,), spread)
        self.raw_alpha = self.add_parameter("raw_alpha", (), keras.initializers.Constant(reach))
        self.raw_beta = self.add_parameter("raw_beta", (), "zeros")

    def bijector_of(self, center: Tensor, raw_alpha: Tensor, raw_beta: Tensor) -> RadialBijector:
        alpha, ratio = constraints.scale(raw_alpha), constraints.above_minus_one(raw_beta)
        return RadialBijector(center=center, alpha=alpha, beta=alpha * ratio)
