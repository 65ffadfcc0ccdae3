"""Find out what a network's output means."""

from typing import Any

import keras

from tfp_ibnn._core import checks
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.conversion.outputs import activation_of
from tfp_ibnn.layers.heads import GaussianNLL
from tfp_ibnn.prediction.predictive import Categorical, Gaussian, Labels, Point, Predictive
from tfp_ibnn.prediction.wrapping import ScaledModel, unscaled

__all__ = ["HEADS", "predictive_of"]

HEADS = ("softmax", "sigmoid", "gaussian", "point")

_REMEDY = (
    'Write ibnn.MonteCarlo(model, head="softmax", from_logits=True) for logits of classes, '
    "from_logits=False for their probabilities; other heads are "
    '"sigmoid" for yes or no, "point" for numbers, "gaussian" for numbers and their standard '
    "deviations."
)

losses = keras.losses

_HEAD_OF_LOSS = {
    "softmax": (
        losses.CategoricalCrossentropy,
        losses.CategoricalFocalCrossentropy,
        losses.SparseCategoricalCrossentropy,
    ),
    "sigmoid": (losses.BinaryCrossentropy, losses.BinaryFocalCrossentropy),
    "gaussian": (GaussianNLL,),
    "point": (
        losses.Huber,
        losses.LogCosh,
        losses.MeanAbsoluteError,
        losses.MeanAbsolutePercentageError,
        losses.MeanSquaredError,
        losses.MeanSquaredLogarithmicError,
    ),
}


def predictive_of(
    model: keras.Model,
    head: str | None = None,
    from_logits: bool | None = None,
    remedy: str = _REMEDY,
) -> Predictive:
    """Return what a model's output predicts, from what is said, its last layer and its loss.

    Args:
        model: a Keras model with one output.
        head: "softmax", "sigmoid", "gaussian" or "point", where that is known.
        from_logits: whether the output is logits, where that is known.
        remedy: what to write where nothing tells, for the error.
    """
    if head is not None:
        checks.one_of("head", head, HEADS)
    if isinstance(model, ScaledModel) and model.returns_logits is not None:
        if from_logits not in (None, model.returns_logits):
            raise ValueError(
                f"`from_logits` is {from_logits}, but {model.name!r} returns "
                f"{'logits' if model.returns_logits else 'probabilities'}: leave it out."
            )
        from_logits = model.returns_logits
    said, activation = head, activation_of(model)
    loss_head, loss_logits = _head_of_loss(model)
    if activation == "log_softmax":
        # The softmax of its output is the same as that of its input.
        loss_head, loss_logits = "softmax", True
    if head is None:
        head = activation if activation in HEADS else loss_head
    if head is None and from_logits is not None:
        head = "sigmoid" if _width(model) == 1 else "softmax"
    if head is None:
        loss = _loss_of(model)
        cause = "it is not compiled" if loss is None else f"its loss is {_name_of(loss)}"
        raise ValueError(
            f"It is unknown what the output of model {model.name!r} means: its last layer "
            f"({activation or 'unknown'}) has no softmax or sigmoid, and {cause}. {remedy}"
        )
    if from_logits is not None and said is None and head in ("gaussian", "point"):
        raise ValueError(
            f"`from_logits` is {from_logits}, but model {model.name!r} ends like a regression, or "
            "is compiled with the loss of one. Say `head` too: 'softmax' or 'sigmoid'."
        )
    width = _width(model)
    if head == "gaussian" and width is not None and width % 2:
        raise ValueError(
            "`head` is 'gaussian', which has as many standard deviations as means; the output of "
            f"model {model.name!r} has {width} entries."
        )
    if head in ("gaussian", "point"):
        return Gaussian() if head == "gaussian" else Point()
    if activation in ("softmax", "sigmoid"):
        if from_logits:
            raise ValueError(
                f"`from_logits` is True, but the last layer of model {model.name!r} ends in a "
                f"{activation}: its output is probabilities."
            )
        from_logits = False
    elif from_logits is None:
        from_logits = loss_logits
        if not from_logits and activation == "linear":
            raise ValueError(
                f"The last layer of model {model.name!r} is linear, but nothing says that its "
                "output is logits. Say from_logits=True, or compile the model with a loss that has "
                "from_logits=True."
            )
    return Categorical(from_logits) if head == "softmax" else Labels(from_logits)


def _width(model: keras.Model) -> int | None:
    """Return the size of the last axis of a model's output, if it is known."""
    graph = functional_graph(unscaled(model))
    return None if graph is None else graph.outputs[0].shape[-1]


def _head_of_loss(model: keras.Model) -> tuple[str | None, bool | None]:
    """Return the head that goes with the loss a model is compiled with, and its `from_logits`."""
    loss = _loss_of(model)
    if loss is None:
        return None, None
    if isinstance(loss, str):
        loss = losses.get(loss)
    for head, classes in _HEAD_OF_LOSS.items():
        for kind in classes:
            if isinstance(loss, kind) or getattr(kind(), "fn", None) is loss:
                return head, getattr(loss, "from_logits", False)
    return None, None


def _loss_of(model: keras.Model) -> Any:
    """Return the loss that a model with one output is compiled with, or None."""
    loss = getattr(model, "loss", None) if model.compiled else None
    if isinstance(loss, (list, tuple)) and len(loss) == 1:
        return loss[0]
    if isinstance(loss, dict) and len(loss) == 1:
        (loss,) = loss.values()
    return loss


def _name_of(loss: Any) -> str:
    """Return the name of a loss as it stands in the code of the user."""
    if isinstance(loss, str):
        return repr(loss)
    return getattr(loss, "__name__", type(loss).__name__)
