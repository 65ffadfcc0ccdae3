"""Checks of targets and of predictions, entry by entry."""

from collections.abc import Callable
from typing import Any

import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor

_MOST_AXES = 5
"""Of TensorFlow's softmax."""


def check_each(y: np.ndarray, is_good: Callable[..., Any], what: str, want: str) -> None:
    """Raise for the first example that is not valid, or not numeric.

    Args:
        y: (examples, ...).
        is_good: function of y that returns booleans of its shape.
        what: what y is, for the error.
        want: what each example must be, for the error.
    """
    good = np.zeros(y.shape, bool)
    if y.dtype.kind in "biuf":
        good = is_good(y)
    inner_axes = tuple(range(1, y.ndim))
    good = good.all(axis=inner_axes)
    if not good.all():
        i = int(good.argmin())
        raise ValueError(f"{what} must be {want}; got {y[i].tolist()!r} at example {i}.")


def softmax(logits: Tensor) -> Tensor:
    """Return probabilities over the last axis, whatever the number of axes.

    TensorFlow's own takes five on an Intel CPU: one too few for draws of classes of voxels.
    """
    if len(logits.shape) <= _MOST_AXES:
        return ops.softmax(logits, axis=-1)
    log_p = ops.log_softmax(logits, axis=-1)
    return ops.exp(log_p)


def or_nan(values: Tensor, valid: Tensor) -> Tensor:
    """Replace invalid values by NaN, so that no result hides them.

    Args:
        values: a tensor.
        valid: which of them are valid.

    Returns:
        The valid values, and NaN for the others.
    """
    nan = ops.full_like(values, float("nan"))
    return ops.where(valid, values, nan)
