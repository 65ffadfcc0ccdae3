"""The weights of a network as one flat vector, and linear algebra on such vectors."""

import math
from collections.abc import Sequence

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor


def precision_of(model: keras.Model) -> str:
    """Return the type of sums over data and of moments: half precision is too little for them."""
    if any(w.dtype == "float64" for w in model.weights):
        return "float64"
    return "float32"


def places_of(model: keras.Model, variables: Sequence[keras.Variable]) -> list[int]:
    """Return the positions of variables among `model.weights`.

    Args:
        model: a built model.
        variables: some of its weights, in any order.

    Returns:
        One position for each variable, in their order.
    """
    place_of = {id(weight): place for place, weight in enumerate(model.weights)}
    return [place_of[id(variable)] for variable in variables]


def flat(variables: Sequence[keras.Variable]) -> np.ndarray:
    """Return the values of variables as one vector."""
    values = [ops.convert_to_numpy(v.value) for v in variables]
    return np.concatenate([value.ravel() for value in values])


def split(vectors: Tensor, variables: Sequence[keras.Variable]) -> list[Tensor]:
    """Cut vectors into the values of variables: the inverse of `flat`.

    Args:
        vectors: one vector (size,), or several (..., size).
        variables: what the vectors have values for, one after the other.

    Returns:
        For each variable a tensor (..., *shape), of its type.
    """
    leading = vectors.shape[:-1]
    parts = []
    start = 0
    for variable in variables:
        end = start + math.prod(variable.shape)
        part = ops.reshape(vectors[..., start:end], (*leading, *variable.shape))
        parts.append(ops.cast(part, variable.dtype))
        start = end
    return parts


def double(x: Tensor) -> np.ndarray:
    """Return an array in float64."""
    return ops.convert_to_numpy(x).astype("float64")


def triangular(factor: np.ndarray) -> np.ndarray:
    """Return the lower triangular L, of positive diagonal, with L L' = F F'; never by F F'."""
    root = np.linalg.qr(factor.T, mode="r").T
    signs = np.where(np.diagonal(root) < 0, -1.0, 1.0)
    return root * signs


def mirrored(rng: np.random.Generator, pairs: int, size: int) -> np.ndarray:
    """Return standard normal draws of which half are the negatives of the other half.

    Args:
        rng: source of the draws.
        pairs: number of draws that are mirrored.
        size: length of each.

    Returns:
        An array (2 * pairs, size), whose mean is 0.
    """
    half = rng.standard_normal((pairs, size))
    return np.concatenate([half, -half])


def balanced(rng: np.random.Generator, pairs: int, size: int) -> np.ndarray:
    """Return mirrored normal draws whose covariance is the identity, if there are enough of them.

    Args:
        rng: source of the draws.
        pairs: number of draws that are mirrored.
        size: length of each; with as many pairs or fewer the draws stay as they come.

    Returns:
        An array (2 * pairs, size), whose mean is 0.
    """
    eps = mirrored(rng, pairs, size)
    if pairs <= size:
        return eps
    covariance = eps.T @ eps / len(eps)
    return eps @ np.linalg.inv(np.linalg.cholesky(covariance)).T
