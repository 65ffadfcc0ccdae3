"""What is averaged must be a built network; what goes in, and what comes out, numbers."""

import warnings
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn._core.text import refuse_single_strings
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.conversion.wrappers import unscaled
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.likelihoods import Likelihood


def check_model(model: Any, dropout: bool) -> keras.Model:
    """Check what a user wants to average.

    Args:
        model: what the user gives to `MonteCarlo`.
        dropout: whether dropout stays on.

    Returns:
        The network that is averaged: the model, or that of a posterior over weights.

    Raises:
        ValueError: If it cannot be averaged.
    """
    network = model.network if isinstance(model, WeightPosterior) else model
    if not isinstance(network, keras.Model):
        raise ValueError(f"`model` must be a Keras model; got {model!r}.")
    if not network.built or not all(layer.built for layer in stochastic_layers(network)):
        raise ValueError(f"Model {network.name!r} is not built: call it on data, or build it.")
    for layer in keras_internals.nested_layers(network):
        if getattr(layer, "stateful", False):
            raise ValueError(
                f"Model {network.name!r} has a layer with `stateful=True`: leave it out."
            )
    if dropout and functional_graph(unscaled(network)) is None:
        raise ValueError(
            "`dropout` is for Functional and Sequential models, not for "
            f"{network.name!r}, a {type(network).__name__}: build it as keras.Model(inputs, "
            "outputs), or use ibnn.to_stochastic."
        )
    return network


def check_standard_error(samples: int, sampling: str) -> None:
    """Check that the standard error of a mean can be estimated.

    Args:
        samples: number of draws.
        sampling: how they are drawn.

    Raises:
        ValueError: If they are not several and independent.
    """
    if sampling != "iid" or samples < 2:
        raise ValueError(
            f"`standard_error` needs 2 or more independent `samples`; got {samples} with "
            f"sampling={sampling!r}."
        )


def check_interval(likelihood: Likelihood, interval: float) -> None:
    """Warn that an interval of draws holds few observations, if their noise is not predicted.

    Args:
        likelihood: what the outputs mean.
        interval: its probability.

    Raises:
        ValueError: If an output has no such interval.
    """
    for part in likelihood.parts.values():
        part.check_interval(interval)
    points = [name for name, part in likelihood.parts.items() if part.free_scale]
    if points:
        which = "the output" if points == [""] else f"the outputs {points}"
        warnings.warn(
            f"`interval` holds {interval:.3g} of the draws of {which}, and far fewer of new "
            "observations, whose noise the loss leaves open. End the network in an "
            "ibnn.layers.GaussianHead with the loss ibnn.layers.GaussianNLL, or use "
            f"ibnn.Conformal(model, coverage={interval:.3g}).",
            stacklevel=3,
        )


def check_input(x: Any, y: Any = None) -> None:
    """Check data before a prediction; datasets are left to what reads them.

    Args:
        x: inputs, in any structure. NaN in them is refused, which ReLU may turn into a number.
        y: labels or targets, in any structure.

    Raises:
        ValueError: If there are no examples, or arrays that are not real numbers for each.
    """
    inputs = keras.tree.flatten(x)
    if all(part is None for part in inputs):
        raise ValueError("`x` is missing: give arrays, or a dataset.")
    refuse_single_strings(inputs, "x")
    for part in inputs:
        array = _as_array(part)
        if array is not None:
            _check_form("x", array)
            _check_finite(array)
    for part in keras.tree.flatten(y):
        array = _as_array(part)
        if array is not None:
            _check_form("y", array)
    if all(tuple(getattr(part, "shape", ()))[:1] == (0,) for part in inputs):
        raise ValueError("`x` holds no examples.")


def _as_array(part: Any) -> np.ndarray | None:
    """Return an array or a tensor as an array, and None for anything else."""
    if ops.is_tensor(part):
        part = ops.convert_to_numpy(part)
    return part if isinstance(part, np.ndarray) else None


def _check_form(name: str, array: np.ndarray) -> None:
    if array.dtype.kind == "c":
        raise ValueError(f"`{name}` holds complex numbers; give real ones.")
    if not array.ndim:
        raise ValueError(f"`{name}` is the single number {array!r}; give one for each example.")


def _check_finite(array: np.ndarray) -> None:
    """Check inputs as the model will see them, in Keras's precision."""
    if array.dtype.kind != "f":
        return
    floatx = keras.config.floatx()
    with np.errstate(over="ignore"):
        is_bad = _has_nonfinite(array.astype(floatx, copy=False))
    if is_bad.any():
        raise ValueError(
            f"`x` holds NaN or infinity, or is beyond {floatx}, in {is_bad.sum()} of {len(array)} "
            f"examples; the first is number {is_bad.argmax()}."
        )


def checked_scores(name: str, scores: Any) -> Any:
    """Return the scores of an evaluation.

    Args:
        name: of the model.
        scores: numbers in any structure.

    Returns:
        The scores.

    Raises:
        ValueError: If one is not finite.
    """
    if not np.all(np.isfinite(keras.tree.flatten(scores))):
        raise ValueError(
            f"The evaluation is not finite: {scores}. The predictions of model {name!r} are NaN or "
            "not probabilities that sum to 1 (logits? then give from_logits=True), or there are "
            "labels outside its classes."
        )
    return scores


def checked_prediction(name: str, prediction: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return a prediction as arrays.

    Args:
        name: of the model.
        prediction: arrays (N, ...) by key, or such a dict for each of several outputs.

    Returns:
        The same keys, with NumPy arrays.

    Raises:
        ValueError: If a number is not finite.
    """
    is_of_several_outputs = isinstance(next(iter(prediction.values())), dict)
    if is_of_several_outputs:
        return {key: checked_prediction(name, part) for key, part in prediction.items()}
    arrays = {key: np.asarray(value) for key, value in prediction.items()}
    is_bad = np.any([_has_nonfinite(array) for array in arrays.values()], axis=0)
    if is_bad.any():
        raise ValueError(
            f"The prediction of {is_bad.sum()} of {len(is_bad)} examples (the first is number "
            f"{is_bad.argmax()}) is not finite: model {name!r} or its input holds NaN or infinity, "
            "or has a standard deviation below 0, or its outputs are not probabilities that sum "
            "to 1 (logits? then give from_logits=True)."
        )
    return arrays


def _has_nonfinite(values: np.ndarray) -> np.ndarray:
    """Return for each example whether it holds a number that is NaN or infinite."""
    axes = tuple(range(1, values.ndim))
    return ~np.isfinite(values).all(axis=axes)
