"""A log-density over flat vectors, with its gradients and its mode."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from scipy.optimize import minimize

from tfp_ibnn._core.backend import Tensor, compiled, gradient
from tfp_ibnn.weights.vectors import double


class Density:
    """Any log-density over flat vectors; the base of all targets.

    The Gaussian N(prior_loc, prior_scale^2) is to be wider than the density: chains and particles
    may start from its draws.

    Args:
        log_prob: a function of rows (S, size) and of `data`, in `keras.ops`, that returns their
            log-densities (S,), in nats; they need not be normalized.
        start: a vector (size,) at which the log-density and its gradient are finite.
        prior_loc: mean of the wider Gaussian, a number or a vector (size,), 0 by default.
        prior_scale: its standard deviation, a number or a vector (size,), 1 by default.
        data: further arguments of `log_prob`, arrays or nested structures of them.
        reads: Keras variables that `log_prob` reads, of which JAX must know.

    Example:
        >>> import numpy as np, tfp_ibnn as ibnn
        >>> from keras import ops
        >>> bell = ibnn.diagnostics.Density(lambda w: -ops.sum(w**2, axis=-1) / 2, np.ones(2))
        >>> bell.values(np.ones((1, 2))).tolist(), bell.gradients(np.ones((1, 2))).tolist()
        ([-1.0], [[-1.0, -1.0]])
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
        if start.dtype.kind != "f":
            start = start.astype("float32")
        self.start = start
        self.size = len(start)
        self.dtype = start.dtype
        self.prior_loc = prior_loc
        self.prior_scale = prior_scale
        self.log_prob = log_prob
        self.data = data
        self.reads = reads
        self._values = compiled(log_prob, reads)
        self._gradients = gradient(lambda w, *data: ops.sum(log_prob(w, *data)), reads)

    def values(self, w: np.ndarray) -> np.ndarray:
        """Return the log-density (S,) at w (S, size), given all data."""
        return self._in_parts(self._values, w, self.data)

    def gradients(self, w: np.ndarray) -> np.ndarray:
        """Return its gradients (S, size)."""
        return self._in_parts(self._gradients, w, self.data)

    def mode(self) -> np.ndarray:
        """Return where the log-density is highest, as far as L-BFGS climbs from `start`."""
        start = self.start.astype("float64")

        def loss_and_slope(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            row = w[None]
            return -self.values(row)[0], -self.gradients(row)[0]

        result = minimize(loss_and_slope, start, jac=True, method="L-BFGS-B")
        if not np.isfinite(result.fun):
            return start
        return result.x

    def _in_parts(self, function: Callable[..., Tensor], w: np.ndarray, data: Any) -> np.ndarray:
        """Return a function's values at w, computed for `rows` rows at a time."""
        results = []
        for start in range(0, len(w), self.rows):
            end = start + self.rows
            part = w[start:end].astype(self.dtype)
            result = function(part, *data)
            results.append(double(result))
        return np.concatenate(results)
