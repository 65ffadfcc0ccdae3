"""Check what `MonteCarlo` is given, and what it returns."""

from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.prediction.head import unscaled


def check_input(x: Any, y: Any = None) -> bool:
    """Raise for what is not a number, or not finite: ReLU may turn NaN into a number again.

    Return whether there are examples: False for empty arrays.
    """
    parts = keras.tree.flatten(x)
    if all(part is None for part in parts):
        raise ValueError("`x` is missing: give arrays, or a dataset.")
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
                raise ValueError(
                    f"`x` holds NaN or infinity, or numbers beyond {floatx}, in {bad.sum()} of "
                    f"{len(part)} examples; the first is number {bad.argmax()}."
                )
    return any(tuple(getattr(part, "shape", ()))[:1] != (0,) for part in parts)


def check_model(model: Any, dropout: bool) -> keras.Model:
    """Return the network that is averaged, or raise for a model that cannot be."""
    network = model.network if isinstance(model, WeightPosterior) else model
    if not isinstance(network, keras.Model):
        raise ValueError(f"`model` must be a Keras model; got {model!r}.")
    if not network.built or not all(layer.built for layer in stochastic_layers(network)):
        raise ValueError(f"Model {network.name!r} is not built: call it on data, or build it.")
    graph = functional_graph(unscaled(network))
    if graph is not None and len(graph.outputs) != 1:
        raise ValueError(
            f"Model {network.name!r} has {len(graph.outputs)} outputs; MonteCarlo needs one. Make "
            "a model of each with keras.Model(model.inputs, model.outputs[i])."
        )
    if dropout and graph is None:
        raise ValueError(
            f"Dropout can be left on in Functional and Sequential models; {network.name!r} is a "
            f"{type(network).__name__} with a `call` of its own."
        )
    return network


def check_options(
    samples: int, sampling: str, interval: float | None, standard_error: bool
) -> None:
    """Raise for options that contradict each other."""
    if interval is not None and not 0 < checks.finite("interval", interval) < 1:
        raise ValueError(f"`interval` must lie between 0 and 1, such as 0.9; got {interval!r}.")
    if standard_error and sampling == "qmc":
        raise ValueError(
            "Quasi-random draws have no `standard_error`: use sampling='antithetic' or some seeds."
        )
    paired = sampling == "antithetic"
    if standard_error and (samples < (4 if paired else 2) or (paired and samples % 2)):
        needed = "4 `samples` at least, and an even number" if paired else "2 `samples` at least"
        raise ValueError(f"A `standard_error` needs {needed}; got {samples}.")


def checked_scores(name: str, scores: Any) -> Any:
    """Return the scores of the model of a name, or raise if they are not finite."""
    if not np.all(np.isfinite(keras.tree.flatten(scores))):
        raise ValueError(
            f"The evaluation is not finite: {scores}. The predictions of model {name!r} are NaN or "
            "not probabilities that sum to 1 (are they logits? then say from_logits=True), or "
            "there are labels outside its classes."
        )
    return scores


def checked_prediction(name: str, prediction: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the prediction of the model of a name as arrays, or raise if it is not finite."""
    prediction = {key: np.asarray(value) for key, value in prediction.items()}
    bad = np.any([_not_finite(value) for value in prediction.values()], axis=0)
    if bad.any():
        raise ValueError(
            f"The prediction of {bad.sum()} of {len(bad)} examples (the first is number "
            f"{bad.argmax()}) is not finite: model {name!r} or its input holds NaN or infinity, or "
            "its output is not probabilities that sum to 1 (are they logits? then say "
            "from_logits=True), or it has a standard deviation below 0."
        )
    return prediction


def _not_finite(values: np.ndarray) -> np.ndarray:
    """Return which examples hold a number that is NaN or infinite."""
    return ~np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
