"""The plane on which a classifier of two inputs is drawn."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from scipy.special import entr

from tfp_ibnn._core import checks
from tfp_ibnn.plots import _inputs

__all__ = ["axes_of", "evaluate"]


def axes_of(x: np.ndarray | None, limits: Any, resolution: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the grid's horizontal and vertical coordinates, (resolution,) each.

    Args:
        x: (N, 2) points to cover where there are no limits.
        limits: ((left, right), (bottom, top)), or None.
        resolution: grid points along each axis.
    """
    count = checks.positive_integer("resolution", resolution)
    if count < 2:
        raise ValueError(f"`resolution` must be at least 2; got {resolution!r}.")
    across, up = (np.linspace(*ends, count) for ends in _limits(limits, x))
    return across, up


def evaluate(
    predict: Callable[[np.ndarray], Any], grid: np.ndarray, uncertainty: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities (M, classes) and uncertainty (M,)."""
    if not callable(predict):
        raise ValueError(f"`predict` must be a function of points (M, 2); got {predict!r:.80}.")
    given = predict(grid)
    parts = given if isinstance(given, Mapping) else {"mean": given}
    checks.one_of("uncertainty", uncertainty, sorted({"entropy", *parts} - {"mean"}))
    if "mean" not in parts:
        raise ValueError(f"`predict` must return a mapping with the key 'mean'; got {[*parts]}.")
    mean = np.asarray(parts["mean"])
    if mean.ndim == 2 and mean.shape[1] == 1:
        mean = np.concatenate([1 - mean, mean], axis=1)
    mean = _inputs.probabilities("predict(points)", mean, "points")
    if len(mean) != len(grid):
        raise ValueError(
            f"`predict` must return one row a point, ({len(grid)}, classes); got {mean.shape}."
        )
    if uncertainty in parts:
        doubt = _inputs.vector(f"predict(points)[{uncertainty!r}]", parts[uncertainty], len(grid))
    else:
        doubt = entr(mean).sum(axis=-1)
    return mean, doubt


def _limits(limits: Any, x: np.ndarray | None) -> np.ndarray:
    if limits is None and x is None:
        raise ValueError(
            "`limits` must be given where there is no `x` to take them from; for example "
            "((-3, 3), (-2, 2))."
        )
    if limits is None:
        low, high = x.min(axis=0), x.max(axis=0)
        margin = np.where(high > low, 0.1 * (high - low), 1.0)
        return np.stack([low - margin, high + margin], axis=-1)
    found = _inputs.array("limits", limits, (2, 2))
    if np.any(found[:, 0] >= found[:, 1]):
        raise ValueError(
            f"`limits` must be ((left, right), (bottom, top)), in that order; got {limits!r}."
        )
    return found
