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
        """Return KL[N(loc, scale^2) || prior], summed over all numbers, in nats.

        Where it has no closed form, the prior's log-density is taken at loc + scale * normal().
        """
        distribution = self.distribution(loc.dtype)
        dtype = getattr(distribution, "dtype", None) or loc.dtype  # of one given, its own
        log_prob = ops.sum(distribution.log_prob(ops.cast(loc + scale * normal(), dtype)))
        return -gaussian_entropy(scale) - ops.cast(log_prob, loc.dtype)

    def over(self, shape: tuple[int, ...], dtype: str) -> tfd.Distribution:
        """Return the distribution of an array of that shape."""
        one = self.distribution(dtype)
        if tuple(one.event_shape) == shape:
            return one
        if tuple(one.batch_shape) == shape:
            return tfd.Independent(one, len(shape))
        return tfd.Sample(one, shape)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise if this cannot be the prior of an array of that shape."""


class _LocationScale(Prior):
    """A family with a location and a scale, of the same name in TensorFlow Probability."""

    def __init__(self, scale: float = 1.0, loc: float = 0.0) -> None:
        self.scale = checks.scale("scale", scale)
        self.loc = checks.moderate("loc", loc)

    def distribution(self, dtype: str) -> tfd.Distribution:
        numbers = {k: ops.convert_to_tensor(x, dtype=dtype) for k, x in self.get_config().items()}
        return getattr(tfd, type(self).__name__)(**numbers)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Normal(_LocationScale):
    """A Gaussian of mean `loc` and standard deviation `scale`, with closed-form KL."""

    def kl(self, loc: Tensor, scale: Tensor, normal: Callable[[], Tensor]) -> Tensor:
        ratio = ops.log(scale) - math.log(self.scale)
        distance = (loc - self.loc) / self.scale
        return ops.sum((distance * distance + ops.expm1(2 * ratio)) / 2 - ratio)


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
        self.sigma1, self.sigma2 = checks.scale("sigma1", sigma1), checks.scale("sigma2", sigma2)

    def distribution(self, dtype: str) -> tfd.Distribution:
        scale = ops.convert_to_tensor([self.sigma1, self.sigma2], dtype=dtype)
        weights = tfd.Categorical(probs=ops.convert_to_tensor([self.pi, 1 - self.pi], dtype=dtype))
        return tfd.MixtureSameFamily(weights, tfd.Normal(ops.zeros_like(scale), scale))


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Given(Prior):
    """A distribution of TensorFlow Probability, or anything else that has `log_prob`."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def distribution(self, dtype: str) -> Any:
        return self.given

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        batch, event = (tuple(getattr(self.given, f"{x}_shape", ())) for x in ("batch", "event"))
        own = (*batch, *event)
        try:
            fits = np.broadcast_shapes(own, shape) == shape
        except ValueError:
            fits = False
        if not fits or shape[len(shape) - len(event) :] != event:
            remedy = "Give one of a number, as tfd.Normal(0.0, 1.0), or each layer its own"
            wrong = f"`prior` is over arrays of shape {own}, and {name} has the shape {shape}"
            raise ValueError(f"{wrong}. {remedy}: to_stochastic(model, {{pattern: posterior}}).")

    def get_config(self) -> dict[str, Any]:
        kind, given = type(self.given).__name__, {}
        if getattr(tfd, kind, None) is not type(self.given):
            remedy = "Use one of ibnn.priors, or a registered subclass of ibnn.priors.Prior"
            raise ValueError(f"A prior made of {self.given!r} cannot be saved. {remedy}.")
        for name, value in self.given.parameters.items():
            value = ops.convert_to_numpy(value) if ops.is_tensor(value) else value
            given[name] = Given(value) if isinstance(value, tfd.Distribution) else value
        return keras.saving.serialize_keras_object({"distribution": kind, "parameters": given})

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Given":
        given = keras.saving.deserialize_keras_object(config["parameters"])
        parts = {name: x.given if isinstance(x, cls) else x for name, x in given.items()}
        return cls(getattr(tfd, config["distribution"])(**parts))


def checked(prior: Any) -> Prior:
    """Return what was given as a prior, or raise."""
    if isinstance(prior, Prior):
        return prior
    if isinstance(prior, type) or not callable(getattr(prior, "log_prob", None)):
        wanted = "one such as priors.Laplace(0.1), or a distribution with a method `log_prob`"
        raise ValueError(f"`prior` must be {wanted}; got {prior!r}.")
    dtype = getattr(prior, "dtype", None)
    if dtype is not None and "float" not in keras.backend.standardize_dtype(dtype):
        raise ValueError(f"`prior` must be over real numbers; got {prior!r}.")
    return Given(prior)
