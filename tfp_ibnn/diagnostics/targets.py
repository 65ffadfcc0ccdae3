"""The log-densities that are compared: a reference's, of z or weights, and a posterior's."""

from collections.abc import Sequence
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

_SCALE_WITHOUT_MOMENTS = 0.3  # of a prior that has none, such as a Cauchy distribution


class LatentTarget(Target):
    """log p(y | x, z) + log p(z) for the z of all stochastic layers, one after the other.

    All examples share one z, and the weights stay fixed; the prior counts once, whatever `beta`.
    """

    def _open(self, model: Any, variables: Any, prior_scale: Any, *head: Any) -> tuple[Any, ...]:
        """Return the network, and of all z the start, and mean and scale of the prior."""
        check_network(model, stochastic=True)
        self.layers = some_stochastic_layers(model)
        for layer in self.layers:
            is_over_z = isinstance(layer.posterior, (Posterior, JointPosterior))
            if not (is_over_z and layer.draws_ahead):
                raise ValueError(
                    "The posteriors must be over z, such as ibnn.NormalAffine(), with "
                    f"noise='channel'; that of {layer.name!r} is "
                    f"{type(layer.posterior).__name__}."
                )
        network = LogitNetwork(model, _is_stochastic, *head)
        posteriors = [layer.posterior for layer in self.layers]
        priors = [posterior.prior() for posterior in posteriors]
        start = _joined([posterior.mean() for posterior in posteriors], default=1.0)
        loc = _joined([prior.mean() for prior in priors], default=1.0)
        scale = _joined([prior.stddev() for prior in priors], default=_SCALE_WITHOUT_MOMENTS)
        return (
            network,
            start.astype(network.dtype),
            loc.astype(network.dtype),
            scale.astype(network.dtype),
        )

    def logits(self, w: Tensor, x: Any) -> Tensor:
        count = w.shape[0]
        draws = self._split(w)
        with noise.scope(groups=count, losses=False, draws=draws):
            repeated = self.network.graph.repeat(x, count)
            logits = self.network.logits(repeated)
        return ops.reshape(logits, (count, -1, self.network.width))

    def log_prior(self, w: Tensor) -> Tensor:
        total = 0.0
        for layer, z in self._split(w).items():
            total += layer.posterior.prior().log_prob(z)
        return ops.cast(total, w.dtype)

    def _split(self, w: Tensor) -> dict[Any, Tensor]:
        """Return the z (S, channels) of each layer, from rows (S, size)."""
        draws = {}
        start = 0
        for layer in self.layers:
            end = start + layer.posterior.channels
            draws[layer] = ops.cast(w[:, start:end], layer.posterior.dtype)
            start = end
        return draws


def _is_stochastic(layer: Any) -> bool:
    return isinstance(layer, keras.Layer) and bool(stochastic_layers(layer))


def _joined(parts: Sequence[Tensor], default: float) -> np.ndarray:
    """Return vectors as one array, with a default where they are not finite."""
    joined = np.concatenate([ops.convert_to_numpy(part) for part in parts])
    return np.where(np.isfinite(joined), joined, default)


def target_of(
    model: Any,
    data: Any,
    over: str | None = None,
    prior_scale: float | None = None,
    noise_scale: float | None = None,
    verbose: Any = 0,
    *,
    head: str | None = None,
    from_logits: bool | None = None,
) -> Density:
    """Return the log-density that `hmc` and `smc` take, by their arguments.

    Args:
        model: a model, a posterior over weights, or a `Density`, which is returned.
        data: (x, y), or a dataset of such batches.
        over: "z", "last_layer" or "weights"; None is "z" if there are stochastic layers, else
            "last_layer".
        prior_scale: of weights; None is 1.0, or that of the posterior.
        noise_scale: of the targets of a plain regression.
        verbose: 0 shows no progress.
        head: as for `MonteCarlo`.
        from_logits: as for `MonteCarlo`.

    Returns:
        The density over flat vectors.
    """
    if isinstance(model, Density):
        return model
    x, y = data if isinstance(data, tuple) else (data, None)
    if isinstance(model, WeightPosterior):
        return Target.of_posterior(model, x, y, prior_scale, noise_scale, verbose)
    if over is None:
        has_z = isinstance(model, keras.Model) and _is_stochastic(model)
        over = "z" if has_z else "last_layer"
    checks.one_of("over", over, ("z", "last_layer", "weights"))
    options = {"verbose": verbose, "head": head, "from_logits": from_logits}
    if over == "z":
        if prior_scale is not None:
            raise ValueError("`prior_scale` is for weights: those of z are of its posteriors.")
        return LatentTarget(model, None, x, y, None, noise_scale, **options)
    scale = 1.0 if prior_scale is None else checks.scale("prior_scale", prior_scale)
    variables = getattr(model, "trainable_variables", ()) if over == "weights" else None
    return Target(model, variables, x, y, scale, noise_scale, **options)


