"""The losses that a model is compiled with, by private names of Keras as in `keras_internals`."""

from typing import Any, NamedTuple

import keras
from keras import ops

from tfp_ibnn._core.keras_internals import CompileLoss, backend, get_loss

output_spec = backend.compute_output_spec  # of a function of symbolic tensors


class OutputLoss(NamedTuple):
    """A loss, with its weight, and the targets and outputs of a model that it compares."""

    place: str | int | None  # in a dict or list of outputs; None of a single one
    loss: keras.losses.Loss
    weight: float
    y_true: Any
    y_pred: Any


class _Recorder(keras.losses.Loss):
    """Notes what Keras gives to a loss."""

    def __init__(self, loss: Any, calls: list[tuple[Any, Any, Any]]) -> None:
        super().__init__(name=loss if isinstance(loss, str) else getattr(loss, "name", "loss"))
        self._given, self._calls = loss, calls

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self._calls.append((get_loss(self._given, y_true, y_pred), y_true, y_pred))
        return ops.zeros(())


def output_losses(model: keras.Model, y_true: Any, y_pred: Any) -> list[OutputLoss]:
    """Return the losses that a model is compiled with, each with its output, as Keras pairs them.

    Targets and outputs may be symbolic. No loss is computed.
    """
    own = model._compile_loss
    if own is None:
        return []
    calls: list[tuple[Any, Any, Any]] = []
    recorders = keras.tree.map_structure(
        lambda loss: None if loss is None else _Recorder(loss, calls), own._user_loss
    )
    paired = CompileLoss(recorders, own._user_loss_weights, output_names=own.output_names)
    paired(y_true, y_pred)
    found = []
    for (path, _, weight, _), call in zip(paired._flat_losses, calls, strict=True):
        place = path[-1] if path else None
        found.append(
            OutputLoss(place, call[0], 1.0 if weight is None else float(weight), *call[1:])
        )
    return found
