"""The density that posteriors over some weights approximate, and Adam to fit them to it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from scipy.optimize import minimize

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor, compiled, gradient
from tfp_ibnn._core.keras_internals import values_in_place
from tfp_ibnn.data.examples import labelled_batches
from tfp_ibnn.likelihoods import Point
from tfp_ibnn.likelihoods.infer import likelihood_for_weights
from tfp_ibnn.weights.features import LastLayer, LogitNetwork, last_weighted_layer
from tfp_ibnn.weights.flat import FlatPosterior, double, flat, places_of, split

_LOG_2_PI = math.log(2 * math.pi)
_MOST_NUMBERS = 2**22  # of as many draws together as fit


class Density:
    """Any log-density over flat vectors; the base of all targets.

    `log_prob` is a function of rows (S, size), written in `keras.ops`, and `start` a vector where
    it is finite. The Gaussian N(prior_loc, prior_scale^2), of numbers or vectors, is to be wider.
    """

    rows = 1024  # to take at once, at most

    def __init__(
        self,
        log_prob: Callable[..., Tensor],
        start: np.ndarray,
        prior_loc: Any = 0.0,
        prior_scale: Any = 1.0,
        data: tuple[Any, ...] = (),
        reads: Sequence[keras.Variable] = (),
    ) -> None:
        start = np.asarray(start)
        start = start if start.dtype.kind == "f" else start.astype("float32")
        self.start, self.size, self.dtype = start, len(start), start.dtype
        self.prior_loc, self.prior_scale = prior_loc, prior_scale
        self.log_prob, self.data, self.reads = log_prob, data, reads
        self._compiled = compiled(log_prob, reads)
        self._gradient = gradient(lambda w, *data: ops.sum(log_prob(w, *data)), reads)

    def values(self, w: np.ndarray) -> np.ndarray:
        """Return the log-density (S,) at w (S, size), given all data."""
        return self._in_parts(self._compiled, w, self.data)

    def gradients(self, w: np.ndarray) -> np.ndarray:
        """Return its gradients (S, size)."""
        return self._in_parts(self._gradient, w, self.data)

    def mode(self) -> np.ndarray:
        """Return where the log-density is highest, as far as L-BFGS climbs from `start`."""
        start, both = self.start.astype("float64"), (self.values, self.gradients)
        options = {"jac": True, "method": "L-BFGS-B"}
        found = minimize(lambda w: tuple(-f(w[None])[0] for f in both), start, **options)
        return found.x if np.isfinite(found.fun) else start

    def _in_parts(self, function: Callable[..., Tensor], w: np.ndarray, data: Any) -> np.ndarray:
        parts = [w[start : start + self.rows] for start in range(0, len(w), self.rows)]
        found = (function(part.astype(self.dtype), *data) for part in parts)
        return np.concatenate([double(x) for x in found])


class Target(Density):
    """log p(y | x, w) + log p(w) for flat vectors w, with the prior w ~ N(0, prior_scale^2).

    `variables` are those that w has values for, None for all of the last layer; what stands before
    them runs once, and is cached. `noise_scale` is for plain regressions, None for the root mean
    square of the residuals of the model as it is. The options are `batch_size` and `verbose`.
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
        self.network, *found = self._open(model, variables, prior_scale, head, from_logits)
        self.likelihood, data = self.network.likelihood, self.prepared(x, y, **options)
        super().__init__(self.log_prob, *found, data, model.weights)
        self._is_last = isinstance(self.network, LastLayer)
        largest = self.network.width if self._is_last else self.network.graph.largest
        self.rows = max(1, _MOST_NUMBERS // (len(data[1]) * largest))
        if not self.likelihood.free_scale and noise_scale is not None:
            raise ValueError(f"`noise_scale` is for plain regression only; got {noise_scale!r}.")
        if not self.likelihood.free_scale:
            return
        if noise_scale is None:
            # The log-likelihood under a scale of 1 is minus half the sum of squared residuals.
            each = compiled(self.log_likelihoods, self.reads)(self.start[None], *self.data)
            squares = -2 * np.mean(ops.convert_to_numpy(each)) / self.network.width - _LOG_2_PI
            noise_scale = math.sqrt(max(squares, 0.0))
            if noise_scale < 1e-6:
                raise ValueError("`noise_scale` must be given: `model` fits all targets exactly.")
        self.likelihood = Point(scale=checks.positive("noise_scale", noise_scale))

    def _open(self, model: Any, variables: Any, prior_scale: Any, *head: Any) -> tuple[Any, ...]:
        """Return the network, w as it is, and mean and scale of its prior."""
        last = last_weighted_layer(model).weights
        self.variables = list(last if variables is None else variables)
        chosen = set(map(id, self.variables))
        if chosen == set(map(id, last)):
            return LastLayer(model, *head), flat(self.variables), 0.0, prior_scale
        is_chosen = lambda x: chosen & set(map(id, getattr(x, "weights", [])))  # noqa: E731
        return LogitNetwork(model, is_chosen, *head), flat(self.variables), 0.0, prior_scale

    @classmethod
    def of_posterior(
        cls, posterior: Any, x: Any, y: Any, prior_scale: Any, noise_scale: Any, verbose: Any
    ) -> "Target":
        """Return the target of what a posterior over weights samples; None is as it has it."""

        def number(name: str) -> float | None:
            value = getattr(posterior, name, None)
            return None if value is None else float(ops.convert_to_numpy(value))

        model, config = posterior.network, posterior.get_config()
        of_model = {name: config.get(name) for name in ("head", "from_logits")}
        if noise_scale is None and likelihood_for_weights(model, **of_model).free_scale:
            noise_scale = number("noise_scale")
        if prior_scale is None:
            prior_scale = number("prior_scale")
        if prior_scale is None and hasattr(posterior, "prior_precision"):
            prior_scale = number("prior_precision") ** -0.5
        if prior_scale is None:
            kind = type(posterior).__name__
            raise ValueError(f"`prior_scale` must be given: a {kind} does not know its prior's.")
        scales = checks.positive("prior_scale", prior_scale), noise_scale
        return cls(model, posterior.sampled, x, y, *scales, verbose=verbose, **of_model)

    def prepared(self, x: Any, y: Any, **options: Any) -> tuple[Any, Any]:
        """Return what is cached of all examples, and their targets."""
        found = self.network.cache(x, y, **options)
        return keras.tree.map_structure(ops.convert_to_tensor, found)

    def log_likelihoods(self, w: Tensor, x: Any, y: Tensor) -> Tensor:
        """Return log p(y_n | x_n, w_s), (S, N), for vectors w (S, size)."""
        y = ops.broadcast_to(y, (w.shape[0], *y.shape))
        return self.likelihood.log_prob(self.logits(w, x), y)

    def logits(self, w: Tensor, x: Any) -> Tensor:
        """Return the logits (S, N, K) from what is cached."""
        if not self._is_last:
            return ops.map(lambda one: self._logits(one, x), w)
        # All draws in one product, on the one tensor that is cached.
        parts = dict(zip(map(id, self.variables), split(w, self.variables), strict=True))
        (features,) = x.values()
        features = ops.reshape(features, (-1, features.shape[-1]))
        found = ops.matmul(features, parts[id(self.network.layer.kernel)])
        if self.network.layer.use_bias:
            found = found + parts[id(self.network.layer.bias)][:, None, :]
        return found

    def _logits(self, w: Tensor, x: Any) -> Tensor:
        with values_in_place(zip(self.variables, split(w, self.variables), strict=True)):
            return self.network.logits(x)

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
        count = len(self.data[1])
        if size is None or size >= count:
            return np.asarray(1.0, self.dtype), *self.data
        rows = rng.choice(count, size, replace=False)
        scale = np.asarray(count / size, self.dtype)
        return scale, *keras.tree.map_structure(lambda x: ops.take(x, rows, axis=0), self.data)

    def predict(self, w: np.ndarray, x: Any, batch_size: int = 256) -> np.ndarray:
        """Return the outputs (S, N, ...) of the network at w (S, size), for arrays of inputs."""
        prefix = compiled(self.network.prefix, self.reads)
        run = compiled(lambda *args: self.likelihood.outputs(self.logits(*args)), self.reads)
        found, nothing = [], np.zeros(len(keras.tree.flatten(x)[0]))
        for inputs, _ in labelled_batches(x, nothing, batch_size):
            values = keras.tree.map_structure(self.network.wide, prefix(inputs))
            found.append(self._in_parts(run, w, (values,)))
        return np.concatenate(found, axis=1)


class LastLayerPosterior(FlatPosterior):
    """Base of posteriors over the weights of a network's last layer, under a Gaussian prior."""

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
        self.prior_scale = checks.scale("prior_scale", prior_scale)
        self.noise_scale, self.head, self.from_logits = noise_scale, head, from_logits

    def fit(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: int = 256,
        seed: int = 0,
        verbose: Any = "auto",
        **options: Any,
    ) -> "LastLayerPosterior":
        """Fit to all of the training data, inputs and targets or a dataset, and return itself.

        The features are computed in batches; equal seeds, of the draws, give equal fits. GaussianVI
        has an option `steps` (100); for "lowrank" ten times as many of Adam follow.
        """
        target = self.target(x, y, batch_size=batch_size, verbose=verbose)
        self.fit_to(target, np.random.default_rng(seed), verbose, **options)
        return self

    def target(self, x: Any, y: Any = None, **options: Any) -> Target:
        """Return the log-density that is approximated, given data."""
        options |= {"head": self.head, "from_logits": self.from_logits}
        return Target(self.network, None, x, y, self.prior_scale, self.noise_scale, **options)


def ascend(
    variables: Sequence[keras.Variable],
    objective: Callable[..., Tensor],
    batch: Callable[[], tuple[Any, ...]],
    steps: int,
    learning_rate: float,
    *,
    reads: Sequence[keras.Variable] = (),
    score: Callable[[], float] | None = None,
    patience: int = 5,
    verbose: Any = 0,
) -> list[float]:
    """Maximise an objective by Adam with a cosine decay; return the scores on the way.

    `objective` is a scalar function of what `batch` returns for each step; it reads the variables,
    and those of `reads`. `score` is asked at the start and 20 times on the way: the variables end
    where it was highest, early once it has not risen `patience` times, 0 for never.
    """

    def placed(vector: Tensor, *args: Tensor) -> Tensor:
        with values_in_place(zip(variables, split(vector, variables), strict=True)):
            return objective(*args)

    def give(vector: np.ndarray) -> None:
        for variable, value in zip(variables, split(vector, variables), strict=True):
            variable.assign(value)

    slope = gradient(placed, list(reads))
    vector = best = flat(variables)
    first = second = np.zeros_like(vector)
    scores, every = [] if score is None else [score()], max(1, steps // 20)
    bar = keras.utils.Progbar(steps, verbose=1 if verbose == "auto" else verbose)
    for step in range(1, steps + 1):
        rate = learning_rate * (1 + math.cos(math.pi * step / steps)) / 2
        rate *= math.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        slopes = ops.convert_to_numpy(slope(vector, *batch()))
        if not np.isfinite(slopes).all():
            raise ValueError(f"The gradient became NaN or infinite at step {step}.")
        first = 0.9 * first + 0.1 * slopes
        second = 0.999 * second + 0.001 * slopes**2
        vector = (vector + rate * first / (np.sqrt(second) + 1e-8)).astype(vector.dtype)
        bar.update(step)
        if score is not None and (step % every == 0 or step == steps):
            give(vector)
            scores.append(score())
            since = len(scores) - 1 - int(np.argmax(np.nan_to_num(scores, nan=-np.inf)))
            best = best if since else vector
            if patience and since >= patience:
                break
    give(vector if score is None else best)
    return scores


def mirrored(rng: np.random.Generator, pairs: int, size: int) -> np.ndarray:
    """Return normal draws (2 * pairs, size) of which half are the other half's negatives."""
    half = rng.standard_normal((pairs, size))
    return np.concatenate([half, -half])
