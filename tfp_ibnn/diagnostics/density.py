"""Any posterior of the library as a density of flat vectors."""

from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import KEY_DTYPE, tfd
from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.posteriors import Posterior
from tfp_ibnn.posteriors.base import equal_mixture
from tfp_ibnn.weights.target import Density


class PosteriorDensity(Density):
    """A posterior, as `log_weights` takes it, as a density of rows (S, size), of its values now.

    The z of all `ibnn.stochastic_layers(model)` stand one after the other.
    """

    def __init__(self, posterior: Any) -> None:
        layers = stochastic_layers(posterior) if isinstance(posterior, keras.layers.Layer) else []
        own = [getattr(layer, "posterior", None) for layer in layers]
        order = [(id(getattr(q, "joint", q)), getattr(q, "start", 0)) for q in own]
        first = {key: place for place, (key, _) in reversed([*enumerate(order)])}
        if order != sorted(order, key=lambda one: (first[one[0]], one[1])):
            raise ValueError("The layers of a JointPosterior must follow each other, in its order.")
        own = [*dict.fromkeys(getattr(q, "joint", q) for q in own)] or [posterior]  # each once
        kinds = (Posterior, WeightPosterior)
        parts = [q.distribution() if isinstance(q, kinds) and q.built else q for q in own]
        if own[1:] and any(getattr(q, "shared_components", 0) and q.components > 1 for q in own):
            each = [getattr(q, "components_distribution", None) for q in parts]  # none of a flow
            moments = ([getattr(q, name)() for q in each] for name in ("mean", "stddev"))
            joined = (ops.concatenate(x, axis=-1) for x in moments)
            parts = [None] if None in each else [equal_mixture(*joined)]
        if not all(isinstance(q, tfd.Distribution) and not tuple(q.batch_shape) for q in parts):
            wanted = "a built model with z, a posterior over weights, or a tfd.Distribution"
            raise ValueError(f"`posterior` must be {wanted} of no batch shape; got {posterior!r}.")
        self._q = tfd.Blockwise(parts)
        dtype = keras.backend.standardize_dtype(self._q.dtype)
        super().__init__(self._q.log_prob, np.zeros(self._q.event_shape[0], dtype))

    def sample_and_log_prob(self, number: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Draw rows, alike for equal seeds, with log-densities (S,); no flow is inverted."""
        key = ops.cast(np.random.default_rng(seed).integers(0, 2**31 - 1, 2), KEY_DTYPE)
        found = self._q.experimental_sample_and_log_prob(number, seed=key)
        return tuple(ops.convert_to_numpy(part).astype("float64") for part in found)


def rows_of(given: Any, number: int, seed: int) -> np.ndarray:
    """Return samples (..., size) as rows, at most so many by chance, or draws of a posterior."""
    found = getattr(given, "samples", given)
    found = found() if callable(found) and found is not given else found
    if not isinstance(found, np.ndarray):
        return PosteriorDensity(given).sample_and_log_prob(number, seed)[0]
    rows = np.random.default_rng(seed).permutation(found.reshape(-1, found.shape[-1]))
    return rows[:number].astype("float64")
