"""The density that posteriors over some weights approximate: likelihood times prior."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import scipy.optimize
from keras import ops

from tfp_ibnn._core import checks, keras_internals
from tfp_ibnn._core.backend import Tensor, compiled, gradient
from tfp_ibnn.weights.features import LastLayer, LogitNetwork, last_weighted_layer
from tfp_ibnn.weights.flat import FlatPosterior, flat, places_of, split
from tfp_ibnn.weights.likelihood import Gaussian, Likelihood

_LOG_2_PI = math.log(2 * math.pi)
_MOST_LOGITS = 2**22  # of as many draws together as fit


class Target:
    """log p(y | x, w) + log p(w) for flat vectors w, with the prior w ~ N(0, prior_scale^2).

    Of the last layer it works on cached features; of any other weights it runs the network.

    Args:
        model: a Functional or Sequential model, built.
        variables: those that w has values for; None for all of the last layer.
        x, y: all training data: arrays, or a dataset as x.
        prior_scale: standard deviation of the prior.
        noise_scale: of the targets of a plain regression; None is the root mean square of the
            residuals of the model as it is.
        options: `head`, `from_logits`, `batch_size`, `verbose`.
    """

    def __init__(
        self,
        model: keras.Model,
        variables: Sequence[keras.Variable] | None,
        x: Any,
        y: Any,
        prior_scale: float,
        noise_scale: float | None = None,
        head: str | None = None,
        from_logits: bool | None = None,
        **options: Any,
    ) -> None:
        self.prior_scale, self._model = prior_scale, model
        of_last = set(map(id, last_weighted_layer(model).weights))
        chosen = of_last if variables is None else set(map(id, variables))
        self._last = LastLayer(model, head, from_logits) if chosen == of_last else None
        network = self._last
        if network is None:
            network = LogitNetwork(model, lambda _: True, head, from_logits)
        self._network, self._width = network, network.width
        self.variables = network.variables if variables is None else list(variables)
        self.likelihood = network.likelihood
        self.start = flat(self.variables)
        self.size, self.dtype = len(self.start), self.start.dtype
        self.data = tuple(map(ops.convert_to_tensor, self.prepared(x, y, **options)))
        if self.likelihood.free_scale:
            self.likelihood = self._with_noise(noise_scale)
        elif noise_scale is not None:
            raise ValueError(f"`noise_scale` is for plain regression only; got {noise_scale!r}.")
        self._compiled = compiled(self.log_prob, model.weights)
        total = lambda w, *data: ops.sum(self.log_prob(w, *data))  # noqa: E731
        self._gradient = gradient(total, model.weights)

    def prepared(self, x: Any, y: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return features, or inputs, and checked targets of all examples."""
        if self._last is not None:
            return tuple(self._last.cache(x, y, **options))
        if y is None or not hasattr(x, "shape"):
            raise ValueError("`x` and `y` must be arrays for weights before the last layer.")
        return np.asarray(x), self.likelihood.targets(y, self._width)

    def log_likelihoods(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return log p(y_n | x_n, w_s), (S, N), for vectors w (S, size)."""
        if self._last is not None:
            parts = dict(zip(map(id, self.variables), split(w, self.variables), strict=True))
            logits = self._last.logits(x, *(parts[id(v)] for v in self._last.variables))
        else:
            logits = ops.map(lambda one: self._logits(one, x), w)
        y = ops.broadcast_to(y, (w.shape[0], *y.shape))
        return self.likelihood.log_prob(logits, y)

    def log_prior(self, w: Tensor) -> Tensor:
        """Return the prior's log-density, (S,)."""
        squares = ops.sum(ops.square(w / self.prior_scale), axis=-1)
        return -(squares + self.size * (_LOG_2_PI + 2 * math.log(self.prior_scale))) / 2

    def log_prob(self, w: Tensor, x: Tensor, y: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        """Return the log-density (S,); `scale` multiplies the likelihood of a part of the data."""
        likelihood = ops.sum(self.log_likelihoods(w, x, y), axis=-1)
        return ops.cast(scale, w.dtype) * likelihood + self.log_prior(w)

    def part(self, size: int | None, rng: np.random.Generator) -> tuple[Any, ...]:
        """Return the `scale` of some examples' likelihood, and these; None takes all examples."""
        count = len(self.data[0])
        if size is None or size >= count:
            return np.asarray(1.0, self.dtype), *self.data
        rows = rng.choice(count, size, replace=False)
        scale = np.asarray(count / size, self.dtype)
        return scale, *(ops.take(x, rows, axis=0) for x in self.data)

    def values(self, w: np.ndarray) -> np.ndarray:
        """Return the log-density (S,) at w (S, size), given all data."""
        return self._in_parts(self._compiled, w)

    def gradients(self, w: np.ndarray) -> np.ndarray:
        """Return its gradients (S, size)."""
        return self._in_parts(self._gradient, w)

    def mode(self) -> np.ndarray:
        """Return where the log-density is highest, as far as L-BFGS climbs from the model."""

        def minus(w: np.ndarray) -> tuple[float, np.ndarray]:
            return -self.values(w[None])[0], -self.gradients(w[None])[0]

        found = scipy.optimize.minimize(
            minus, self.start.astype("float64"), jac=True, method="L-BFGS-B"
        )
        return found.x if np.isfinite(found.fun) else self.start.astype("float64")

    def _in_parts(self, function: Callable[..., Tensor], w: np.ndarray) -> np.ndarray:
        size = max(1, _MOST_LOGITS // (len(self.data[0]) * self._width))
        size = min(size, len(w)) if self._last is not None else 1
        rows = [w[start : start + size] for start in range(0, len(w), size)]
        found = (function(part.astype(self.dtype), *self.data) for part in rows)
        return np.concatenate([ops.convert_to_numpy(x) for x in found]).astype("float64")

    def _logits(self, w: Tensor, x: Tensor) -> Tensor:
        pairs = zip(self.variables, split(w, self.variables), strict=True)
        with keras_internals.values_in_place(pairs):
            return self._network.logits(self._network.prefix(x))

    def _with_noise(self, noise_scale: float | None) -> Likelihood:
        if noise_scale is None:
            # The log-likelihood under a scale of 1 is minus half the sum of squared residuals.
            x, y = self.data
            each = compiled(self.log_likelihoods, self._model.weights)(self.start[None], x, y)
            squares = -2 * np.mean(ops.convert_to_numpy(each)) / self._width - _LOG_2_PI
            noise_scale = math.sqrt(max(squares, 0.0))
            if noise_scale < 1e-6:
                raise ValueError("`noise_scale` must be given: `model` fits all targets exactly.")
        return Gaussian(checks.positive("noise_scale", noise_scale))


class LastLayerPosterior(FlatPosterior):
    """Base of posteriors over the weights of a network's last layer, under a Gaussian prior.

    Args:
        model: a built Functional or Sequential model that ends in a Dense layer; it is not changed.
        prior_scale: standard deviation of the prior of each weight, whose mean is 0.
        noise_scale: of the targets of a plain regression; None takes the root mean square of the
            residuals of `model`.
        head: what the output means, as for `MonteCarlo`, if `model` is not compiled.
        from_logits: as for `MonteCarlo`.
        **kwargs: those of `keras.layers.Layer`.
    """

    arguments = ("prior_scale", "noise_scale", "head", "from_logits")

    def __init__(
        self,
        model: keras.Model,
        *,
        prior_scale: float = 1.0,
        noise_scale: float | None = None,
        head: str | None = None,
        from_logits: bool | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs["places"] = places_of(model, last_weighted_layer(model).weights)
        super().__init__(model, **kwargs)
        scale = checks.positive("prior_scale", prior_scale)
        self.prior_scale = checks.moderate("prior_scale", scale)
        self.noise_scale, self.head, self.from_logits = noise_scale, head, from_logits

    def target(self, x: Any, y: Any = None, **options: Any) -> Target:
        """Return the log-density that is approximated, given data."""
        options |= {"head": self.head, "from_logits": self.from_logits}
        return Target(self.network, None, x, y, self.prior_scale, self.noise_scale, **options)
