"""The features that detectors of unusual inputs read, and the network that gives them."""

import warnings
from typing import Any

import keras
from keras import ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.protocols import WeightPosterior
from tfp_ibnn.conversion import to_deterministic
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.prediction.head import PredictionWrapper
from tfp_ibnn.weights.features import logit_layer

OF_LOGITS = ("energy", "vim")
"""Scores that read the last layer."""


def unwrapped(model: Any) -> Any:
    """Return what is inside of all wrappers: a network, or a posterior over weights."""
    while isinstance(model, PredictionWrapper):
        model = model.inner
    return model


def warn_of_modes(model: Any, score: str) -> None:
    """Warn if features are those of one network among several."""
    if (modes := getattr(model, "modes", 1)) > 1:
        warnings.warn(
            f"score={score!r} has the features of the first of {modes} networks only. For the "
            f"mean over all write np.mean([ibnn.OODDetector(model, {score!r}).fit(x, y).score(new) "
            "for model in models], axis=0).",
            stacklevel=3,
        )


def _mean_of_positions(features: Any, mask: Any) -> Any:
    """Return the mean (N, d) of features (N, ..., d) over all positions that are no padding."""
    axes = tuple(range(1, len(features.shape) - 1))
    if mask is None:
        return ops.mean(features, axis=axes)
    missing = tuple(range(len(mask.shape), len(features.shape)))
    weight = ops.cast(ops.expand_dims(mask, missing), features.dtype)
    weight = weight * ops.ones_like(features[..., :1])
    return ops.sum(weight * features, axis=axes) / ops.maximum(ops.sum(weight, axis=axes), 1)


def feature_network(
    model: Any, score: str, name: str | None
) -> tuple[keras.Model, keras.layers.Layer]:
    """Return the network of features (N, d), and the layer behind it, both without uncertainty."""
    model = unwrapped(model)
    if isinstance(model, WeightPosterior):
        model = model.mean_network()
    model = to_deterministic(model) if stochastic_layers(model) else model
    graph = functional_graph(model)
    if graph is None:
        raise ValueError(
            f"score={score!r} needs features of a Functional or Sequential model; {model.name!r} "
            "has a `call` of its own. Take score='max_probability' or 'entropy', or 'epistemic' "
            "for a posterior."
        )
    layers = {x.name: x for x in graph.layers if x.weights}
    if not layers:
        raise ValueError(f"score={score!r} needs features, and {model.name!r} has no weights.")
    if name not in (None, *layers):
        owner = next((x for x in layers.values() if name in _names_inside(x)), None)
        inside = "" if owner is None else f", which is inside of {owner.name!r}"
        raise ValueError(
            f"`layer` must be a layer of the graph of {model.name!r} itself, one of {[*layers]}; "
            f"got {name!r}{inside}."
        )
    chosen = layers[name or [*layers][-1]]
    others = "Take score='mahalanobis' or 'knn' for its features, or 'entropy', which needs none."
    if score in OF_LOGITS and name is not None:
        raise ValueError(f"score={score!r} reads the last layer, `layer`=None; got {name!r}.")
    if score in OF_LOGITS and isinstance(chosen, keras.Model):
        raise ValueError(
            f"score={score!r} needs a Dense layer at the end of {model.name!r} itself; the last "
            f"one is inside of the model {chosen.name!r}. {others}"
        )
    if score in OF_LOGITS and not isinstance(chosen, keras.layers.Dense):
        kind = type(chosen).__name__
        raise ValueError(
            f"score={score!r} needs a Dense layer at the end; {chosen.name!r} is a {kind}. {others}"
        )
    if score in OF_LOGITS and logit_layer(model) is not chosen:
        raise ValueError(f"score={score!r} needs a Dense layer at the end, in no model inside.")
    features = ops.cast(chosen.input, "float32")
    if len(features.shape) > 2:
        features = _mean_of_positions(features, keras_internals.mask_of(chosen.input))
    return keras.Model(graph.inputs, features), chosen


def _names_inside(layer: keras.layers.Layer) -> list[str]:
    """Return the names of the layers inside of one."""
    return [x.name for x in keras_internals.nested_layers(layer) if x is not layer]
