"""Decisions by expected cost, and a confidence threshold with a guarantee on the error."""

import math
from typing import Any

import numpy as np
from scipy.special import bdtri, expit

from tfp_ibnn._core import checks
from tfp_ibnn.metrics._base import checked

_GRID = (*expit(np.arange(16, -5, -0.1)), 0.0)  # fixed before any data are seen


def decide(probabilities: Any, cost: Any = None, refuse: float | None = None) -> np.ndarray:
    """Return the action of the lowest expected cost for each example, or -1 for a refusal.

    Args:
        probabilities: (..., classes), or (..., 1) for class 1 of two.
        cost: (classes, actions), the cost of an action where that class is the true one. None: the
            actions are the classes, and a wrong one costs 1.
        refuse: the cost of a refusal; None never refuses, and at equal cost it does not either.

    Returns:
        Actions (...), integers: the column of `cost`, or -1.

    Raises:
        ValueError: if `probabilities` do not sum to 1, or `cost` does not go with them.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> ibnn.decide([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]], refuse=0.3)
        array([ 0, -1,  1])
    """
    positions = np.shape(probabilities)[:-1]
    no_labels = np.zeros(positions)
    p = checked(probabilities, no_labels).probabilities
    p = p.astype("float64")
    classes = p.shape[-1]
    if cost is None:
        cost = 1 - np.eye(classes)
    cost = np.asarray(cost, dtype="float64")
    if cost.ndim != 2 or len(cost) != classes or not np.isfinite(cost).all():
        raise ValueError(
            f"`cost` must be finite, of the shape ({classes} classes, actions); got the shape "
            f"{cost.shape}: {cost.tolist()}."
        )
    expected = p @ cost
    actions = expected.argmin(axis=-1)
    if refuse is not None:
        # 1 - 0.7 may round to above 0.3.
        limit = checks.finite("refuse", refuse) + 1e-12
        actions = np.where(expected.min(axis=-1) > limit, -1, actions)
    return actions.reshape(positions)


def error_threshold(
    probabilities: Any, y: Any, error: float = 0.01, confidence: float = 0.95
) -> dict[str, float]:
    """Return the lowest confidence above which the error is guaranteed to be at most `error`.

    Thresholds of a fixed grid are tested from the highest down, each by the Clopper-Pearson bound
    on the error of what it answers; the last before the first failure is returned. To pass takes
    299 answers without an error, for 1 % at 95 %; the first test waits for three times as many, or
    half of the examples. The error of what is answered is then above `error` for at most
    1 - `confidence` of all validation sets, if errors do not become more frequent with confidence.
    `ibnn.decide(p, refuse=1 - threshold)` then decides. Reference: arXiv 2110.01052.

    Args:
        probabilities: (N, classes), of validation data that are used for nothing else.
        y: (N,), their classes.
        error: the largest share of wrong answers, between 0 and 1.
        confidence: of the guarantee, between 0 and 1.

    Returns:
        A dict with these keys:

        - "threshold": the confidence from which to answer; 2 if none has the guarantee;
        - "answered": the share of the validation data that is answered;
        - "bound": the upper bound of the error of these answers; 1 if there are none.

    Raises:
        ValueError: if there are too few examples for any guarantee.

    Example:
        >>> import numpy as np, tfp_ibnn as ibnn
        >>> p, y = np.tile([[0.9, 0.1], [0.6, 0.4]], (300, 1)), np.tile([0, 0, 0, 1], 150)
        >>> ibnn.decisions.error_threshold(p, y)["answered"]  # half of them, which were all right
        0.5
    """
    error = checks.probability("error", error)
    confidence = checks.probability("confidence", confidence)
    examples = checked(probabilities, y, names=("probabilities", "y", ""))
    top, is_right = examples.top_label(np)
    # So many answers without an error have the bound (1 - error)^n = 1 - confidence.
    needed = math.ceil(math.log(1 - confidence) / math.log(1 - error))
    if len(top) < needed:
        raise ValueError(
            f"The guarantee takes at least {needed} answers without an error, for {error:g} at "
            f"{confidence:g}; got {len(top)} examples."
        )
    fewest = max(needed, min(3 * needed, len(top) // 2))
    guaranteed = {"threshold": 2.0, "answered": 0.0, "bound": 1.0}
    for threshold in _GRID:
        is_answered = top >= threshold
        count = int(is_answered.sum())
        if count < fewest:
            continue
        errors = count - int(is_right[is_answered].sum())
        bound = _upper_bound(errors, count, confidence)
        if bound > error:
            break
        guaranteed = {
            "threshold": float(threshold),
            "answered": count / len(top),
            "bound": bound,
        }
    return guaranteed


def _upper_bound(errors: int, count: int, confidence: float) -> float:
    """Return the upper end of Clopper and Pearson's one-sided interval for a share of errors."""
    if errors == count:
        return 1.0
    return float(bdtri(errors, count, 1 - confidence))
