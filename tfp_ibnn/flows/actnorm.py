"""Activation normalisation with a bounded scale."""

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
        raw = self.parameter(self.raw_log_scale, condition)
        return AffineBijector(shift=shift, scale=ops.exp(constraints.bounded(raw, self.limit)))

    def adapt(self, samples: Tensor) -> None:
        """Set the weights so that `samples` (..., channels) come out with mean 0, deviation 1.

        With a condition, this holds where it is 0.
        """
        values = np.asarray(ops.convert_to_numpy(samples), dtype="float64")
        if not self.built:
            self.build(values.shape)
        if values.ndim < 2 or values.shape[-1] != self.channels:
            shape = f"(draws, ..., {self.channels})"
            raise ValueError(f"`samples` must have the shape {shape}; got {values.shape}.")
        values = values.reshape(-1, self.channels)
        deviation = values.std(axis=0)
        if len(values) < 2 or not np.all(deviation > 0) or not np.all(np.isfinite(values)):
            got = f"the shape {values.shape} and standard deviations {deviation}"
            raise ValueError(f"`samples` must be finite, and differ in every channel; got {got}.")
        ratio = np.clip(-np.log(deviation) / self.limit, -0.99, 0.99)
        scale = np.exp(self.limit * ratio)
        self.raw_log_scale.assign(self.limit * np.arctanh(ratio))
        self.shift.assign(-values.mean(axis=0) * scale)
