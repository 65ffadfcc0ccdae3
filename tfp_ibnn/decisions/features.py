"""The network of features that scores of `OODDetector` compare."""

import warnings
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn.conversion.convert import without_uncertainty
from tfp_ibnn.conversion.graph import extended, functional_graph
from tfp_ibnn.conversion.wrappers import PredictionWrapper, innermost
from tfp_ibnn.decisions.feature_scores import FeatureScore
from tfp_ibnn.layers.base import CONVOLUTIONS
from tfp_ibnn.weights.features import at_each_step, logit_layer
from tfp_ibnn.weights.laplace.patches import is_pointwise


def feature_network(
    model: Any, score: FeatureScore, name: str | None, at_positions: bool = False
) -> tuple[keras.Model, keras.layers.Layer]:
    """Return the network of features, and the layer whose inputs they are.

    Both are without uncertainty, at the posterior mean as it is now.

    Args:
        model: a `MonteCarlo` or another wrapper, a model, or a posterior over weights.
        score: what the features are for.
        name: of the layer; None takes the last one with weights.
        at_positions: whether to keep the positions, False by default.

    Returns:
        A model that turns inputs into features (N, d), averaged over positions, or, if these are
        kept, (N, ..., d + 1), the last number 0 for padding and else 1; and the layer.

    Raises:
        ValueError: if the model has no such layer, or no Dense layer at the end where the score
            needs logits.
    """
    network = without_uncertainty(model)
    graph = functional_graph(network)
    if graph is None:
        raise ValueError(
            f"score={score.name!r} needs features of a Functional or Sequential model; "
            f"{network.name!r} has a `call` of its own. Take score='max_probability' or "
            "'entropy', or 'epistemic' for a posterior."
        )
    layers = {layer.name: layer for layer in graph.layers if layer.weights}
    if not layers:
        raise ValueError(
            f"score={score.name!r} needs features, and {network.name!r} has no weights."
        )
    if name not in (None, *layers):
        raise ValueError(
            f"`layer` must be a layer of the graph of {network.name!r} itself, one of "
            f"{[*layers]}; got {name!r}{_place_inside(name, layers)}."
        )
    if score.needs_logits and name is not None:
        raise ValueError(f"score={score.name!r} reads the last layer, `layer`=None; got {name!r}.")
    last_name = [*layers][-1]
    layer = layers[last_name if name is None else name]
    if score.needs_logits:
        _check_logits(network, layer, score.name)
    features = ops.cast(_input_of(layer), "float32")
    mask = keras_internals.mask_of(_input_of(layer))
    if at_positions and len(features.shape) > 2:
        features = ops.concatenate([features, _validity(features, mask)], axis=-1)
    elif len(features.shape) > 2:
        features = _mean_of_positions(features, mask)
    return extended(graph, features, f"{graph.name}_features"), layer


def _input_of(layer: keras.layers.Layer) -> Any:
    """Return the tensor that a layer is called on; a mask may come beside it."""
    return keras.tree.flatten(layer.input)[0]


def _validity(features: Any, mask: Any) -> Any:
    """Return 1 for each position (N, ..., 1) of features, 0 for those that are padding."""
    ones = ops.ones_like(features[..., :1])
    if mask is None:
        return ones
    missing_axes = tuple(range(len(mask.shape), len(features.shape)))
    mask = ops.expand_dims(mask, missing_axes)
    return ones * ops.cast(mask, features.dtype)


def check_classes(y: Any, score: str, model: Any, of_positions: bool) -> None:
    """Raise for classes of positions, and, of a regression, for targets or missing classes.

    Args:
        y: what `fit` was given, or None.
        score: name of the score.
        model: the `MonteCarlo` whose features are scored.
        of_positions: whether `y` holds several labels for each example.
    """
    if of_positions:
        raise ValueError(
            f"score={score!r} needs one class per example; `y` has the shape {np.shape(y)}, one at "
            "each position: leave it out, or take score='entropy'."
        )
    if model.likelihood.is_classifier:
        return
    name = innermost(model).name
    if y is None:
        if score == "relative_mahalanobis":
            raise ValueError(
                f"score='relative_mahalanobis' needs classes `y`, and model {name!r} predicts "
                "numbers: take score='mahalanobis' or 'knn', which need none."
            )
        return
    targets = np.asarray(y)
    is_vector = np.size(targets) == len(targets)
    if not is_vector or np.any(targets % 1):
        raise ValueError(
            f"score={score!r} takes classes for `y`, and model {name!r} predicts numbers: "
            f"leave `y` out, fit(x). Got targets of the shape {targets.shape}."
        )


def warn_of_modes(model: Any, score: str) -> None:
    """Warn if features are those of one network among several.

    Args:
        model: as for `feature_network`.
        score: name of the score.
    """
    modes = getattr(_unwrapped(model), "modes", 1)
    if modes > 1:
        warnings.warn(
            f"score={score!r} has the features of the first of {modes} networks only. For the "
            f"mean over all write np.mean([ibnn.OODDetector(model, {score!r}).fit(x, y).score(new) "
            "for model in models], axis=0).",
            stacklevel=3,
        )


def _unwrapped(model: Any) -> Any:
    while isinstance(model, PredictionWrapper):
        model = model.inner
    return model


def _place_inside(name: str, layers: dict[str, keras.layers.Layer]) -> str:
    """Return as text in which layer there is one of that name, or nothing."""
    for owner in layers.values():
        for layer in keras_internals.nested_layers(owner):
            if layer is not owner and layer.name == name:
                return f", which is inside of {owner.name!r}"
    return ""


def _check_logits(network: keras.Model, layer: keras.layers.Layer, score: str) -> None:
    """Raise unless a network ends in a Dense layer of its own."""
    if isinstance(layer, keras.Model):
        raise ValueError(
            f"score={score!r} needs a Dense layer at the end of {network.name!r} itself; the last "
            f"one is inside of the model {layer.name!r}. Take score='mahalanobis' or 'knn' for "
            "its features, or 'entropy', which needs none."
        )
    if not isinstance(layer, keras.layers.Dense) and not _is_dense_at_positions(network, layer):
        raise ValueError(
            f"score={score!r} needs a Dense layer at the end; {layer.name!r} is a "
            f"{type(layer).__name__}. Take score='mahalanobis' or 'knn' for its features, or "
            "'entropy', which needs none."
        )
    if logit_layer(network) is not layer:
        raise ValueError(f"score={score!r} needs a Dense layer at the end, in no model inside.")


def _is_dense_at_positions(network: keras.Model, layer: keras.layers.Layer) -> bool:
    """Whether a layer is a Dense one for each position of an output, by another name."""
    if len(network.outputs[0].shape) < 3:
        return False
    if isinstance(layer, CONVOLUTIONS):
        return is_pointwise(layer)
    return isinstance(at_each_step(layer), keras.layers.Dense)


def _mean_of_positions(features: Any, mask: Any) -> Any:
    """Return the mean (N, d) of features (N, ..., d) over all positions that are not padding."""
    rank = len(features.shape)
    axes = tuple(range(1, rank - 1))
    if mask is None:
        return ops.mean(features, axis=axes)
    weight = _validity(features, mask)
    total = ops.sum(weight * features, axis=axes)
    count = ops.sum(weight, axis=axes)
    return total / ops.maximum(count, 1)
