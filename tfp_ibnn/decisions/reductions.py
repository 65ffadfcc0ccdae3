"""Scores of the positions of an output, and the one score that is made of them."""

import math
from typing import Any

import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.data.positions import PositionSample, rows_of_labels
from tfp_ibnn.likelihoods.base import with_rank
from tfp_ibnn.prediction.padding import weight_of_positions

REDUCTIONS = ("mean", "max", None, "pooled")
"""What `reduction` may be."""


def check_weight(weight: Any, is_used: bool) -> None:
    """Raise for weights of positions that would be left unread.

    Args:
        weight: what `fit` was given, or None.
        is_used: whether features of positions are learned from.
    """
    if weight is not None and not is_used:
        raise ValueError(
            "`sample_weight` is for scores of features at positions only: leave it out."
        )


def reduced(scores: Tensor, mask: Any, reduction: str | None) -> Tensor:
    """Return one score for each example, or those of its positions.

    Args:
        scores: (N, ...); without positions (N,) they stay as they are.
        mask: False for padding; None without padding.
        reduction: one of `REDUCTIONS`.

    Returns:
        Scores (N,); (N, ...) where `reduction` is None, NaN at padding.
    """
    rank = len(scores.shape)
    if rank == 1:
        return scores
    axes = tuple(range(1, rank))
    counts = ops.ones_like(scores)
    if mask is not None:
        counts = counts * ops.cast(with_rank(mask, rank), scores.dtype)
    if reduction is None:
        return ops.where(counts > 0, scores, float("nan"))
    if reduction == "max":
        counted = ops.where(counts > 0, scores, float("-inf"))
        return ops.max(counted, axis=axes)
    counted = ops.where(counts > 0, scores, 0.0)
    total = ops.sum(counted, axis=axes)
    if reduction == "pooled":
        return total
    count = ops.sum(counts, axis=axes)
    return total / ops.maximum(count, 1)


def rows_of_features(features: np.ndarray, labels: Any, weight: Any) -> tuple[np.ndarray, ...]:
    """Return the features of the positions that count, and their labels if there are some.

    Args:
        features: (N, ..., d + 1), the last number 0 for padding.
        labels: classes of examples (N,), or of positions (N, ...), or None.
        weight: of examples or positions, 0 for those to leave out; None leaves none out.

    Returns:
        Features (rows, d), and labels (rows,), or one-hot (rows, classes).
    """
    positions = features.shape[:-1]
    validity = features[..., -1]
    weight = weight_of_positions(weight, validity > 0, positions)
    counts = np.ravel(weight) > 0
    rows = features[..., :-1]
    rows = rows.reshape(len(counts), -1)
    if labels is None:
        return (rows[counts],)
    labels = np.asarray(labels)
    is_one_for_each = labels.size == len(labels)
    if is_one_for_each:
        repeats = math.prod(positions[1:])
        labels = np.repeat(labels, repeats)
    else:
        labels = rows_of_labels(labels, positions)
    return rows[counts], labels[counts]


def without_padding(scores: np.ndarray) -> np.ndarray:
    """Return the scores (rows,) of what is not padding."""
    return scores[~np.isnan(scores)]


def sampled(scores: np.ndarray) -> np.ndarray:
    """Return the scores (rows,) of what is not padding; of many positions, some at random."""
    if scores.ndim == 1:
        return scores
    sample = PositionSample()
    sample.add(without_padding(scores))
    return sample.rows()
