"""Gaussians and mixtures of them, and the noise at which summaries of posteriors are taken."""

import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor, tfd

_FIXED_PAIRS = 64

Component = Tensor | None
"""The mixture component of each draw, integers (...,); None if there is one component."""


def fixed_noise(channels: int, dtype: str) -> np.ndarray:
    """Return antithetic pairs of standard normal noise, always the same.

    Args:
        channels: size of the last axis.
        dtype: of the array, such as "float32".

    Returns:
        An array (128, channels), in which each row is followed by its negative.
    """
    half = np.random.default_rng(0).standard_normal((_FIXED_PAIRS, channels))
    pairs = np.stack([half, -half], axis=1)
    return pairs.reshape(-1, channels).astype(dtype)


def fixed_components(components: int) -> np.ndarray:
    """Return a component for each row of `fixed_noise`: those of a pair have the same."""
    pairs = np.arange(2 * _FIXED_PAIRS, dtype="int32") // 2
    return pairs % components


def diagonal_normal(loc: Tensor, scale: Tensor) -> tfd.Independent:
    """Return a diagonal Gaussian over the last axis.

    Args:
        loc: means, (..., channels).
        scale: standard deviations, (..., channels).

    Returns:
        A distribution with event shape (channels,).
    """
    return tfd.Independent(tfd.Normal(loc, scale), reinterpreted_batch_ndims=1)


def equal_mixture(loc: Tensor, scale: Tensor) -> tfd.MixtureSameFamily:
    """Return the equally weighted mixture of diagonal Gaussians.

    Args:
        loc: means of the components, (components, channels).
        scale: their standard deviations, (components, channels).

    Returns:
        A distribution with event shape (channels,).
    """
    logits = ops.zeros((loc.shape[0],), dtype=loc.dtype)
    return tfd.MixtureSameFamily(tfd.Categorical(logits=logits), diagonal_normal(loc, scale))


def of_component(component: Component, *parts: Tensor) -> list[Tensor]:
    """Return the rows of each part for the components of the draws.

    Args:
        component: of each draw, integers (...,).
        *parts: tensors (components, channels).

    Returns:
        A tensor (..., channels) for each part.

    Raises:
        ValueError: If `component` is None.
    """
    if component is None:
        raise ValueError("A posterior of several components needs `component`, one index per draw.")
    component = ops.convert_to_tensor(component, dtype="int32")
    return [ops.take(part, component, axis=0) for part in parts]
