"""What is compared: the log-density of a reference's z or weights, and that of a posterior."""

from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn import noise
from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import KEY_DTYPE, Tensor, tfd
from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.layers.control import some_stochastic_layers
from tfp_ibnn.posteriors import JointPosterior, Posterior
from tfp_ibnn.posteriors.base import equal_mixture
from tfp_ibnn.weights.density import Density
from tfp_ibnn.weights.features import LogitNetwork, check_network
from tfp_ibnn.weights.target import Target
from tfp_ibnn.weights.vectors import double


class LatentTarget(Target):
    """log p(y | x, z) + log p(z) for the z of all stochastic layers, one after the other.

    All examples share them, and the weights stay; the prior counts once, whatever `beta`.
    """

    def _open(self, model: Any, variables: Any, prior_scale: Any, *head: Any) -> tuple[Any, ...]:
        check_network(model, stochastic=True)
        self.layers = some_stochastic_layers(model)
        for layer in self.layers:
            if not (isinstance(layer.posterior, (Posterior, JointPosterior)) and layer.draws_ahead):
                got = f"that of {layer.name!r} is {type(layer.posterior).__name__}"
                want = "over z, such as ibnn.NormalAffine(), with noise='channel'"
                raise ValueError(f"The posteriors must be {want}; {got}.")
        is_noisy = lambda x: isinstance(x, keras.Layer) and bool(stochastic_layers(x))  # noqa: E731
        network = LogitNetwork(model, is_noisy, *head)
        priors = [layer.posterior.prior() for layer in self.layers]
        means = [layer.posterior.mean() for layer in self.layers]
        parts = means, [p.mean() for p in priors], [p.stddev() for p in priors]
        found = [np.concatenate([ops.convert_to_numpy(x) for x in part]) for part in parts]
        # A Cauchy distribution has neither.
        found = [np.where(np.isfinite(x), x, y) for x, y in zip(found, (1, 1, 0.3), strict=True)]
        return network, *(x.astype(network.dtype) for x in found)

    def logits(self, w: Tensor, x: Any) -> Tensor:
        count = w.shape[0]
        with noise.scope(groups=count, losses=False, draws=self._split(w)):
            found = self.network.logits(self.network.graph.repeat(x, count))
        return ops.reshape(found, (count, -1, self.network.width))

    def log_prior(self, w: Tensor) -> Tensor:
        each = [x.posterior.prior().log_prob(z) for x, z in self._split(w).items()]
        return ops.cast(sum(each), w.dtype)

    def _split(self, w: Tensor) -> dict[Any, Tensor]:
        ends = np.cumsum([layer.posterior.channels for layer in self.layers])
        places = zip(self.layers, [0, *ends], ends, strict=False)
        return {x: ops.cast(w[:, a:b], x.posterior.dtype) for x, a, b in places}


def target_of(
    model: Any,
    data: Any,
    over: str | None = None,
    prior_scale: float | None = None,
    noise_scale: float | None = None,
    verbose: Any = 0,
    **head: Any,
) -> Density:
    """Return the log-density of what `hmc` and `smc` were given."""
    if isinstance(model, Density):
        return model
    x, y = data if isinstance(data, tuple) else (data, None)
    if isinstance(model, WeightPosterior):
        return Target.of_posterior(model, x, y, prior_scale, noise_scale, verbose)
    has_z = isinstance(model, keras.Model) and bool(stochastic_layers(model))
    over = ("z" if has_z else "last_layer") if over is None else over
    checks.one_of("over", over, ("z", "last_layer", "weights"))
    if over == "z":
        if prior_scale is not None:
            raise ValueError("`prior_scale` is for weights: those of z are of its posteriors.")
        return LatentTarget(model, None, x, y, None, noise_scale, verbose=verbose, **head)
    scale = 1.0 if prior_scale is None else checks.scale("prior_scale", prior_scale)
    weights = getattr(model, "trainable_variables", ()) if over == "weights" else None
    return Target(model, weights, x, y, scale, noise_scale, verbose=verbose, **head)


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
        return tuple(map(double, found))


def rows_of(given: Any, number: int, seed: int) -> np.ndarray:
    """Return samples (..., size) as rows, at most so many by chance, or draws of a posterior."""
    found = getattr(given, "samples", given)
    found = found() if callable(found) and found is not given else found
    if not isinstance(found, np.ndarray):
        return PosteriorDensity(given).sample_and_log_prob(number, seed)[0]
    rows = np.random.default_rng(seed).permutation(found.reshape(-1, found.shape[-1]))
    return rows[:number].astype("float64")
