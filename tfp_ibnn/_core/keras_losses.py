"""The losses that a model is compiled with, by private names of Keras as in `keras_internals`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras import ops

from tfp_ibnn._core.keras_internals import CompileLoss, backend, get_loss


def output_spec(function: Callable[..., Any], *tensors: Any) -> Any:
    """Return what a function gives for symbolic tensors: nothing is computed.

    Args:
        function: of tensors.
        *tensors: symbolic ones.
    """
    return backend.compute_output_spec(function, *tensors)


class OutputLoss(NamedTuple):
    """A loss, with its weight, and the targets and outputs of a model that it compares."""

    place: str | int | None  # in a dict or list of outputs; None of a single one
    loss: keras.losses.Loss
    weight: float
    y_true: Any
    y_pred: Any


class _Call(NamedTuple):
    """What Keras gave to one loss."""

    loss: keras.losses.Loss
    y_true: Any
    y_pred: Any


class _Recorder(keras.losses.Loss):
    """Takes the place of a loss, and notes what Keras gives to it.

    Args:
        loss: the loss, or its name.
        calls: where to note each call.
    """

    def __init__(self, loss: Any, calls: list[_Call]) -> None:
        name = loss if isinstance(loss, str) else getattr(loss, "name", "loss")
        super().__init__(name=name)
        self._loss = loss
        self._calls = calls

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        # By name, Keras chooses a loss by the shapes of targets and outputs.
        loss = get_loss(self._loss, y_true, y_pred)
        self._calls.append(_Call(loss, y_true, y_pred))
        return ops.zeros(())


def output_losses(model: keras.Model, y_true: Any, y_pred: Any) -> list[OutputLoss]:
    """Return the losses that a model is compiled with, each with its output, as Keras pairs them.

    Only Keras knows how it pairs them, in a private class: it runs here on losses that record. No
    loss is computed.

    Args:
        model: a model.
        y_true: its targets, symbolic perhaps.
        y_pred: its outputs, symbolic perhaps.

    Returns:
        One for each output with a loss; [] if the model is not compiled with any.
    """
    compiled = model._compile_loss
    if compiled is None:
        return []
    calls: list[_Call] = []

    def recorder(loss: Any) -> _Recorder | None:
        return None if loss is None else _Recorder(loss, calls)

    recorders = keras.tree.map_structure(recorder, compiled._user_loss)
    paired = CompileLoss(recorders, compiled._user_loss_weights, output_names=compiled.output_names)
    paired(y_true, y_pred)
    losses = []
    for (path, _, weight, _), call in zip(paired._flat_losses, calls, strict=True):
        place = path[-1] if path else None
        factor = 1.0 if weight is None else float(weight)
        losses.append(OutputLoss(place, call.loss, factor, call.y_true, call.y_pred))
    return losses
