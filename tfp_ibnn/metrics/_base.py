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
    """Predictions in one form, whatever form they came in.

    Attributes:
        probabilities: (examples, classes).
        log_probabilities: (examples, classes); of 0, that of the smallest normal float.
        targets: (examples, classes), one-hot.
        weight: (examples,).
    """

    probabilities: Any
    log_probabilities: Any
    targets: Any
    weight: Any

    def top_label(self, xp: ModuleType) -> tuple[Any, Any]:
        """Return confidence and whether right, (examples, 1); `xp` is numpy or keras.ops."""
        predicted = xp.argmax(self.probabilities, axis=-1)
        predicted = predicted[:, None]
        confidence = xp.take_along_axis(self.probabilities, predicted, axis=1)
        is_right = xp.take_along_axis(self.targets, predicted, axis=1)
        return confidence, is_right


class Prepared(NamedTuple):
    """Examples, and which of them are valid in what, each (examples,) of booleans.

    Attributes:
        examples: all of them, the invalid ones too.
        has_probabilities: whether the predictions are probabilities.
        has_class: whether the label is one of the classes.
        has_weight: whether the weight is finite and 0 or above.
    """

    examples: Examples
    has_probabilities: Any
    has_class: Any
    has_weight: Any


class ClassificationMetric(Configured, keras.metrics.Metric):
    """Base class of the streaming metrics; a subclass defines `_count` and `_value`.

    A compiled graph cannot raise, so the result is NaN from the first invalid example on. Called
    eagerly, invalid probabilities raise. Examples of weight 0 are neither counted nor checked, and
    no more are the positions that the Keras mask of the predictions leaves out.
    """

    default_name: str
    sums: tuple[str, ...] = ()  # names of its scalar sums

    def __init__(self, from_logits: bool = False, name: Any = None, dtype: Any = None) -> None:
        if dtype is None:
            dtype = keras.config.floatx()
        dtype = checks.full_precision(dtype)
        super().__init__(name=name or self.default_name, dtype=dtype)
        self.from_logits = bool(from_logits)
        self.invalid = self.add_variable((), "zeros", self.dtype, name="invalid")
        self._add_sums(*self.sums)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count a batch.

        Args:
            y_true: labels, in any form that `ibnn.metrics.reliability` takes.
            y_pred: predictions, likewise; logits with `from_logits=True`.
            sample_weight: (...), or a shape that broadcasts to that of the labels.

        Raises:
            ValueError: called eagerly, if predictions are not probabilities and should be.
        """
        predictions = ops.convert_to_tensor(y_pred)
        predictions = ops.cast(predictions, self.dtype)
        prepared = prepare(
            ops,
            predictions,
            ops.convert_to_tensor(y_true),
            self._weight(y_pred, sample_weight),
            self.from_logits,
            NAMES,
        )
        examples = prepared.examples
        is_counted = examples.weight != 0
        if not self.from_logits and is_eager(predictions):
            self._check_eagerly(predictions, is_counted & ~prepared.has_probabilities)
        is_valid = prepared.has_probabilities & prepared.has_class & prepared.has_weight
        self._count_valid(examples, is_counted, is_valid)

    def _check_eagerly(self, predictions: Tensor, is_bad: Tensor) -> None:
        """Raise if predictions that count are not probabilities."""
        values = ops.convert_to_numpy(predictions)
        # NaN has another cause, and stays NaN.
        has_nan = np.isnan(values).any(axis=-1)
        is_bad = ops.convert_to_numpy(is_bad) & ~has_nan.ravel()
        fault = _first_fault(values, is_bad)
        if fault is not None:
            raise ValueError(
                "`y_pred` must be probabilities (for logits, write "
                f"{type(self).__name__}(from_logits=True)), 0 or above, that sum to 1; "
                f"got {fault}."
            )

    def _count_valid(self, examples: Examples, is_counted: Tensor, is_valid: Tensor) -> None:
        """Count the valid examples, and how many others should have counted."""
        is_kept = is_counted & is_valid
        is_refused = is_counted & ~is_valid
        refused = ops.cast(is_refused, self.dtype)
        self.invalid.assign_add(ops.sum(refused))
        # Zero times NaN is NaN: what is not counted must hold numbers nonetheless.
        kept_rows = is_kept[:, None]
        kept_examples = Examples(
            probabilities=ops.where(kept_rows, examples.probabilities, 1.0),
            log_probabilities=ops.where(kept_rows, examples.log_probabilities, 1.0),
            targets=ops.cast(examples.targets, self.dtype),
            weight=ops.where(is_kept, examples.weight, 0.0),
        )
        self._count(kept_examples)

    def result(self) -> Tensor:
        """Return the metric over all batches so far; 0 before the first."""
        value = self._value()
        is_invalid = self.invalid > 0
        return ops.where(is_invalid, float("nan"), value)

    def _weight(self, y_pred: Any, sample_weight: Any) -> Tensor:
        """Return the weights, 0 for what the mask of the predictions leaves out."""
        if sample_weight is None:
            sample_weight = 1
        weight = ops.cast(sample_weight, self.dtype)
        mask = keras_internals.mask_of(y_pred)
        if mask is None or len(mask.shape) >= len(y_pred.shape):
            return weight
        positions = ops.shape(y_pred)[:-1]
        weight = spread(ops, weight, positions, "sample_weight")
        mask = spread(ops, mask, positions, "mask")
        return ops.where(mask, weight, 0.0)

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
    """Return arrays as examples, or raise; what has the weight 0 is left out unseen.

    Args:
        probabilities: (..., classes) that sum to 1; or (..., 1), those of class 1 of two.
        labels: (...) or (..., 1) integers, or (..., classes) one-hot.
        sample_weight: (...), or a shape that broadcasts to it; None is 1.
        from_logits: whether `probabilities` are logits.
        names: of the first three arguments, for errors.

    Returns:
        Examples in float64, or float32 if the probabilities are in that or in half precision.

    Raises:
        ValueError: if shapes do not go together, or values are not what they should be.
    """
    predictions = np.asarray(probabilities)
    is_double = predictions.dtype == "float64" or predictions.dtype.kind in "iub"
    dtype = "float64" if is_double else "float32"
    predictions = predictions.astype(dtype)
    labels = np.asarray(labels)
    if sample_weight is None:
        sample_weight = 1.0
    weight = np.asarray(sample_weight, dtype="float64")
    with np.errstate(invalid="ignore", divide="ignore"):  # of logits that are refused below
        prepared = prepare(np, predictions, labels, weight, from_logits, names)
    examples = prepared.examples
    counted = examples.weight != 0
    if not counted.any():
        raise ValueError(
            f"`{names[0]}` must hold at least one example whose `{names[2]}` is not 0; got the "
            f"shape {predictions.shape}."
        )
    _check_predictions(predictions, counted & ~prepared.has_probabilities, from_logits, names[0])
    fault = _first_fault(labels, counted & ~prepared.has_class)
    if fault is not None:
        last_class = examples.targets.shape[-1] - 1
        raise ValueError(
            f"`{names[1]}` must be whole numbers from 0 to {last_class}, or one-hot; got {fault}."
        )
    fault = _first_fault(examples.weight, counted & ~prepared.has_weight)
    if fault is not None:
        raise ValueError(f"`{names[2]}` must be finite and 0 or above; got {fault}.")
    return Examples(*(part[counted] for part in examples))


def _check_predictions(
    predictions: np.ndarray, is_bad: np.ndarray, from_logits: bool, name: str
) -> None:
    fault = _first_fault(predictions, is_bad)
    if fault is None:
        return
    if from_logits:
        raise ValueError(f"`{name}` must be logits, finite or -inf; got {fault}.")
    raise ValueError(
        f"`{name}` must be finite, 0 or above, and sum to 1 (of logits, give from_logits=True); "
        f"got {fault}."
    )


def _first_fault(values: np.ndarray, is_bad: np.ndarray) -> str | None:
    """Return the first bad example as text, or None if all are good."""
    if not is_bad.any():
        return None
    place = np.argmax(is_bad)
    by_example = values.reshape(len(is_bad), -1)
    return f"{by_example[place]} at example {place}"


def prepare(
    xp: ModuleType, predictions: Any, labels: Any, weight: Any, from_logits: bool, names: Names
) -> Prepared:
    """Return predictions of any form as flat examples, and which of them are valid.

    Args:
        xp: numpy or keras.ops, what the arrays are of.
        predictions: (..., classes), or (..., 1) for class 1 of two.
        labels: (...) or (..., 1) classes, or (..., classes) one-hot.
        weight: (...), or a shape that broadcasts to it.
        from_logits: whether predictions are logits.
        names: of the three, for errors.

    Returns:
        The examples, and whether each has probabilities, a class, and a weight.

    Raises:
        ValueError: if the shapes do not go together.
    """
    is_one_hot = _is_one_hot(tuple(predictions.shape), tuple(labels.shape), names)
    positions = xp.shape(predictions)[:-1]
    weight = spread(xp, weight, positions, names[2])
    weight = xp.reshape(weight, (-1,))
    if predictions.shape[-1] == 1:
        predictions = _with_class_zero(xp, predictions, from_logits)
    classes = predictions.shape[-1]
    predictions = xp.reshape(predictions, (-1, classes))
    probabilities, log_probabilities = _probabilities(xp, predictions, from_logits)
    sums = xp.sum(probabilities, axis=-1)
    sum_to_one = xp.abs(sums - 1) <= TOLERANCE
    are_positive = xp.all(probabilities >= 0, axis=-1)
    targets, has_class = _targets(xp, labels, classes, is_one_hot)
    return Prepared(
        Examples(
            probabilities,
            log_probabilities,
            targets,
            weight,
        ),
        has_probabilities=xp.logical_and(are_positive, sum_to_one),
        has_class=has_class,
        has_weight=xp.logical_and(weight >= 0, weight < float("inf")),
    )


def _with_class_zero(xp: ModuleType, predictions: Any, from_logits: bool) -> Any:
    """Return predictions of both classes by those of class 1."""
    if from_logits:
        of_zero = xp.zeros_like(predictions)
    else:
        # Means of ones can round to above one; the sum is checked elsewhere.
        of_zero = xp.maximum(1 - predictions, 0)
    return xp.concatenate([of_zero, predictions], axis=-1)


def _probabilities(xp: ModuleType, predictions: Any, from_logits: bool) -> tuple[Any, Any]:
    """Return probabilities and their logarithms; of 0, that of the smallest normal float."""
    if from_logits:
        log_softmax = ops.log_softmax if xp is ops else special.log_softmax
        log_probabilities = log_softmax(predictions, axis=-1)
        return xp.exp(log_probabilities), log_probabilities
    dtype = keras.backend.standardize_dtype(predictions.dtype)
    smallest = np.finfo(dtype).tiny
    bounded = xp.maximum(predictions, smallest)
    return predictions, xp.log(bounded)


def _targets(xp: ModuleType, labels: Any, classes: int, is_one_hot: bool) -> tuple[Any, Any]:
    """Return one-hot targets (examples, classes), and which labels are one of the classes."""
    if is_one_hot:
        labels = xp.reshape(labels, (-1, classes))
        is_target = xp.equal(labels, 1)
        others_are_zero = xp.equal(xp.count_nonzero(labels, axis=-1), 1)
    else:
        labels = xp.reshape(labels, (-1, 1))
        # NaN and fractions are equal to no class.
        is_target = xp.equal(labels, xp.arange(classes))
        others_are_zero = True
    has_one = xp.any(is_target, axis=-1)
    targets = xp.where(is_target, 1.0, 0.0)
    return targets, xp.logical_and(has_one, others_are_zero)


def _is_one_hot(predictions: tuple[Any, ...], labels: tuple[Any, ...], names: Names) -> bool:
    """Return whether labels are one-hot, by the shapes, in which None is a size not yet known."""
    if len(predictions) < 2 or not predictions[-1]:
        raise ValueError(
            f"`{names[0]}` must have the shape (..., classes), or (..., 1) for the probability of "
            f"class 1 of two; got {predictions}."
        )
    shape = predictions[:-1]
    classes = max(predictions[-1], 2)
    rank = len(shape)
    last_axes = labels[rank:]
    fits = len(labels) >= rank and last_axes in ((), (1,), (classes,))
    for label_size, size in zip(labels, shape, strict=False):
        is_known = label_size is not None and size is not None
        if is_known and label_size != size:
            fits = False
    if not fits:
        raise ValueError(
            f"`{names[1]}` must have the shape {shape}, {(*shape, 1)} or {(*shape, classes)}, to "
            f"go with `{names[0]}`; got {labels}, and {predictions} of `{names[0]}`."
        )
    return last_axes == (classes,)


def spread(xp: ModuleType, weight: Any, shape: tuple[Any, ...], name: str) -> Any:
    """Return weights of a shape; a weight for each leading index is that of all below it.

    Args:
        xp: numpy or keras.ops, what the weights are an array of.
        weight: (...), of the leading axes of `shape`, or of all of them and one of size 1 more.
        shape: that the weights shall have; sizes may be tensors.
        name: of the argument, for errors.

    Returns:
        The weights, of that shape.

    Raises:
        ValueError: if they do not broadcast to it.
    """
    original_shape = tuple(weight.shape)
    rank = len(shape)
    if len(original_shape) == rank + 1 and original_shape[-1] == 1:
        weight = xp.squeeze(weight, axis=-1)
    while len(weight.shape) < rank:
        weight = xp.expand_dims(weight, axis=-1)
    fits = len(weight.shape) == rank
    for size, wanted in zip(weight.shape, shape, strict=False):
        if isinstance(wanted, int) and size not in (1, None, wanted):
            fits = False
    if not fits:
        raise ValueError(
            f"`{name}` must have the shape {shape}, or one that can be broadcast to it along the "
            f"last axes; got {original_shape}."
        )
    return xp.broadcast_to(weight, shape)
