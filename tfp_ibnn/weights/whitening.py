"""Coordinates in which a Gaussian is standard normal, and their adaptation to draws."""

from typing import Any

import numpy as np
from keras import ops

from tfp_ibnn._core.backend import matmul

_LEAST_SPREAD = 0.5
_MOST_SPREAD = 2
"""Standard deviations of white draws between which the Gaussian is taken to fit them."""


def colored(white: Any, loc: Any, factor: Any) -> Any:
    """Return draws of a Gaussian from standard normal rows.

    Args:
        white: rows (..., size), arrays or tensors.
        loc: mean (size,) of the Gaussian, or a mean for each row.
        factor: its standard deviations (size,), or a matrix F (size, size) for the covariance F F'.

    Returns:
        Draws (..., size).
    """
    if len(factor.shape) == 1:
        return loc + white * factor
    if isinstance(white, np.ndarray):
        return loc + white @ factor.T
    return loc + matmul(white, ops.transpose(factor))


def whitened(w: np.ndarray, loc: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Return standard normal rows from draws of a Gaussian: the inverse of `colored`.

    Args:
        w: draws (n, size).
        loc: mean (size,) of the Gaussian.
        factor: its standard deviations (size,), or a matrix F (size, size) for the covariance F F'.

    Returns:
        Rows (n, size).
    """
    centered = w - loc
    if factor.ndim == 1:
        return centered / factor
    columns = np.linalg.solve(factor, centered.T)
    return columns.T


def refitted(
    loc: np.ndarray, factor: np.ndarray, state: np.ndarray, recent: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give a Gaussian that does not fit recent draws their moments.

    Args:
        loc: its mean (size,).
        factor: its standard deviations (size,), or a matrix F (size, size) for the covariance F F'.
        state: where the chains are, white rows (chains, size).
        recent: recent draws of the chains, white rows (n, chains, size).

    Returns:
        Mean, factor and state under them; all as they were if the Gaussian fits, or if there are
        too few draws to know better.
    """
    size = state.shape[-1]
    rows = recent.reshape(-1, size).astype("float64")
    spread = rows.std(axis=0)
    is_diagonal = factor.ndim == 1
    fewest = 20 if is_diagonal else 10 * size
    fits = spread.min() > _LEAST_SPREAD and spread.max() < _MOST_SPREAD
    if fits or len(rows) < fewest:
        return loc, factor, state
    if is_diagonal:
        new_factor = factor * spread
    else:
        new_factor = factor @ _root_of_covariance(rows)
    center = rows.mean(axis=0)
    new_loc = colored(center, loc, factor)
    w = colored(state, loc, factor)
    return new_loc, new_factor, whitened(w, new_loc, new_factor)


def _root_of_covariance(rows: np.ndarray) -> np.ndarray:
    """Return the lower triangular factor of the covariance of rows, a little widened."""
    covariance = np.atleast_2d(np.cov(rows.T))
    variances = rows.std(axis=0) ** 2
    jitter = np.diag(1e-6 * variances)
    return np.linalg.cholesky(covariance + jitter)
