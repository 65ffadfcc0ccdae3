"""What is averaged must be a built network; what goes in, and what comes out, numbers."""

from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.conversion.wrappers import unscaled
from tfp_ibnn.layers import stochastic_layers

_NOT_PROBABILITIES = "not probabilities that sum to 1 (logits? then give from_logits=True)"


def check_model(model: Any, dropout: bool) -> keras.Model:
    """Return the network that is averaged, or raise for a model that cannot be.

    Args:
        model: what the user gives to `MonteCarlo`.
        dropout: whether dropout stays on.
    """
    network = model.network if isinstance(model, WeightPosterior) else model
    if not isinstance(network, keras.Model):
        raise ValueError(f"`model` must be a Keras model; got {model!r}.")
    if not network.built or not all(layer.built for layer in stochastic_layers(network)):
        raise ValueError(f"Model {network.name!r} is not built: call it on data, or build it.")
    if any(getattr(x, "stateful", False) for x in keras_internals.nested_layers(network)):
        raise ValueError(f"Model {network.name!r} has a layer with `stateful=True`: leave it out.")
    if dropout and functional_graph(unscaled(network)) is None:
        raise ValueError(
            "`dropout` is for Functional and Sequential models, not for "
            f"{network.name!r}, a {type(network).__name__}."
        )
    return network


def check_input(x: Any, y: Any = None) -> None:
    """Raise for NaN, which ReLU may turn into a number, and for no examples."""
    parts = keras.tree.flatten(x)
    if all(part is None for part in parts):
        raise ValueError("`x` is missing: give arrays, or a dataset.")
    if any(isinstance(part, (str, bytes)) for part in parts):
        raise ValueError("`x` holds single strings; give an array of them: np.array(x).")
    floatx = keras.config.floatx()
    for name, part in [("x", part) for part in parts] + [("y", y) for y in keras.tree.flatten(y)]:
        part = ops.convert_to_numpy(part) if ops.is_tensor(part) else part
        if not isinstance(part, np.ndarray):
            continue
        if part.dtype.kind == "c":
            raise ValueError(f"`{name}` holds complex numbers; give real ones.")
        if not part.ndim:
            raise ValueError(f"`{name}` is the single number {part!r}; give one for each example.")
        if name == "x" and part.dtype.kind == "f":
            with np.errstate(over="ignore"):
                bad = _not_finite(part.astype(floatx, copy=False))
            if bad.any():
                where = f"{bad.sum()} of {len(part)} examples; the first is number {bad.argmax()}"
                raise ValueError(f"`x` holds NaN or infinity, or is beyond {floatx}, in {where}.")
    if all(tuple(getattr(part, "shape", ()))[:1] == (0,) for part in parts):
        raise ValueError("`x` holds no examples.")


def checked_scores(name: str, scores: Any) -> Any:
    """Return the scores of the model of a name, or raise if they are not finite."""
    if not np.all(np.isfinite(keras.tree.flatten(scores))):
        raise ValueError(
            f"The evaluation is not finite: {scores}. The predictions of model {name!r} are NaN or "
            f"{_NOT_PROBABILITIES}, or there are labels outside its classes."
        )
    return scores


def checked_prediction(name: str, prediction: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the prediction of the model of a name as arrays, or raise if it is not finite."""
    if isinstance(next(iter(prediction.values())), dict):  # several outputs
        return {key: checked_prediction(name, part) for key, part in prediction.items()}
    prediction = {key: np.asarray(value) for key, value in prediction.items()}
    bad = np.any([_not_finite(value) for value in prediction.values()], axis=0)
    if bad.any():
        raise ValueError(
            f"The prediction of {bad.sum()} of {len(bad)} examples (the first is number "
            f"{bad.argmax()}) is not finite: model {name!r} or its input holds NaN or infinity, or "
            f"has a standard deviation below 0, or its outputs are {_NOT_PROBABILITIES}."
        )
    return prediction


def _not_finite(values: np.ndarray) -> np.ndarray:
    """Return which examples hold a number that is NaN or infinite."""
    return ~np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
