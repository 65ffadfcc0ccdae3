"""Batch normalisation as a flow."""

from typing import Any

import keras
from keras import ops

from tfp_ibnn._core import checks, constraints, keras_internals
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.backend import mean as mean_of
from tfp_ibnn.flows.affine import AffineBijector
from tfp_ibnn.flows.flow import Flow

_MIN_VARIANCE = 1e-5


def refuse_batch_norm(flows: list[Flow]) -> None:
    """Raise if there is a BatchNorm, for users of flows who do not tell them of training."""
    layers = [part for flow in flows for part in keras_internals.nested_layers(flow)]
    if any(isinstance(layer, BatchNorm) for layer in layers):
        raise ValueError("`flows` must not have BatchNorm, whose statistics stay: take ActNorm().")


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class BatchNorm(Flow):
    """Normalise the draws by their own statistics, then shift and scale.

    y = shift + exp(bounded(raw)) * (x - mean) / sqrt(variance). In training, `forward_and_log_det`
    takes mean and variance from the draws themselves and updates the running statistics; otherwise,
    and for a single draw, it uses the running statistics. `bijector` always uses these and is
    therefore a fixed invertible map, which starts as the identity.

    The log-determinant treats the statistics as constants, as is usual; the KL of a training step
    is thus exact only up to their sampling error.

    Args:
        momentum: share of the old running statistics kept at each training step.
        limit: bound of |log scale|.

    References:
        Papamakarios et al., Masked Autoregressive Flow for Density Estimation, arXiv 1705.07057.
    """

    mixes_draws = True

    def __init__(self, momentum: float = 0.99, limit: float = 3.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.momentum = checks.fraction("momentum", momentum)
        self.limit = checks.positive("limit", limit)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        shape = (self.channels,)
        self.shift = self.add_parameter("shift", shape, "zeros")
        self.raw_log_scale = self.add_parameter("raw_log_scale", shape, "zeros")
        # Replicas see different draws, and keep the mean of what each has found.
        running = {"trainable": False, "aggregation": "mean"}
        self.mean = self.add_parameter("mean", shape, "zeros", **running)
        self.variance = self.add_parameter("variance", shape, "ones", **running)

    def bijector(self, condition: Tensor | None = None) -> AffineBijector:
        mean, variance = map(ops.convert_to_tensor, (self.mean, self.variance))
        return self._bijector(mean, variance, condition)

    def forward_and_log_det(
        self, x: Tensor, condition: Tensor | None = None, training: bool = False
    ) -> tuple[Tensor, Tensor]:
        if not self.built:
            self.build(tuple(x.shape))
        if not training:
            return super().forward_and_log_det(x, condition)
        condition = self.checked_condition(condition)  # before the statistics change
        axes = tuple(range(len(x.shape) - 1))
        count = ops.prod(ops.shape(ops.stop_gradient(x)[..., 0])) if axes else 1
        several = ops.convert_to_tensor(count) > 1
        old_mean, old_variance = map(ops.convert_to_tensor, (self.mean, self.variance))
        mean = ops.where(several, mean_of(x, axis=axes), old_mean)
        spread = mean_of(ops.square(x - mean), axis=axes)
        variance = ops.where(several, spread, old_variance)
        for running, new in ((self.mean, mean), (self.variance, variance)):
            new = ops.stop_gradient(new)
            running.assign(self.momentum * running + (1 - self.momentum) * new)
        bijector = self._bijector(mean, variance, condition)
        return bijector.forward(x), bijector.forward_log_det_jacobian(x, self.event_ndims)

    def _bijector(self, mean: Tensor, variance: Tensor, condition: Tensor | None) -> AffineBijector:
        shift = self.parameter(self.shift, condition)
        raw = self.parameter(self.raw_log_scale, condition)
        deviation = ops.sqrt(ops.maximum(variance, _MIN_VARIANCE))
        scale = ops.exp(constraints.bounded(raw, self.limit)) / deviation
        return AffineBijector(shift=shift - scale * mean, scale=scale)
