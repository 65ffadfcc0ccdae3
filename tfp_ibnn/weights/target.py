"""The posterior density over some weights of a network, given data and a Gaussian prior."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor, compiled
from tfp_ibnn._core.keras_internals import values_in_place
from tfp_ibnn.data.examples import labelled_batches
from tfp_ibnn.likelihoods import Point
from tfp_ibnn.likelihoods.infer import likelihood_for_weights
from tfp_ibnn.weights.density import Density
from tfp_ibnn.weights.features import LastLayer, LogitNetwork, last_weighted_layer
from tfp_ibnn.weights.vectors import flat, split

_LOG_2_PI = math.log(2 * math.pi)
_MOST_NUMBERS = 2**22  # of as many draws together as fit


class Target(Density):
    """log p(y | x, w) + log p(w) for flat vectors w, with the prior w ~ N(0, prior_scale^2).

    What stands before the layers of `variables` runs once for all examples, and is cached.

    Args:
        model: a built Functional or Sequential model with one output (N, K); it is not copied.
        variables: those that w has values for; None takes all of the last layer.
        x: inputs, or a dataset of batches (x, y).
        y: targets; None with a dataset.
        prior_scale: standard deviation of the prior.
        noise_scale: standard deviation of the targets of a plain regression; None takes the root
            mean square of the residuals of the model as it is.
        head: what the output means, as for `MonteCarlo`.
        from_logits: whether it is logits, as for `MonteCarlo`.
        batch_size: examples that are cached at a time, 256 by default.
        verbose: 0 shows no progress.

    Raises:
        ValueError: if `noise_scale` is given and not used, or None and all residuals are 0.
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
        *,
        batch_size: int = 256,
        verbose: Any = "auto",
    ) -> None:
        network, start, loc, scale = self._open(model, variables, prior_scale, head, from_logits)
        self.network = network
        self.likelihood = network.likelihood
        data = self.prepared(x, y, batch_size, verbose)
        super().__init__(self.log_prob, start, loc, scale, data, model.weights)
        self._is_last = isinstance(network, LastLayer)
        largest = network.width if self._is_last else network.graph.largest
        numbers_of_draw = len(data[1]) * largest
        self.rows = max(1, _MOST_NUMBERS // numbers_of_draw)
        if self.likelihood.free_scale:
            if noise_scale is None:
                noise_scale = self._scale_of_residuals()
            self.likelihood = Point(scale=checks.positive("noise_scale", noise_scale))
        elif noise_scale is not None:
            raise ValueError(f"`noise_scale` is for plain regression only; got {noise_scale!r}.")

    def _open(
        self,
        model: Any,
        variables: Any,
        prior_scale: Any,
        head: str | None,
        from_logits: bool | None,
    ) -> tuple[LogitNetwork, np.ndarray, Any, Any]:
        """Return the network, w as it is, and mean and scale of its prior."""
        last_variables = last_weighted_layer(model).weights
        self.variables = list(last_variables if variables is None else variables)
        chosen = {id(v) for v in self.variables}

        def has_chosen(layer: Any) -> bool:
            return any(id(v) in chosen for v in getattr(layer, "weights", []))

        if chosen == {id(v) for v in last_variables}:
            network = LastLayer(model, head, from_logits)
        else:
            network = LogitNetwork(model, has_chosen, head, from_logits)
        return network, flat(self.variables), 0.0, prior_scale

    def _scale_of_residuals(self) -> float:
        """Return the root mean square of the residuals of the model as it is."""
        log_likelihoods = compiled(self.log_likelihoods, self.reads)
        at_start = log_likelihoods(self.start[None], *self.data)
        mean = np.mean(ops.convert_to_numpy(at_start))
        # The log-likelihood under a scale of 1 is minus half the sum of squared residuals.
        variance = -2 * mean / self.network.width - _LOG_2_PI
        scale = math.sqrt(max(variance, 0.0))
        if scale < 1e-6:
            raise ValueError("`noise_scale` must be given: `model` fits all targets exactly.")
        return scale

    @classmethod
    def of_posterior(
        cls,
        posterior: Any,
        x: Any,
        y: Any,
        prior_scale: float | None = None,
        noise_scale: float | None = None,
        verbose: Any = "auto",
    ) -> "Target":
        """Return the target of what a posterior over weights samples.

        Args:
            posterior: a posterior over weights of a network.
            x: inputs, or a dataset of batches (x, y).
            y: targets; None with a dataset.
            prior_scale: standard deviation of the prior; None takes that of the posterior.
            noise_scale: of the targets of a plain regression; None takes that of the posterior, or
                else the root mean square of the residuals.
            verbose: 0 shows no progress.

        Returns:
            The density of the weights that the posterior samples.

        Raises:
            ValueError: if neither `prior_scale` is given nor the posterior has one.
        """
        model = posterior.network
        config = posterior.get_config()
        head = config.get("head")
        from_logits = config.get("from_logits")
        if noise_scale is None and likelihood_for_weights(model, head, from_logits).free_scale:
            noise_scale = _number_of(posterior, "noise_scale")
        if prior_scale is None:
            prior_scale = _prior_scale_of(posterior)
        return cls(
            model,
            posterior.sampled,
            x,
            y,
            checks.positive("prior_scale", prior_scale),
            noise_scale,
            head,
            from_logits,
            verbose=verbose,
        )

    def prepared(
        self, x: Any, y: Any, batch_size: int = 256, verbose: Any = "auto"
    ) -> tuple[Any, Any]:
        """Return what is cached of all examples, and their targets.

        Args:
            x: inputs, or a dataset of batches (x, y).
            y: targets; None with a dataset.
            batch_size: examples at a time, 256 by default.
            verbose: 0 shows no progress.

        Returns:
            Tensors, in the form in which `log_prob` takes them.
        """
        arrays = self.network.cache(x, y, batch_size, verbose)
        return keras.tree.map_structure(ops.convert_to_tensor, arrays)

    def log_likelihoods(self, w: Tensor, x: Any, y: Tensor) -> Tensor:
        """Return the log-likelihood of each example under each vector.

        Args:
            w: vectors (S, size).
            x: what is cached of N examples.
            y: their targets.

        Returns:
            log p(y_n | x_n, w_s), (S, N), in nats.
        """
        draws = w.shape[0]
        repeated = ops.broadcast_to(y, (draws, *y.shape))
        logits = self.logits(w, x)
        return self.likelihood.log_prob(logits, repeated)

    def logits(self, w: Tensor, x: Any) -> Tensor:
        """Return the logits of each example under each vector.

        Args:
            w: vectors (S, size).
            x: what is cached of N examples.

        Returns:
            A tensor (S, N, K).
        """
        if self._is_last:
            return self._logits_of_last_layers(w, x)
        return ops.map(lambda vector: self._logits_of_network(vector, x), w)

    def _logits_of_last_layers(self, w: Tensor, x: Any) -> Tensor:
        """Return the logits of all draws by one product, on the one tensor that is cached."""
        layer = self.network.layer
        places = [id(v) for v in self.variables]
        values = split(w, self.variables)
        (features,) = x.values()
        features = ops.reshape(features, (-1, features.shape[-1]))
        kernels = values[places.index(id(layer.kernel))]
        logits = ops.matmul(features, kernels)
        if layer.use_bias:
            biases = values[places.index(id(layer.bias))]
            logits = logits + biases[:, None, :]
        return logits

    def _logits_of_network(self, vector: Tensor, x: Any) -> Tensor:
        values = split(vector, self.variables)
        with values_in_place(zip(self.variables, values, strict=True)):
            return self.network.logits(x)

    def log_prior(self, w: Tensor) -> Tensor:
        """Return the log-density (S,) of the prior at vectors (S, size)."""
        white = w / self.prior_scale
        squares = ops.sum(ops.square(white), axis=-1)
        log_variance = 2 * math.log(self.prior_scale)
        log_volume = self.size * (_LOG_2_PI + log_variance)
        return -(squares + log_volume) / 2

    def log_prob(self, w: Tensor, x: Any, y: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        """Return the log-density.

        Args:
            w: vectors (S, size).
            x: what is cached of all examples, or of some of them.
            y: their targets.
            scale: number of all examples over those given, 1 by default.

        Returns:
            Log-densities (S,), in nats, not normalized.
        """
        of_examples = self.log_likelihoods(w, x, y)
        likelihood = ops.sum(of_examples, axis=-1)
        scale = ops.cast(scale, w.dtype)
        return scale * likelihood + self.log_prior(w)

    def part(self, size: int | None, rng: np.random.Generator) -> tuple[Any, ...]:
        """Draw some of the examples, without repetition.

        Args:
            size: how many; None, or more than there are, takes all of them.
            rng: source of the choice.

        Returns:
            The `scale` of their likelihood for `log_prob`, and x and y.
        """
        count = len(self.data[1])
        if size is None or size >= count:
            return np.asarray(1.0, self.dtype), *self.data
        chosen = rng.choice(count, size, replace=False)
        scale = np.asarray(count / size, self.dtype)

        def some(part: Tensor) -> Tensor:
            return ops.take(part, chosen, axis=0)

        x, y = keras.tree.map_structure(some, self.data)
        return scale, x, y

    def predict(self, w: np.ndarray, x: Any, batch_size: int = 256) -> np.ndarray:
        """Return the outputs of the network.

        Args:
            w: vectors (S, size).
            x: N inputs, arrays.
            batch_size: examples at a time, 256 by default.

        Returns:
            An array (S, N, ...).
        """
        network = self.network
        prefix = compiled(network.prefix, self.reads)
        outputs_of = compiled(self._outputs, self.reads)
        first_input = keras.tree.flatten(x)[0]
        no_targets = np.zeros(len(first_input))
        outputs = []
        for inputs, _ in labelled_batches(x, no_targets, batch_size):
            values = keras.tree.map_structure(network.wide, prefix(inputs))
            of_batch = self._in_parts(outputs_of, w, (values,))
            outputs.append(of_batch)
        return np.concatenate(outputs, axis=1)

    def _outputs(self, w: Tensor, x: Any) -> Tensor:
        return self.likelihood.outputs(self.logits(w, x))


def _number_of(posterior: Any, name: str) -> float | None:
    """Return a number that a posterior may have as an attribute."""
    value = getattr(posterior, name, None)
    if value is None:
        return None
    return float(ops.convert_to_numpy(value))


def _prior_scale_of(posterior: Any) -> float:
    """Return the standard deviation of the prior that a posterior was fitted with, or raise."""
    scale = _number_of(posterior, "prior_scale")
    if scale is not None:
        return scale
    precision = _number_of(posterior, "prior_precision")
    if precision is not None:
        return precision**-0.5
    raise ValueError(
        f"`prior_scale` must be given: a {type(posterior).__name__} does not know its prior's."
    )
