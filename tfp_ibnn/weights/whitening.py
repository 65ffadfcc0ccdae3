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
    if factor.ndim == 1:
        return (w - loc) / factor
    return np.linalg.solve(factor, (w - loc).T).T


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
    rows = recent.reshape(-1, state.shape[-1]).astype("float64")
    spread = rows.std(axis=0)
    is_diagonal = factor.ndim == 1
    fewest = 20 if is_diagonal else 10 * rows.shape[1]
    fits = spread.min() > _LEAST_SPREAD and spread.max() < _MOST_SPREAD
    if fits or len(rows) < fewest:
        return loc, factor, state
    if is_diagonal:
        new_factor = factor * spread
    else:
        covariance = np.atleast_2d(np.cov(rows.T)) + np.diag(1e-6 * spread**2)
        new_factor = factor @ np.linalg.cholesky(covariance)
    new_loc = colored(rows.mean(axis=0), loc, factor)
    new_state = whitened(colored(state, loc, factor), new_loc, new_factor)
    return new_loc, new_factor, new_state
