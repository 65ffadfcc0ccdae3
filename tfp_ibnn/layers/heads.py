"""A regression head that predicts mean and spread, and its loss."""

import math
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.serialization import ConfiguredLayer


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class GaussianHead(ConfiguredLayer, keras.layers.Layer):
    """Turn 2D numbers into the means and the standard deviations of D Gaussians.

    The first half passes as it is; the second becomes softplus(x) + `min_scale`. The layer has no
    weights, so that the Dense layer before it can be converted like any other. The loss for it is
    `GaussianNLL`.

    Args:
        min_scale: the smallest standard deviation.
        **kwargs: those of `keras.layers.Layer`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> model = keras.Sequential(
        ...     [keras.Input((3,)), keras.layers.Dense(2), ibnn.layers.GaussianHead()]
        ... )
        >>> model.compile("adam", ibnn.layers.GaussianNLL())
    """

    def __init__(self, min_scale: float = 1e-3, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.min_scale = checks.positive("min_scale", min_scale)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        if checks.channels_of("GaussianHead", input_shape) % 2:
            got = f"{tuple(input_shape)}. Give the layer before it 2 * outputs units"
            wanted = "two inputs for each output, a mean and a spread"
            raise ValueError(f"GaussianHead needs {wanted}; got the input shape {got}.")

    def call(self, inputs: Tensor) -> Tensor:
        """Return (..., 2D): D means, then D standard deviations."""
        loc, raw = ops.split(inputs, 2, axis=-1)
        return ops.concatenate([loc, ops.softplus(raw) + self.min_scale], axis=-1)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> Any:
        return input_shape


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class GaussianNLL(keras.losses.Loss):
    """Negative log-likelihood of targets under the Gaussians of a `GaussianHead`, in nats.

    sum_d log(scale_d) + ((y_d - loc_d) / scale_d)^2 / 2 + log(2 pi) / 2

    Args:
        name: of the loss.
        **kwargs: those of `keras.losses.Loss`.
    """

    def __init__(self, name: str = "gaussian_nll", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)

    def call(self, y_true: Any, y_pred: Any) -> Tensor:
        """Return the loss of each example, for y_true (..., D), or (...,) if D is 1."""
        loc, scale = ops.split(ops.convert_to_tensor(y_pred), 2, axis=-1)
        return gaussian_nll(matched(y_true, loc), loc, ops.square(scale))


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class DistributionNLL(keras.losses.Loss):
    """Negative log-likelihood of targets under the distributions that a function makes, in nats.

    A network that is compiled with it is averaged by `MonteCarlo` as such distributions too.

    Args:
        make: function of the outputs (..., P) that returns a TFP distribution of the targets, with
            the batch shape (...), or (..., D) for D independent numbers, whose losses are summed.
            `ibnn.tfd` are TFP's distributions for the backend in use. Register the function by
            `keras.saving.register_keras_serializable` for `.keras` files.
        name: of the loss.
        **kwargs: those of `keras.losses.Loss`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> counts = ibnn.layers.DistributionNLL(lambda x: ibnn.tfd.Poisson(log_rate=x))
        >>> float(counts(keras.ops.array([[0.0]]), keras.ops.array([[0.0]])))
        1.0
    """

    def __init__(
        self, make: Callable[[Tensor], Any], name: str = "distribution_nll", **kwargs: Any
    ) -> None:
        super().__init__(name=name, **kwargs)
        self.make = keras.saving.deserialize_keras_object(make) if isinstance(make, dict) else make
        if not callable(self.make):
            raise ValueError(f"`make` must be a function of the outputs; got {make!r}.")

    def call(self, y_true: Any, y_pred: Any) -> Tensor:
        outputs = ops.convert_to_tensor(y_pred)
        found = self.make(outputs)
        if not hasattr(found, "log_prob"):
            raise ValueError(f"`make` must return a TFP distribution; got {found!r}.")
        like = keras.KerasTensor((*found.batch_shape, *found.event_shape), outputs.dtype)
        return -log_prob(found, matched(y_true, like), outputs)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "make": keras.saving.serialize_keras_object(self.make)}


def log_prob(distribution: Any, y: Tensor, outputs: Tensor) -> Tensor:
    """Return the log-density of y, summed over independent numbers, for outputs (..., P)."""
    value = distribution.log_prob(y)
    return ops.sum(value, axis=-1) if len(value.shape) == len(outputs.shape) else value


def gaussian_nll(y: Tensor, loc: Tensor, variance: Tensor) -> Tensor:
    """Return minus the log-density of y (..., D) under independent Gaussians, summed over D."""
    distance = ops.square(y - loc) / variance
    return 0.5 * ops.sum(distance + ops.log(variance) + math.log(2 * math.pi), axis=-1)


def matched(y_true: Any, like: Tensor) -> Tensor:
    """Return targets with the shape of the predicted means, or raise."""
    y_true = ops.cast(y_true, like.dtype)
    if len(y_true.shape) == len(like.shape) - 1 and like.shape[-1] == 1:
        y_true = y_true[..., None]
    elif len(y_true.shape) == len(like.shape) + 1 and y_true.shape[-1] == 1:
        y_true = y_true[..., 0]
    shape, wanted = tuple(y_true.shape), tuple(like.shape)
    unlike = len(shape) != len(wanted)
    if unlike or any(x != y and None not in (x, y) for x, y in zip(shape, wanted, strict=True)):
        raise ValueError(f"The targets must have the shape {wanted} of the means; got {shape}.")
    return y_true
