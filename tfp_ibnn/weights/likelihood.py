"""The likelihood of a network's head, as a function of what its activation takes: the logits."""

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.layers.heads import GaussianHead, gaussian_nll, matched
from tfp_ibnn.prediction import predictive
from tfp_ibnn.prediction.head import (
    check_one_output,
    output_layer,
    own_activation,
    predictive_of,
)

_REMEDY = (
    "Compile the model with a categorical or binary crossentropy, the mean squared error or "
    "ibnn.layers.GaussianNLL; or give head='softmax', 'sigmoid', 'point' or 'gaussian', for logits "
    "with from_logits=True."
)


_ENDS = {
    "linear": lambda logits: logits,
    "softmax": ops.softmax,
    "log_softmax": ops.log_softmax,
    "sigmoid": ops.sigmoid,
}


class Likelihood:
    """What is known of an example's target given the logits z (N, K); the base of all kinds.

    The logits are the output without `end`, the activation by which the network ends: "linear",
    "softmax", "log_softmax", "sigmoid", or "gaussian" for a `GaussianHead`. A kind defines
    `targets` (as an array, checked against `width` logits), `log_prob` (of each target, (N,), in
    nats) and `factors`: S (N, K, C), S S^T being the Hessian of minus `log_prob` in the logits.
    """

    free_scale = False
    """Whether there is a noise scale, which the network does not predict."""
    is_classifier = True

    def __init__(self, end: str = "linear") -> None:
        self.end = end

    def outputs(self, logits: Tensor) -> Tensor:
        """Return what the network gives for these logits."""
        return _ENDS[self.end](logits)


