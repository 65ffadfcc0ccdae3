"""Batch normalization as a flow."""

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
    for flow in flows:
        for layer in keras_internals.nested_layers(flow):
            if isinstance(layer, BatchNorm):
                raise ValueError(
                    "`flows` must not have BatchNorm, whose statistics stay: take ActNorm()."
                )


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class BatchNorm(Flow):
    """Normalize the draws by their own statistics, then shift and scale.

    y = shift + exp(bounded(raw)) * (x - mean) / sqrt(variance). In training, `forward_and_log_det`
    takes mean and variance from the draws themselves and updates the running statistics; otherwise,
    and for a single draw, it uses the running statistics. `bijector` always uses these and is
    therefore a fixed invertible map, which starts as the identity.

    The log-determinant treats the statistics as constants, as is usual; the KL of a training step
    is thus exact only up to their sampling error.

    Args:
        momentum: float in [0, 1), the share of the old running statistics that is kept at each
            training step. Defaults to 0.99.
        limit: positive float, bound of |log scale|. Defaults to 3.
        **kwargs: arguments of `Flow`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> flow = ibnn.flows.BatchNorm()
        >>> x = keras.random.normal((100, 2), mean=5.0, seed=0)
        >>> y, log_det = flow.forward_and_log_det(x, training=True)
        >>> bool(abs(keras.ops.mean(y)) < 1e-5)
        True

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
        mean = ops.convert_to_tensor(self.mean)
        variance = ops.convert_to_tensor(self.variance)
        return self._bijector(mean, variance, condition)

    def forward_and_log_det(
        self, x: Tensor, condition: Tensor | None = None, training: bool = False
    ) -> tuple[Tensor, Tensor]:
        if not self.built:
            self.build(tuple(x.shape))
        if not training:
            return super().forward_and_log_det(x, condition)
        condition = self.checked_condition(condition)  # before the statistics change
        mean, variance = self._statistics(x)
        self._update(self.mean, mean)
        self._update(self.variance, variance)
        bijector = self._bijector(mean, variance, condition)
        log_det = bijector.forward_log_det_jacobian(x, self.event_ndims)
        return bijector.forward(x), log_det

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the draws; the running ones if there is a single draw."""
        running_mean = ops.convert_to_tensor(self.mean)
        running_variance = ops.convert_to_tensor(self.variance)
        axes = tuple(range(len(x.shape) - 1))
        if not axes:
            return running_mean, running_variance
        one_of_each = ops.stop_gradient(x)[..., 0]
        count = ops.prod(ops.shape(one_of_each))
        are_several = count > 1
        mean = mean_of(x, axis=axes)
        mean = ops.where(are_several, mean, running_mean)
        squares = ops.square(x - mean)
        variance = mean_of(squares, axis=axes)
        variance = ops.where(are_several, variance, running_variance)
        return mean, variance

    def _update(self, running: keras.Variable, new: Tensor) -> None:
        new = ops.stop_gradient(new)
        share_of_new = 1 - self.momentum
        running.assign(self.momentum * running + share_of_new * new)

    def _bijector(self, mean: Tensor, variance: Tensor, condition: Tensor | None) -> AffineBijector:
        raw_log_scale = self.parameter(self.raw_log_scale, condition)
        log_scale = constraints.bounded(raw_log_scale, self.limit)
        variance = ops.maximum(variance, _MIN_VARIANCE)
        scale = ops.exp(log_scale) / ops.sqrt(variance)
        shift = self.parameter(self.shift, condition)
        return AffineBijector(
            shift=shift - scale * mean,
            scale=scale,
        )
