"""Draws from a posterior that are the same for the same seed, and the channels worth looking at."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from keras import ops
from scipy.stats import norm

from tfp_ibnn._core import checks
from tfp_ibnn.posteriors import Posterior

__all__ = ["Draws", "distance_from_gaussian", "draw"]


class Draws(NamedTuple):
    """Draws of some channels, z (draws, channels), and what is known of each channel."""

    channels: list[int]
    z: np.ndarray
    distance: np.ndarray  # from a Gaussian
    prior_loc: np.ndarray
    prior_scale: np.ndarray

    def range(self, position: int) -> tuple[float, float]:
        """Return limits that show a channel's draws and three deviations of its prior."""
        loc, scale = self.prior_loc[position], self.prior_scale[position]
        low, high = np.quantile(self.z[:, position], (0.001, 0.999))
        margin = 0.05 * (high - low)
        return float(min(low - margin, loc - 3 * scale)), float(max(high + margin, loc + 3 * scale))


def draw(
    posterior: Any, channels: Sequence[int] | None, count: int, draws: int, seed: int
) -> Draws:
    """Draw from a posterior, or a layer's, and choose channels if none are given."""
    posterior = _posterior_of(posterior)
    draws = checks.positive_integer("draws", draws)
    if draws < 100:
        raise ValueError(f"`draws` must be at least 100 to show a density; got {draws}.")
    if channels is not None:
        channels = _checked_channels(channels, posterior.channels)
    count = checks.positive_integer("count", count)
    noise = np.random.default_rng(seed).standard_normal((draws, posterior.channels))
    # Noise made here is the same on every backend, and leaves the posterior's own seed alone.
    component = np.arange(draws, dtype="int32") % posterior.components
    component = component if posterior.components > 1 else None
    drawn = posterior.transform(ops.convert_to_tensor(noise, dtype=posterior.dtype), component)
    z = np.asarray(ops.convert_to_numpy(drawn.z), dtype="float64")
    if not np.all(np.isfinite(z)):
        raise ValueError(
            f"`posterior` gave {np.sum(~np.isfinite(z))} draws of z that are not finite: its "
            "weights are NaN or have overflowed. Load weights from before the run diverged."
        )
    distance = distance_from_gaussian(z)
    if channels is None:
        channels = np.argsort(-distance, kind="stable")[:count].tolist()
    prior = posterior.prior()
    loc, scale = (ops.convert_to_numpy(part)[channels] for part in (prior.mean(), prior.stddev()))
    return Draws(channels, z[:, channels], distance[channels], loc, scale)


def distance_from_gaussian(z: np.ndarray) -> np.ndarray:
    """Return how far each channel's draws (draws, channels) are from a Gaussian, (channels,).

    It is the 2-Wasserstein distance between the standardised draws and N(0, 1): the root mean
    square difference between sorted draws and normal quantiles, as in the Shapiro-Francia test.
    """
    deviation = z.std(axis=0)
    standard = (np.sort(z, axis=0) - z.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
    quantiles = norm.ppf((np.arange(len(z)) + 0.5) / len(z))
    return np.sqrt(np.mean((standard - quantiles[:, None]) ** 2, axis=0))


def _posterior_of(given: Any) -> Posterior:
    posterior = given if isinstance(given, Posterior) else getattr(given, "posterior", None)
    if not isinstance(posterior, Posterior):
        raise ValueError(
            "`posterior` must be a posterior such as ibnn.NormalPlanar1d(), or a stochastic layer; "
            f"got {given!r}."
        )
    if not posterior.built:
        raise ValueError(
            f"`posterior` must be built; got {given!r}. Call `build((channels,))` first, or the "
            "model that holds the layer."
        )
    return posterior


def _checked_channels(channels: Any, size: int) -> list[int]:
    found = np.asarray(channels)
    good = found.ndim == 1 and found.size > 0 and np.issubdtype(found.dtype, np.integer)
    if not good or found.min() < 0 or found.max() >= size or len(np.unique(found)) < len(found):
        raise ValueError(
            f"`channels` must be different numbers from 0 to {size - 1}, such as (0,); got "
            f"{channels!r}."
        )
    return found.tolist()