class PosteriorDensity(Density):
    """The density of rows (S, size) under a posterior with its present values.

    It is one that `log_weights` takes. The z of all `ibnn.stochastic_layers(model)` stand one after
    the other.
    """

    def __init__(self, posterior: Any) -> None:
        parts = _independent_parts(posterior)
        self._q = tfd.Blockwise(parts)
        size = self._q.event_shape[0]
        dtype = keras.backend.standardize_dtype(self._q.dtype)
        start = np.zeros(size, dtype)
        super().__init__(self._q.log_prob, start)

    def sample_and_log_prob(self, number: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Draw rows with their log-densities; no flow is inverted.

        Args:
            number: of rows.
            seed: equal seeds give equal rows.

        Returns:
            Rows (number, size) and log-densities (number,), both in float64.
        """
        rng = np.random.default_rng(seed)
        seeds = rng.integers(0, 2**31 - 1, 2)
        key = ops.cast(seeds, KEY_DTYPE)
        rows, log_probs = self._q.experimental_sample_and_log_prob(number, seed=key)
        return double(rows), double(log_probs)


def _independent_parts(posterior: Any) -> list[tfd.Distribution]:
    """Return the independent distributions that a posterior consists of, or raise."""
    owners = _owners(posterior) or [posterior]
    parts = [_distribution_of(owner) for owner in owners]
    if len(parts) > 1 and any(_shares_its_component(owner) for owner in owners):
        joined = _joined_mixture(parts)
        if joined is None:
            raise ValueError(
                "`posterior` has no density of all z together, since the layers' mixtures of flows "
                "share their component: take posteriors with shared_components=False."
            )
        parts = [joined]
    for part in parts:
        if not isinstance(part, tfd.Distribution) or tuple(part.batch_shape):
            raise ValueError(
                "`posterior` must be a built model with z, a posterior over weights, or a "
                f"tfd.Distribution of no batch shape; got {posterior!r}."
            )
    return parts


def _owners(model: Any) -> list[Any]:
    """Return the posteriors of a model's stochastic layers, a joint one once, or raise."""
    if not isinstance(model, keras.layers.Layer):
        return []
    # Layers that share a joint posterior have consecutive parts of its vector, from `start` on.
    owners = []
    last_start = 0
    for layer in stochastic_layers(model):
        posterior = getattr(layer, "posterior", None)
        owner = getattr(posterior, "joint", posterior)
        start = getattr(posterior, "start", 0)
        is_listed = any(owner is other for other in owners)
        if is_listed and (owner is not owners[-1] or start < last_start):
            raise ValueError("The layers of a JointPosterior must follow each other, in its order.")
        if not is_listed:
            owners.append(owner)
        last_start = start
    return owners


def _distribution_of(owner: Any) -> Any:
    """Return the distribution of a built posterior, or what was given as one."""
    if isinstance(owner, (Posterior, WeightPosterior)) and owner.built:
        return owner.distribution()
    return owner


def _shares_its_component(owner: Any) -> bool:
    """Return whether a mixture takes the same component in all layers of a model."""
    return bool(getattr(owner, "shared_components", 0)) and owner.components > 1


def _joined_mixture(parts: Sequence[tfd.Distribution]) -> tfd.Distribution | None:
    """Return mixtures that share their component as one; None for those of flows."""
    locs = []
    scales = []
    for part in parts:
        components = getattr(part, "components_distribution", None)
        if components is None:
            return None
        locs.append(components.mean())
        scales.append(components.stddev())
    loc = ops.concatenate(locs, axis=-1)
    scale = ops.concatenate(scales, axis=-1)
    return equal_mixture(loc, scale)


def rows_of(posterior: Any, number: int, seed: int) -> np.ndarray:
    """Return samples as rows, or draws of a posterior.

    Args:
        posterior: samples (..., size); an object whose `samples` are or return such; or a posterior
            as `log_weights` takes it.
        number: of rows; of samples, the largest number that is chosen at random.
        seed: of the choice, or of the draws.

    Returns:
        Rows (number, size) in float64.
    """
    samples = getattr(posterior, "samples", posterior)
    if callable(samples) and samples is not posterior:
        samples = samples()
    if not isinstance(samples, np.ndarray):
        rows, _ = PosteriorDensity(posterior).sample_and_log_prob(number, seed)
        return rows
    rows = samples.reshape(-1, samples.shape[-1])
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(rows)
    return shuffled[:number].astype("float64")
