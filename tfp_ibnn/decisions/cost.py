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

    Example:
        >>> import tfp_ibnn as ibnn
        >>> ibnn.decide([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]], refuse=0.3)
        array([ 0, -1,  1])
    """
    no_labels = np.zeros(np.shape(probabilities)[:-1])
    p = checked(probabilities, no_labels).probabilities.astype("float64")
    cost = 1 - np.eye(p.shape[-1]) if cost is None else np.asarray(cost, dtype="float64")
    if cost.ndim != 2 or len(cost) != p.shape[-1] or not np.isfinite(cost).all():
        wanted = f"finite, of the shape ({p.shape[-1]} classes, actions)"
        raise ValueError(f"`cost` must be {wanted}; got the shape {cost.shape}: {cost.tolist()}.")
    expected = p @ cost
    # 1 - 0.7 may round to above 0.3.
    limit = math.inf if refuse is None else checks.finite("refuse", refuse) + 1e-12
    found = np.where(expected.min(axis=-1) > limit, -1, expected.argmin(axis=-1))
    return found.reshape(no_labels.shape)


def error_threshold(
    probabilities: Any, y: Any, error: float = 0.01, confidence: float = 0.95
) -> dict[str, float]:
    """Return the lowest confidence from which on the error is guaranteed to be at most `error`.

    Thresholds of a fixed grid are tested from the highest down, each by the Clopper-Pearson bound
    on the error of what it answers; the last before the first failure is returned. To pass takes
    299 answers without an error, for 1 % at 95 %; the first test waits for three times as many, or
    half of the examples. The error of what is answered is then above `error` for at most
    1 - `confidence` of all validation sets, if errors do not become more frequent with confidence.

    `probabilities` (N, K) and classes `y` are validation data used for nothing else. The dict has
    `threshold` (2 if none has the guarantee), `answered`, the share answered, and `bound`, that of
    its error; `ibnn.decide(p, refuse=1 - threshold)` then decides. Reference: arXiv 2110.01052.

    Example:
        >>> import numpy as np, tfp_ibnn as ibnn
        >>> p, y = np.tile([[0.9, 0.1], [0.6, 0.4]], (300, 1)), np.tile([0, 0, 0, 1], 150)
        >>> ibnn.decisions.error_threshold(p, y)["answered"]  # half of them, which were all right
        0.5
    """
    checks.probability("error", error), checks.probability("confidence", confidence)
    top, right = checked(probabilities, y, names=("probabilities", "y", "")).top_label(np)
    needed = math.ceil(math.log(1 - confidence) / math.log(1 - error))
    if len(top) < needed:
        wanted = f"{needed} answers without an error, for {error:g} at {confidence:g}"
        raise ValueError(f"The guarantee takes at least {wanted}; got {len(top)} examples.")
    found = {"threshold": 2.0, "answered": 0.0, "bound": 1.0}
    for threshold in _GRID:
        answered = top >= threshold
        if answered.sum() >= max(needed, min(3 * needed, len(top) // 2)):
            count, errors = int(answered.sum()), int(answered.sum() - right[answered].sum())
            bound = 1.0 if errors == count else bdtri(errors, count, 1 - confidence)
            if bound > error:
                break
            found = {"threshold": threshold, "answered": count / len(top), "bound": bound}
    return {name: float(value) for name, value in found.items()}
