"""What the last layer of a model says about its output."""

from typing import Any

import keras
from keras import layers, ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.layers import StochasticLayer
from tfp_ibnn.layers.heads import GaussianHead
from tfp_ibnn.layers.quantiles import QuantileHead

_TRANSPARENT = (layers.Dropout, layers.Flatten, layers.Identity, layers.Permute, layers.Reshape)

_ENDING_IN_ACTIVATION = (
    layers.Activation,
    layers.Dense,
    layers.EinsumDense,
    *(layers.Conv1D, layers.Conv2D, layers.Conv3D),
    *(layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose),
    *(layers.DepthwiseConv1D, layers.DepthwiseConv2D),
    *(layers.SeparableConv1D, layers.SeparableConv2D),
)
_KERAS_ACTIVATIONS = {
    "linear": (keras.activations.linear,),
    "softmax": (keras.activations.softmax, ops.softmax),
    "log_softmax": (keras.activations.log_softmax, ops.log_softmax),
    "sigmoid": (keras.activations.sigmoid, ops.sigmoid),
}
_OPERATIONS = {"Softmax": "softmax", "LogSoftmax": "log_softmax", "Sigmoid": "sigmoid"}


def activation_of(model: keras.Model) -> str | None:
    """Return the name of the activation of a model's one output.

    A linear cast after it does not count. For a `GaussianHead` it is "gaussian", for a
    `QuantileHead` "quantiles"; None is unknown.
    """
    layer = innermost_output_layer(model)
    if isinstance(layer, GaussianHead):
        return "gaussian"
    if isinstance(layer, QuantileHead):
        return "quantiles"
    kind = type(layer).__name__  # the operations of keras.ops have no public classes
    if kind in ("Softmax", "Sigmoid"):
        is_last_axis = getattr(layer, "axis", -1) == -1
        return kind.lower() if is_last_axis else f"{kind.lower()} over another axis"
    activation = getattr(layer, "activation", None)
    return getattr(activation, "__name__", None)


def own_activation(layer: Any) -> str | None:
    """Return the activation that a layer or operation ends in, if it is known exactly.

    That is Keras's own "linear", "softmax", "log_softmax" or "sigmoid", over the last axis, or
    "gaussian"; a function of the user's with such a name is not.
    """
    if isinstance(layer, GaussianHead):
        return "gaussian"
    if type(layer) is layers.Softmax or _is_keras_operation(layer):
        is_last_axis = getattr(layer, "axis", -1) == -1
        return _OPERATIONS.get(type(layer).__name__) if is_last_axis else None
    if isinstance(layer, StochasticLayer):
        layer = layer.layer
    if not any(type(layer).call is kind.call for kind in _ENDING_IN_ACTIVATION):
        return None
    for name, functions in _KERAS_ACTIVATIONS.items():
        if any(layer.activation is function for function in functions):
            return name
    return None


def innermost_output_layer(model: keras.Model) -> Any:
    """Return `output_layer` without the layers around it: noise, and `TimeDistributed`."""
    layer = output_layer(model)
    while isinstance(layer, (StochasticLayer, layers.TimeDistributed)):
        layer = layer.layer
    return layer


def output_layer(model: keras.Model) -> Any:
    """Return the layer or operation that gives a model's one output its meaning, or None."""
    layer, _ = output_call(model)
    return layer


def output_call(model: keras.Model) -> tuple[Any, Any]:
    """Return `output_layer` and the node of its call, Nones if the model has no graph."""
    graph = functional_graph(model)
    if graph is None or len(graph.outputs) != 1:
        return None, None
    layer, node = keras_internals.origin(graph.outputs[0])
    while is_transparent(layer):
        layer, node = keras_internals.origin(node.input_tensors[0])
    if isinstance(layer, keras.Model):
        return output_call(layer)
    return layer, node


def is_transparent(layer: Any) -> bool:
    """Whether a layer leaves the meaning of its input as it is."""
    if isinstance(layer, layers.Activation):
        return layer.activation is keras.activations.linear  # a cast
    return isinstance(layer, _TRANSPARENT)


def _is_keras_operation(layer: Any) -> bool:
    """Whether it is an operation of `keras.ops`, which have no public classes."""
    if isinstance(layer, keras.Layer):
        return False
    is_own = type(layer).__module__.startswith("keras.")
    return is_own and isinstance(layer, keras.Operation)
