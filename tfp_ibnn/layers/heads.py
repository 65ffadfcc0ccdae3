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
        channels = checks.channels_of("GaussianHead", input_shape)
        if channels % 2:
            raise ValueError(
                "GaussianHead needs two inputs for each output, a mean and a spread; got the input "
                f"shape {tuple(input_shape)}. Give the layer before it 2 * outputs units."
            )

    def call(self, inputs: Tensor) -> Tensor:
        """Return (..., 2D): D means, then D standard deviations."""
        loc, raw_scale = ops.split(inputs, 2, axis=-1)
        scale = ops.softplus(raw_scale)
        scale = scale + self.min_scale
        return ops.concatenate([loc, scale], axis=-1)

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
        """Return the loss of each example.

        Args:
            y_true: targets, (..., D), or (...,) if D is 1.
            y_pred: means and standard deviations, (..., 2D).

        Returns:
            Nats, (...,).
        """
        outputs = ops.convert_to_tensor(y_pred)
        loc, scale = ops.split(outputs, 2, axis=-1)
        targets = matched(y_true, loc)
        return gaussian_nll(targets, loc, ops.square(scale))


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class DistributionNLL(keras.losses.Loss):
    """Negative log-likelihood of targets under the distributions that a function makes, in nats.

    `MonteCarlo` averages the distributions of a network that is compiled with it.

    Args:
        make: function of the outputs (..., P) that returns a TFP distribution of the targets, with
            the batch shape (...), or (..., D) for D independent numbers, whose losses are summed.
            `ibnn.tfd` has TFP's distributions for the backend in use. Register the function by
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
        if isinstance(make, dict):  # from a config
            make = keras.saving.deserialize_keras_object(make)
        self.make = make
        if not callable(self.make):
            raise ValueError(f"`make` must be a function of the outputs; got {make!r}.")

    def call(self, y_true: Any, y_pred: Any) -> Tensor:
        """Return the loss of each example.

        Args:
            y_true: targets, of the shape of the distribution's draws.
            y_pred: outputs, (..., P).

        Returns:
            Nats, (...,).
        """
        outputs = ops.convert_to_tensor(y_pred)
        distribution = self.make(outputs)
        if not callable(getattr(distribution, "log_prob", None)):
            raise ValueError(f"`make` must return a TFP distribution; got {distribution!r}.")
        shape = (*distribution.batch_shape, *distribution.event_shape)
        draw = keras.KerasTensor(shape, outputs.dtype)
        return -log_prob(distribution, matched(y_true, draw), outputs)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "make": keras.saving.serialize_keras_object(self.make)}


def log_prob(distribution: Any, y: Tensor, outputs: Tensor) -> Tensor:
    """Return the log-density of targets, summed over independent numbers.

    Args:
        distribution: of the targets, with batch shape (...) or (..., D).
        y: targets.
        outputs: those that the distribution was made of, (..., P).

    Returns:
        Nats, (...,).
    """
    value = distribution.log_prob(y)
    if len(value.shape) == len(outputs.shape):
        return ops.sum(value, axis=-1)
    return value


def gaussian_nll(y: Tensor, loc: Tensor, variance: Tensor) -> Tensor:
    """Return minus the log-density of targets under independent Gaussians, summed over D.

    Args:
        y: targets, (..., D).
        loc: means, (..., D).
        variance: variances, (..., D).

    Returns:
        Nats, (...,).
    """
    distance = ops.square(y - loc) / variance
    log_variance = ops.log(variance)
    constant = math.log(2 * math.pi)
    terms = distance + log_variance + constant
    return 0.5 * ops.sum(terms, axis=-1)


def matched(y_true: Any, like: Tensor) -> Tensor:
    """Return targets with the shape of the predicted means, or raise.

    Args:
        y_true: targets; an axis of size 1 at their end may be missing, or be one too many.
        like: the means, (..., D).

    Returns:
        The targets in the type of the means.
    """
    y_true = ops.cast(y_true, like.dtype)
    surplus = len(y_true.shape) - len(like.shape)
    if surplus == -1 and like.shape[-1] == 1:
        y_true = y_true[..., None]
    elif surplus == 1 and y_true.shape[-1] == 1:
        y_true = y_true[..., 0]
    shape = tuple(y_true.shape)
    expected = tuple(like.shape)
    if not _agree(shape, expected):
        raise ValueError(f"The targets must have the shape {expected} of the means; got {shape}.")
    return y_true


def _agree(shape: tuple[int | None, ...], other: tuple[int | None, ...]) -> bool:
    """Whether two shapes are the same as far as they are known."""
    if len(shape) != len(other):
        return False
    pairs = zip(shape, other, strict=True)
    return all(x == y for x, y in pairs if x is not None and y is not None)
