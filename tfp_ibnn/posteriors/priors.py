"""Priors: of the weights for `MeanField`, of z for the other posteriors."""

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor, tfd
from tfp_ibnn._core.serialization import Configured

__all__ = ["Cauchy", "Laplace", "Normal", "Prior", "ScaleMixture", "StudentT", "Tied"]

LOG_2_PI = math.log(2 * math.pi)


def gaussian_entropy(scale: Tensor) -> Tensor:
    """Return the entropy of independent Gaussians in nats, summed over all of them."""
    return ops.sum(ops.log(scale)) + (LOG_2_PI + 1) / 2 * math.prod(scale.shape)


class Prior(Configured):
    """Base of the priors, each over independent numbers.

    A new prior is a subclass with `distribution`, registered for serialization by
    `keras.saving.register_keras_serializable`. Its arguments are attributes of the same names.
    """

    def distribution(self, dtype: str) -> tfd.Distribution:
        """Return the distribution of one number, or of arrays that broadcast to the weights."""
        raise NotImplementedError(f"{type(self).__name__} must define `distribution`.")

    def kl(self, loc: Tensor, scale: Tensor, normal: Callable[[], Tensor]) -> Tensor:
        """Return KL[N(loc, scale^2) || prior], summed over all numbers.

        Where it has no closed form, the prior's log-density is taken at loc + scale * normal().

        Args:
            loc: means of the Gaussians, of any shape.
            scale: their standard deviations, of the same shape.
            normal: gives standard normal noise of that shape.

        Returns:
            The KL in nats, ().
        """
        distribution = self.distribution(loc.dtype)
        dtype = getattr(distribution, "dtype", None) or loc.dtype  # of one given, its own
        draw = ops.cast(loc + scale * normal(), dtype)
        log_prob = ops.sum(distribution.log_prob(draw))
        return -gaussian_entropy(scale) - ops.cast(log_prob, loc.dtype)

    def over(self, shape: tuple[int, ...], dtype: str) -> tfd.Distribution:
        """Return the distribution of an array of independent numbers.

        Args:
            shape: of the array.
            dtype: of the numbers, such as "float32".

        Returns:
            A distribution with that event shape.
        """
        one = self.distribution(dtype)
        if tuple(one.event_shape) == shape:
            return one
        if tuple(one.batch_shape) == shape:
            return tfd.Independent(one, len(shape))
        return tfd.Sample(one, shape)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise if this cannot be the prior of an array of that shape.

        Args:
            name: what the array is, for the error.
            shape: of the array.
        """


class _LocationScale(Prior):
    """A family with a location and a scale, of the same name in TensorFlow Probability."""

    def __init__(self, scale: float = 1.0, loc: float = 0.0) -> None:
        self.scale = checks.scale("scale", scale)
        self.loc = checks.moderate("loc", loc)

    def distribution(self, dtype: str) -> tfd.Distribution:
        family = getattr(tfd, type(self).__name__)
        arguments = self.get_config().items()
        return family(**{name: ops.convert_to_tensor(x, dtype=dtype) for name, x in arguments})


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Normal(_LocationScale):
    """A Gaussian of mean `loc` and standard deviation `scale`, with closed-form KL."""

    def kl(self, loc: Tensor, scale: Tensor, normal: Callable[[], Tensor]) -> Tensor:
        log_ratio = ops.log(scale) - math.log(self.scale)
        distance = (loc - self.loc) / self.scale
        divergences = (distance * distance + ops.expm1(2 * log_ratio)) / 2 - log_ratio
        return ops.sum(divergences)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Tied(Normal):
    """A Gaussian whose mean is the posterior's, so that the KL pulls at the scales alone.

    The loss is not an evidence lower bound: a prior must not depend on the data, and this one
    follows the posterior. The means train as by maximum likelihood; an L2 regulariser on them
    counts nothing twice. `scale` is its standard deviation. For `MeanField` only.
    """

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(scale)

    def distribution(self, dtype: str) -> tfd.Distribution:
        """Raise an error: only the mean of a posterior over weights can be taken over."""
        raise ValueError("priors.Tied is for ibnn.MeanField; use priors.Normal(scale, loc).")

    def kl(self, loc: Tensor, scale: Tensor, normal: Callable[[], Tensor]) -> Tensor:
        return super().kl(ops.zeros_like(loc), scale, normal)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Laplace(_LocationScale):
    """A Laplace distribution: log p(w) = -|w - loc| / scale - log(2 scale)."""


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Cauchy(_LocationScale):
    """A Cauchy distribution: no mean, a median `loc`, half of it closer to that than `scale`."""


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class StudentT(_LocationScale):
    """A Student t distribution: heavy tails, between Cauchy (df=1) and Gaussian (large df).

    Its median is `loc`, and its standard deviation above `scale`.
    """

    def __init__(self, df: float = 3.0, scale: float = 1.0, loc: float = 0.0) -> None:
        super().__init__(scale, loc)
        self.df = checks.scale("df", df)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class ScaleMixture(Prior):
    """Two Gaussians of mean 0: the prior of Bayes by Backprop (Blundell et al., arXiv 1505.05424).

    p(w) = pi N(w; 0, sigma1^2) + (1 - pi) N(w; 0, sigma2^2); a small sigma2 pulls weights to 0.
    """

    def __init__(self, pi: float = 0.5, sigma1: float = 1.0, sigma2: float = 0.0025) -> None:
        self.pi = checks.fraction("pi", checks.positive("pi", pi))
        self.sigma1 = checks.scale("sigma1", sigma1)
        self.sigma2 = checks.scale("sigma2", sigma2)

    def distribution(self, dtype: str) -> tfd.Distribution:
        scale = ops.convert_to_tensor([self.sigma1, self.sigma2], dtype=dtype)
        weights = ops.convert_to_tensor([self.pi, 1 - self.pi], dtype=dtype)
        normals = tfd.Normal(ops.zeros_like(scale), scale)
        return tfd.MixtureSameFamily(tfd.Categorical(probs=weights), normals)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Given(Prior):
    """A distribution of TensorFlow Probability, or anything else that has `log_prob`."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def distribution(self, dtype: str) -> Any:
        return self.given

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        batch_shape = tuple(getattr(self.given, "batch_shape", ()))
        event_shape = tuple(getattr(self.given, "event_shape", ()))
        full_shape = (*batch_shape, *event_shape)
        ends_in_event = shape[len(shape) - len(event_shape) :] == event_shape
        if not (ends_in_event and _broadcasts(full_shape, shape)):
            raise ValueError(
                f"`prior` is over arrays of shape {full_shape}, and {name} has the shape {shape}. "
                "Give one of a number, as tfd.Normal(0.0, 1.0), or each layer its own: "
                "to_stochastic(model, {pattern: posterior})."
            )

    def get_config(self) -> dict[str, Any]:
        family = type(self.given).__name__
        if getattr(tfd, family, None) is not type(self.given):
            raise ValueError(
                f"A prior made of {self.given!r} cannot be saved. Use one of ibnn.priors, or a "
                "registered subclass of ibnn.priors.Prior."
            )
        parameters = {}
        for name, value in self.given.parameters.items():
            if ops.is_tensor(value):
                value = ops.convert_to_numpy(value)
            if isinstance(value, tfd.Distribution):
                value = Given(value)
            parameters[name] = value
        config = {"distribution": family, "parameters": parameters}
        return keras.saving.serialize_keras_object(config)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Given":
        parameters = keras.saving.deserialize_keras_object(config["parameters"])
        for name, value in parameters.items():
            if isinstance(value, cls):
                parameters[name] = value.given
        family = getattr(tfd, config["distribution"])
        return cls(family(**parameters))


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether arrays of a shape broadcast to the target."""
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False


def checked(prior: Any) -> Prior:
    """Return what was given as a prior, or raise."""
    if isinstance(prior, Prior):
        return prior
    if isinstance(prior, type) or not callable(getattr(prior, "log_prob", None)):
        raise ValueError(
            "`prior` must be one such as priors.Laplace(0.1), or a distribution with a method "
            f"`log_prob`; got {prior!r}."
        )
    dtype = getattr(prior, "dtype", None)
    if dtype is not None and "float" not in keras.backend.standardize_dtype(dtype):
        raise ValueError(f"`prior` must be over real numbers; got {prior!r}.")
    return Given(prior)
