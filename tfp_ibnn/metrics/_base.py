"""What all metrics share: the forms of their input, its checks, and the streaming base class."""

from types import ModuleType
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from scipy import special

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor, is_eager

__all__ = ["TOLERANCE", "ClassificationMetric", "Examples", "checked", "prepare"]

TOLERANCE = 1e-2
"""How far probabilities may sum from one: rounding to bfloat16 moves the sum by 0.4 %."""


class Examples(NamedTuple):
    """Predictions in one form, whatever form they came in."""

    probabilities: Any  # (examples, classes)
    log_probabilities: Any  # (examples, classes), or None unless the predictions were logits
    targets: Any  # (examples, classes), one-hot
    weight: Any  # (examples,)

    def top_label(self, xp: ModuleType) -> tuple[Any, Any]:
        """Return the confidence of each prediction and whether it is right, (examples, 1)."""
        predicted = xp.argmax(self.probabilities, axis=-1)[:, None]
        parts = self.probabilities, self.targets
        confidence, correct = (xp.take_along_axis(part, predicted, axis=-1) for part in parts)
        return confidence, correct


class ClassificationMetric(keras.metrics.Metric):
    """Base class of the streaming metrics.

    A compiled graph cannot raise, so the result is NaN from the first invalid example on: one whose
    probabilities are NaN, negative or do not sum to 1 (as logits do not: then `from_logits=True` is
    missing), whose label is none of the classes, or whose weight is negative or not finite. Where
    it is called eagerly, numbers that are not probabilities raise an error instead. Examples of
    weight 0 are neither counted nor checked.

    A subclass counts examples in `_count`, and returns the metric in `_value`.
    """

    def __init__(self, from_logits: bool, name: str, dtype: Any) -> None:
        super().__init__(name=name, dtype=checks.full_precision(dtype or keras.config.floatx()))
        self.from_logits = bool(from_logits)
        self.invalid = self.add_variable(
            shape=(), initializer="zeros", dtype=self.dtype, name="invalid"
        )

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count a batch.

        Args:
            y_true: (...) or (..., 1) integers, or (..., classes) one-hot.
            y_pred: (..., classes) probabilities or logits; or (..., 1), those of class 1 of two.
            sample_weight: (...), or a shape that can be broadcast to it along the last axes.
        """
        predictions = ops.cast(ops.convert_to_tensor(y_pred), self.dtype)
        weight = ops.cast(1 if sample_weight is None else sample_weight, self.dtype)
        labels = ops.convert_to_tensor(y_true)
        examples, *valid = prepare(ops, predictions, labels, weight, self.from_logits)
        if not self.from_logits and is_eager(predictions):
            self._refuse_logits(predictions, examples.weight, valid[0])
        valid = ops.all(ops.stack(valid), axis=0)
        counted = examples.weight != 0
        self.invalid.assign_add(
            ops.sum(ops.cast(ops.logical_and(counted, ops.logical_not(valid)), self.dtype))
        )
        keep = ops.logical_and(counted, valid)
        # Zero times NaN is NaN: what is not counted must hold numbers nonetheless.
        probabilities, log_probabilities = (
            part if part is None else ops.where(keep[:, None], part, ops.ones_like(part))
            for part in examples[:2]
        )
        weight = ops.where(keep, examples.weight, ops.zeros_like(examples.weight))
        targets = ops.cast(examples.targets, self.dtype)
        self._count(Examples(probabilities, log_probabilities, targets, weight))

    def result(self) -> Tensor:
        """Return the metric over all batches so far; 0 before the first."""
        value = self._value()
        return ops.where(self.invalid > 0, ops.full_like(value, float("nan")), value)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {**super().get_config(), "from_logits": self.from_logits}

    def _refuse_logits(self, predictions: Tensor, weight: Tensor, valid: Tensor) -> None:
        """Raise for numbers that are not probabilities; NaN has another cause, and stays NaN."""
        weight, valid = ops.convert_to_numpy(weight), ops.convert_to_numpy(valid)
        values = ops.convert_to_numpy(predictions).reshape(len(valid), predictions.shape[-1])
        bad = np.flatnonzero((weight != 0) & ~valid & ~np.isnan(values).any(axis=-1))
        if bad.size:
            raise ValueError(
                f"`y_pred` must be 0 or above and sum to 1; got {values[bad[0]]} at example "
                f"{bad[0]}. If these are logits, write {type(self).__name__}(from_logits=True)."
            )

    def _count(self, examples: Examples) -> None:
        raise NotImplementedError

    def _value(self) -> Tensor:
        raise NotImplementedError


def checked(
    probabilities: Any,
    labels: Any,
    sample_weight: Any = None,
    from_logits: bool = False,
    names: tuple[str, str, str] = ("probabilities", "labels", "sample_weight"),
) -> Examples:
    """Return arrays as examples, or raise; what has the weight 0 is left out unseen."""
    predictions = np.asarray(probabilities)
    is_double = predictions.dtype == "float64" or predictions.dtype.kind in "iub"
    predictions = predictions.astype("float64" if is_double else "float32")
    labels = np.asarray(labels)
    weight = np.asarray(1.0 if sample_weight is None else sample_weight, dtype="float64")
    with np.errstate(invalid="ignore", divide="ignore"):  # of logits that are refused below
        examples, *valid = prepare(np, predictions, labels, weight, from_logits, names)
    counted = examples.weight != 0
    if not counted.any():
        raise ValueError(
            f"`{names[0]}` must hold one example at least whose `{names[2]}` is not 0; got "
            f"the shape {predictions.shape}."
        )
    probable = "must be finite, 0 or above, and sum to 1 (if they are logits, say from_logits=True)"
    wanted = (
        "must be logits, finite or -inf" if from_logits else probable,
        f"must be whole numbers from 0 to {examples.targets.shape[-1] - 1}, or one-hot",
        "must be finite and 0 or above",
    )
    for name, values, good, want in zip(
        names, (predictions, labels, examples.weight), valid, wanted, strict=True
    ):
        bad = np.flatnonzero(counted & ~good)
        if bad.size:
            value = values.reshape(len(good), -1)[bad[0]]
            raise ValueError(f"`{name}` {want}; got {value} at example {bad[0]}.")
    return Examples(*(part if part is None else part[counted] for part in examples))


def prepare(
    xp: ModuleType,
    predictions: Any,
    labels: Any,
    weight: Any,
    from_logits: bool,
    names: tuple[str, str, str] = ("y_pred", "y_true", "sample_weight"),
) -> tuple[Examples, Any, Any, Any]:
    """Return flat examples, and which of them have valid predictions, labels and weights.

    `xp` is numpy or keras.ops.
    """
    is_one_hot = _is_one_hot(tuple(predictions.shape), tuple(labels.shape), names)
    shape = xp.shape(predictions)[:-1]
    weight = xp.reshape(_spread(xp, weight, shape, names[2]), (-1,))
    if predictions.shape[-1] == 1:
        # Means of ones can round to above one; the sum is checked below.
        rest = xp.zeros_like(predictions) if from_logits else xp.maximum(1 - predictions, 0)
        predictions = xp.concatenate([rest, predictions], axis=-1)
    classes = predictions.shape[-1]
    probabilities = xp.reshape(predictions, (-1, classes))
    log_probabilities = None
    if from_logits:
        log_softmax = ops.log_softmax if xp is ops else special.log_softmax
        log_probabilities = log_softmax(probabilities, axis=-1)
        probabilities = xp.exp(log_probabilities)
    distance = xp.abs(xp.sum(probabilities, axis=-1) - 1)
    valid = xp.logical_and(xp.all(probabilities >= 0, axis=-1), distance <= TOLERANCE)
    if is_one_hot:
        labels = xp.reshape(labels, (-1, classes))
        targets = xp.equal(labels, 1)
        is_class = xp.logical_and(
            xp.any(targets, axis=-1), xp.equal(xp.count_nonzero(labels, axis=-1), 1)
        )
    else:
        # False in all classes for NaN and fractions too.
        targets = xp.equal(xp.reshape(labels, (-1, 1)), xp.arange(classes))
        is_class = xp.any(targets, axis=-1)
    is_weight = xp.logical_and(weight >= 0, weight < float("inf"))
    targets = xp.where(targets, 1.0, 0.0)
    return Examples(probabilities, log_probabilities, targets, weight), valid, is_class, is_weight


def _is_one_hot(
    predictions: tuple[int | None, ...], labels: tuple[int | None, ...], names: tuple[str, ...]
) -> bool:
    """Return whether labels of this shape are one-hot, or raise if the shapes do not go together.

    Sizes that are known only when a graph runs are None.
    """
    if len(predictions) < 2 or not predictions[-1]:
        raise ValueError(
            f"`{names[0]}` must have the shape (..., classes), or (..., 1) for the probability of "
            f"class 1 of two; got {predictions}."
        )
    shape, classes = predictions[:-1], max(predictions[-1], 2)
    has_last = len(labels) == len(predictions)
    leading = labels[:-1] if has_last else labels
    agree = len(leading) == len(shape) and all(
        None in pair or pair[0] == pair[1] for pair in zip(leading, shape, strict=True)
    )
    if not agree or (has_last and labels[-1] not in (1, classes)):
        raise ValueError(
            f"`{names[1]}` must have the shape {shape}, {(*shape, 1)} or {(*shape, classes)}, to "
            f"go with `{names[0]}` of shape {predictions}; got {labels}."
        )
    return has_last and labels[-1] == classes


def _spread(xp: ModuleType, weight: Any, shape: tuple[Any, ...], name: str) -> Any:
    """Return weights of `shape`; a weight for each leading index is that of all below it."""
    given = tuple(weight.shape)
    if len(given) == len(shape) + 1 and given[-1] == 1:
        weight = xp.squeeze(weight, axis=-1)
    while len(weight.shape) < len(shape):
        weight = xp.expand_dims(weight, axis=-1)
    if len(weight.shape) > len(shape) or any(
        isinstance(size, int) and have not in (1, None, size)
        for have, size in zip(weight.shape, shape, strict=True)
    ):
        raise ValueError(
            f"`{name}` must have the shape {shape}, or one that can be broadcast to it along the "
            f"last axes; got {given}."
        )
    return xp.broadcast_to(weight, shape)
