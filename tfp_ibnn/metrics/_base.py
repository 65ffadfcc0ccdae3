"""What all metrics share: the forms of their input, its checks, and the streaming base class."""

from types import ModuleType
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from scipy import special

from tfp_ibnn._core import checks, keras_internals
from tfp_ibnn._core.backend import Tensor, is_eager
from tfp_ibnn._core.serialization import Configured
from tfp_ibnn.metrics._running_sum import RunningSum

Names = tuple[str, str, str]  # of predictions, labels and weights, for errors
NAMES = ("y_pred", "y_true", "sample_weight")
TOLERANCE = 1e-2
"""How far probabilities may sum from one: rounding to bfloat16 moves the sum by 0.4 %."""


class Examples(NamedTuple):
    """Predictions in one form, whatever form they came in."""

    probabilities: Any  # (examples, classes)
    log_probabilities: Any  # (examples, classes); of 0, that of the smallest normal float
    targets: Any  # (examples, classes), one-hot
    weight: Any  # (examples,)

    def top_label(self, xp: ModuleType) -> tuple[Any, Any]:
        """Return confidence and whether right, (examples, 1); `xp` is numpy or keras.ops."""
        predicted = xp.argmax(self.probabilities, axis=-1)[:, None]
        parts = self.probabilities, self.targets
        return tuple(xp.take_along_axis(part, predicted, axis=-1) for part in parts)