class Softmax(Likelihood):
    """Classes (N,), (N, 1) or, one-hot, (N, K). S has the columns sqrt(p_c) (e_c - p)."""

    def targets(self, y: Any, width: int) -> np.ndarray:
        """Return classes (N,)."""
        return classes(y, width, "`y`").astype("int32")

    def log_prob(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the log-probability of each class, for y as `targets` gives it."""
        one_hot = ops.one_hot(y, logits.shape[-1], dtype=logits.dtype)
        return ops.sum(one_hot * ops.log_softmax(logits, axis=-1), axis=-1)

    def factors(self, logits: Tensor) -> Tensor:
        """Return S (N, K, K)."""
        p = ops.softmax(logits, axis=-1)
        identity = ops.eye(logits.shape[-1], dtype=p.dtype)
        return (identity - p[:, :, None]) * ops.sqrt(p)[:, None, :]


class Sigmoid(Likelihood):
    """K questions of yes or no, independent; labels are 0 or 1, (N, K), or (N,) if K is 1."""

    def targets(self, y: Any, width: int) -> np.ndarray:
        """Return zeros and ones (N, K)."""
        y = numbers(y, width, "`y`")
        _check_each(y, lambda y: np.isin(y, (0, 1)), "`y`", "0 or 1")
        return y.astype("float32")

    def log_prob(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the log-probability of all answers of an example."""
        sign = 2 * ops.cast(y, logits.dtype) - 1
        return -ops.sum(ops.softplus(-sign * logits), axis=-1)

    def factors(self, logits: Tensor) -> Tensor:
        """Return S (N, K, K), a diagonal matrix."""
        return _diagonal(ops.sqrt(ops.sigmoid(logits) * ops.sigmoid(-logits)))


class Gaussian(Likelihood):
    """Numbers (N, K), or (N,) if K is 1, under Gaussians of one standard deviation `scale`."""

    free_scale, is_classifier = True, False

    def __init__(self, scale: float | Tensor = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def targets(self, y: Any, width: int) -> np.ndarray:
        """Return finite numbers (N, K)."""
        return numbers(y, width, "`y`")

    def log_prob(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the log-density, summed over the outputs."""
        loc, scale = self._moments(logits)
        return -gaussian_nll(matched(y, loc), loc, ops.square(scale))

    def factors(self, logits: Tensor) -> Tensor:
        """Return S (N, K, K), the identity divided by the scale."""
        return _diagonal(1 / self._moments(logits)[1])

    def _moments(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return logits, ops.cast(self.scale, logits.dtype) * ops.ones_like(logits)


class GaussianWithScale(Gaussian):
    """Numbers (N, K / 2) with a `GaussianHead`, given its input. S S^T is the expected Hessian."""

    free_scale = False

    def __init__(self, head: GaussianHead | None) -> None:
        super().__init__()
        self.end = "linear" if head is None else "gaussian"
        self._head = head

    def targets(self, y: Any, width: int) -> np.ndarray:
        return super().targets(y, width // 2)

    def factors(self, logits: Tensor) -> Tensor:
        """Return S (N, K, K), diagonal: 1 / scale, then sqrt(2) / scale * d scale / d logit."""
        _, scale = self._moments(logits)
        slope = ops.ones_like(scale)
        if self._head is not None:
            slope = ops.sigmoid(ops.split(logits, 2, axis=-1)[1])
        return _diagonal(ops.concatenate([1 / scale, math.sqrt(2) * slope / scale], axis=-1))

    def outputs(self, logits: Tensor) -> Tensor:
        return logits if self._head is None else self._head(logits)

    def _moments(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(ops.split(self.outputs(logits), 2, axis=-1))


def likelihood_of(
    model: keras.Model, head: str | None = None, from_logits: bool | None = None
) -> Likelihood:
    """Return the likelihood of a model's head, as `MonteCarlo` finds it, or raise."""
    kind = predictive_of(model, head, from_logits, _REMEDY)
    check_one_output(kind, "A posterior over weights")
    if head is None and model.compiled:
        (loss, *_) = keras.tree.flatten(model.loss) or [None]
        name = str(getattr(loss, "name", getattr(loss, "__name__", loss))).lower()
        is_point = type(kind) is predictive.Point
        if "focal" in name or (is_point and "squared_error" not in name and name != "mse"):
            raise ValueError(f"The loss {name!r} is not minus a log-likelihood. {_REMEDY}")
    last = output_layer(model)
    if isinstance(kind, predictive.Labels):
        return Sigmoid("linear" if kind.from_logits else "sigmoid")
    if isinstance(kind, predictive.Categorical):
        logits = "log_softmax" if own_activation(last) == "log_softmax" else "linear"
        return Softmax(logits if kind.from_logits else "softmax")
    if isinstance(kind, predictive.Gaussian):
        return GaussianWithScale(last if isinstance(last, GaussianHead) else None)
    return Gaussian()


def numbers(y: Any, width: int, what: str) -> np.ndarray:
    """Return finite numbers (N, width), or raise for `what`."""
    y = np.asarray(y)
    y = y[:, None] if y.ndim == 1 and width == 1 else y
    if y.shape[1:] != (width,):
        raise ValueError(f"{what} must have the shape (N, {width}); got {y.shape}.")
    _check_each(y, np.isfinite, what, "finite numbers")
    return y


def classes(y: Any, count: int, what: str, one_hot: bool | None = None) -> np.ndarray:
    """Return classes (N,) of labels, one-hot or not, None for either; or raise for `what`."""
    y = np.asarray(y)
    if one_hot is not False and y.shape[1:] == (count,):
        _check_each(y, lambda y: np.sort(y)[:, ::-1] == np.eye(1, count), what, "one-hot")
        return y.argmax(axis=1)
    y = y[:, 0] if y.shape[1:] == (1,) else y
    if one_hot or y.ndim != 1:
        shapes = {None: f"(N,) or, one-hot, (N, {count})", True: f"(N, {count})", False: "(N,)"}
        remedy = f": give keras.utils.to_categorical(y, {count})" if one_hot else ""
        remedy = ": give y.argmax(axis=1)" if y.shape[1:] == (count,) else remedy
        raise ValueError(f"{what} must have the shape {shapes[one_hot]}; got {y.shape}{remedy}.")
    want = f"whole numbers from 0 to {count - 1}"
    _check_each(y, lambda y: np.isin(y, np.arange(count)), what, want)
    return y.astype(int)


def _check_each(y: np.ndarray, is_good: Callable[..., Any], what: str, want: str) -> None:
    """Raise for the first example that is not good, or not of numbers."""
    good = is_good(y) if y.dtype.kind in "biuf" else np.zeros(y.shape, bool)
    good = good.all(axis=tuple(range(1, y.ndim)))
    if not good.all():
        i = int(good.argmin())
        raise ValueError(f"{what} must be {want}; got {y[i].tolist()!r} at example {i}.")


def _diagonal(values: Tensor) -> Tensor:
    return values[:, :, None] * ops.eye(values.shape[-1], dtype=values.dtype)
