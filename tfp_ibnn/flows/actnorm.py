"""Activation normalization with a bounded scale."""

from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks, constraints
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.flows.affine import AffineBijector
from tfp_ibnn.flows.flow import Flow


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class ActNorm(Flow):
    """Element-wise affine flow, y = shift + exp(bounded(raw)) * x, with |log scale| below `limit`.

    It starts as the identity. Glow (Kingma and Dhariwal, arXiv 1807.03039) sets such a layer from
    its first batch of data; for a posterior that would whiten the very noise that is to be learned,
    so here `adapt` does it on demand, and nothing is ever assigned during a call.

    Log-determinant: sum_c log scale_c. Always invertible. Cost: O(channels) per draw, both ways.

    Args:
        limit: positive float, bound of |log scale|. Defaults to 3.
        **kwargs: arguments of `Flow`.

    Example:
        >>> import keras
        >>> norm = ActNorm()
        >>> norm.adapt(keras.random.normal((1000, 2), mean=5.0, seed=0))
        >>> bool(abs(keras.ops.mean(norm(keras.ops.full((1, 2), 5.0)))) < 0.2)
        True
    """

    def __init__(self, limit: float = 3.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.limit = checks.positive("limit", limit)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        self.shift = self.add_parameter("shift", (self.channels,), "zeros")
        self.raw_log_scale = self.add_parameter("raw_log_scale", (self.channels,), "zeros")

    def bijector(self, condition: Tensor | None = None) -> AffineBijector:
        shift = self.parameter(self.shift, condition)
        raw_log_scale = self.parameter(self.raw_log_scale, condition)
        log_scale = constraints.bounded(raw_log_scale, self.limit)
        return AffineBijector(shift=shift, scale=ops.exp(log_scale))

    def adapt(self, samples: Tensor) -> None:
        """Set the weights so that `samples` (..., channels) come out with mean 0, deviation 1.

        With a condition, this holds where it is 0.
        """
        values = np.asarray(ops.convert_to_numpy(samples), dtype="float64")
        if not self.built:
            self.build(values.shape)
        if values.ndim < 2 or values.shape[-1] != self.channels:
            raise ValueError(
                f"`samples` must have the shape (draws, ..., {self.channels}); got {values.shape}."
            )
        values = values.reshape(-1, self.channels)
        deviation = values.std(axis=0)
        is_finite = np.isfinite(values).all()
        differs = (deviation > 0).all()
        if len(values) < 2 or not differs or not is_finite:
            raise ValueError(
                "`samples` must be finite, and differ in every channel; got the shape "
                f"{values.shape} and standard deviations {deviation}."
            )
        share_of_limit = -np.log(deviation) / self.limit
        share_of_limit = np.clip(share_of_limit, -0.99, 0.99)
        raw_log_scale = self.limit * np.arctanh(share_of_limit)
        scale = np.exp(self.limit * share_of_limit)
        mean = values.mean(axis=0)
        self.raw_log_scale.assign(raw_log_scale)
        self.shift.assign(-mean * scale)
