"""The activation that a model ends in."""

from typing import Any

import keras

from tfp_ibnn._core import keras_internals
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.layers import StochasticLayer
from tfp_ibnn.layers.heads import GaussianHead

__all__ = ["activation_of"]

# Layers that leave the meaning of their input as it is.
_TRANSPARENT = (
    keras.layers.Dropout,
    keras.layers.Flatten,
    keras.layers.Identity,
    keras.layers.Permute,
    keras.layers.Reshape,
)


def activation_of(model: keras.Model) -> str | None:
    """Return the name of the activation behind a model's one output, or None if it is unknown.

    It is "gaussian" for a `GaussianHead`. A cast to float32 by a linear `Activation`, as it ends
    half-precision models, is looked through, as reshaping is.
    """
    graph = functional_graph(model)
    if graph is None or len(graph.outputs) != 1:
        return None
    layer, node = keras_internals.origin(graph.outputs[0])
    while _is_transparent(layer):
        layer, node = keras_internals.origin(node.input_tensors[0])
    return activation_of(layer) if isinstance(layer, keras.Model) else _activation(layer)


def _is_transparent(layer: Any) -> bool:
    if isinstance(layer, keras.layers.Activation):
        return layer.activation is keras.activations.linear
    return isinstance(layer, _TRANSPARENT)


def _activation(layer: Any) -> str | None:
    if isinstance(layer, (StochasticLayer, keras.layers.TimeDistributed)):
        return _activation(layer.layer)
    if isinstance(layer, GaussianHead):
        return "gaussian"
    kind = type(layer).__name__  # the operations of keras.ops have no public classes
    if kind == "Softmax":
        return "softmax" if layer.axis == -1 else "softmax over another axis"
    if kind == "Sigmoid":
        return "sigmoid"
    return getattr(getattr(layer, "activation", None), "__name__", None)