class ClassificationMetric(Configured, keras.metrics.Metric):
    """Base class of the streaming metrics; a subclass defines `_count` and `_value`.

    A compiled graph cannot raise, so the result is NaN from the first invalid example on. Called
    eagerly, invalid probabilities raise. Examples of weight 0 are neither counted nor checked, and
    no more are the positions that the Keras mask of the predictions leaves out.
    """

    default_name: str
    sums: tuple[str, ...] = ()  # names of its scalar sums

    def __init__(self, from_logits: bool = False, name: Any = None, dtype: Any = None) -> None:
        dtype = checks.full_precision(dtype or keras.config.floatx())
        super().__init__(name=name or self.default_name, dtype=dtype)
        self.from_logits = bool(from_logits)
        self.invalid = self.add_variable((), "zeros", self.dtype, name="invalid")
        self._add_sums(*self.sums)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count a batch, in any form that `ibnn.metrics.reliability` takes."""
        predictions = ops.cast(ops.convert_to_tensor(y_pred), self.dtype)
        weight = self._weight(y_pred, sample_weight)
        labels = ops.convert_to_tensor(y_true)
        examples, *valid = prepare(ops, predictions, labels, weight, self.from_logits, NAMES)
        counted = examples.weight != 0
        if not self.from_logits and is_eager(predictions):
            values, bad = map(ops.convert_to_numpy, (predictions, counted & ~valid[0]))
            write = f"{type(self).__name__}(from_logits=True)"
            want = f"must be probabilities (for logits, write {write}), 0 or above, that sum to 1"
            # NaN has another cause, and stays NaN.
            _refuse("y_pred", want, values, bad & ~np.isnan(values).any(axis=-1).ravel())
        keep = ops.all(ops.stack([counted, *valid]), axis=0)
        self.invalid.assign_add(ops.sum(ops.cast(counted & ~keep, self.dtype)))
        # Zero times NaN is NaN: what is not counted must hold numbers nonetheless.
        parts = [ops.where(keep[:, None], x, 1.0) for x in examples[:2]]
        weight = ops.where(keep, examples.weight, 0.0)
        self._count(Examples(*parts, ops.cast(examples.targets, self.dtype), weight))

    def result(self) -> Tensor:
        """Return the metric over all batches so far; 0 before the first."""
        return ops.where(self.invalid > 0, float("nan"), self._value())

    def _weight(self, y_pred: Any, sample_weight: Any) -> Tensor:
        """Return the weights, 0 for what the mask of the predictions leaves out."""
        weight = ops.cast(1 if sample_weight is None else sample_weight, self.dtype)
        mask = keras_internals.mask_of(y_pred)
        if mask is None or len(mask.shape) >= len(y_pred.shape):
            return weight
        positions = ops.shape(y_pred)[:-1]
        weight = spread(ops, weight, positions, "sample_weight")
        return ops.where(spread(ops, mask, positions, "mask"), weight, 0.0)

    def _add_sums(self, *names: str, shape: tuple[int, ...] = ()) -> None:
        for name in names:
            setattr(self, name, RunningSum.of(self, name, shape))


def checked(
    probabilities: Any,
    labels: Any,
    sample_weight: Any = None,
    from_logits: bool = False,
    names: Names = ("probabilities", "labels", "sample_weight"),
) -> Examples:
    """Return arrays as examples, or raise; what has the weight 0 is left out unseen."""
    predictions, labels = np.asarray(probabilities), np.asarray(labels)
    is_double = predictions.dtype == "float64" or predictions.dtype.kind in "iub"
    predictions = predictions.astype("float64" if is_double else "float32")
    weight = np.asarray(1.0 if sample_weight is None else sample_weight, dtype="float64")
    with np.errstate(invalid="ignore", divide="ignore"):  # of logits that are refused below
        examples, *valid = prepare(np, predictions, labels, weight, from_logits, names)
    counted = examples.weight != 0
    if not counted.any():
        wanted = f"at least one example whose `{names[2]}` is not 0"
        raise ValueError(f"`{names[0]}` must hold {wanted}; got the shape {predictions.shape}.")
    probable = "must be finite, 0 or above, and sum to 1 (of logits, give from_logits=True)"
    probable = "must be logits, finite or -inf" if from_logits else probable
    classes = f"must be whole numbers from 0 to {examples.targets.shape[-1] - 1}, or one-hot"
    wanted = probable, classes, "must be finite and 0 or above"
    given = predictions, labels, examples.weight
    for name, want, values, good in zip(names, wanted, given, valid, strict=True):
        _refuse(name, want, values, counted & ~good)
    return Examples(*(part[counted] for part in examples))


def prepare(
    xp: ModuleType, predictions: Any, labels: Any, weight: Any, from_logits: bool, names: Names
) -> tuple[Examples, Any, Any, Any]:
    """Return flat examples, and which have valid predictions, labels and weights; `xp` as above."""
    is_one_hot = _is_one_hot(tuple(predictions.shape), tuple(labels.shape), names)
    shape = xp.shape(predictions)[:-1]
    weight = xp.reshape(spread(xp, weight, shape, names[2]), (-1,))
    if predictions.shape[-1] == 1:
        # Means of ones can round to above one; the sum is checked below.
        rest = xp.zeros_like(predictions) if from_logits else xp.maximum(1 - predictions, 0)
        predictions = xp.concatenate([rest, predictions], axis=-1)
    classes = predictions.shape[-1]
    probabilities = xp.reshape(predictions, (-1, classes))
    if from_logits:
        log_softmax = ops.log_softmax if xp is ops else special.log_softmax
        log_probabilities = log_softmax(probabilities, axis=-1)
        probabilities = xp.exp(log_probabilities)
    else:
        tiny = np.finfo(keras.backend.standardize_dtype(probabilities.dtype)).tiny
        log_probabilities = xp.log(xp.maximum(probabilities, tiny))
    distance = xp.abs(xp.sum(probabilities, axis=-1) - 1)
    valid = xp.logical_and(xp.all(probabilities >= 0, axis=-1), distance <= TOLERANCE)
    labels = xp.reshape(labels, (-1, classes if is_one_hot else 1))
    # Of labels that are not one-hot, NaN and fractions are equal to no class.
    targets = xp.equal(labels, 1 if is_one_hot else xp.arange(classes))
    is_class = xp.any(targets, axis=-1)
    if is_one_hot:
        is_class = xp.logical_and(is_class, xp.equal(xp.count_nonzero(labels, axis=-1), 1))
    is_weight = xp.logical_and(weight >= 0, weight < float("inf"))
    targets = xp.where(targets, 1.0, 0.0)
    return Examples(probabilities, log_probabilities, targets, weight), valid, is_class, is_weight


def _refuse(name: str, want: str, values: np.ndarray, bad: np.ndarray) -> None:
    """Raise for the first example that is bad, if there is one."""
    if bad.any():
        first = np.argmax(bad)
        got = values.reshape(len(bad), -1)[first]
        raise ValueError(f"`{name}` {want}; got {got} at example {first}.")


def _is_one_hot(predictions: tuple[Any, ...], labels: tuple[Any, ...], names: Names) -> bool:
    """Return whether labels are one-hot, by the shapes, in which None is a size not yet known."""
    if len(predictions) < 2 or not predictions[-1]:
        wanted = "(..., classes), or (..., 1) for the probability of class 1 of two"
        raise ValueError(f"`{names[0]}` must have the shape {wanted}; got {predictions}.")
    shape, classes = predictions[:-1], max(predictions[-1], 2)
    last = labels[len(shape) :]
    fits = all(None in pair or pair[0] == pair[1] for pair in zip(labels, shape, strict=False))
    if not fits or len(labels) < len(shape) or last not in ((), (1,), (classes,)):
        wanted = f"{shape}, {(*shape, 1)} or {(*shape, classes)}, to go with `{names[0]}`"
        got = f"{labels}, and {predictions} of `{names[0]}`"
        raise ValueError(f"`{names[1]}` must have the shape {wanted}; got {got}.")
    return last == (classes,)


def spread(xp: ModuleType, weight: Any, shape: tuple[Any, ...], name: str) -> Any:
    """Return weights of `shape`; a weight for each leading index is that of all below it."""
    given = tuple(weight.shape)
    if len(given) == len(shape) + 1 and given[-1] == 1:
        weight = xp.squeeze(weight, axis=-1)
    while len(weight.shape) < len(shape):
        weight = xp.expand_dims(weight, axis=-1)
    pairs = zip(weight.shape, shape, strict=False)
    fits = all(not isinstance(size, int) or have in (1, None, size) for have, size in pairs)
    if not fits or len(weight.shape) > len(shape):
        wanted = f"{shape}, or one that can be broadcast to it along the last axes"
        raise ValueError(f"`{name}` must have the shape {wanted}; got {given}.")
    return xp.broadcast_to(weight, shape)
