"""What a reference is taken of: the z of a model's layers, or weights."""

from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn import noise
from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.layers.control import some_stochastic_layers
from tfp_ibnn.posteriors import JointPosterior, Posterior
from tfp_ibnn.weights.features import LogitNetwork, check_network
from tfp_ibnn.weights.target import Density, Target


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
