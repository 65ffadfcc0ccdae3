"""The network that is calibrated, as a graph."""

from typing import Any

import keras

from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.conversion.wrappers import PredictionWrapper
from tfp_ibnn.layers import stochastic_layers


def as_network(model: Any) -> keras.Model:
    """Return a built Functional or Sequential model, or raise.

    A model with a `call` of its own becomes the one layer of a Functional model, which is compiled
    with the same optimizer and loss.

    Args:
        model: what a user wants to calibrate.

    Raises:
        ValueError: if it is not a built network without stochastic layers.
    """
    if isinstance(model, PredictionWrapper):
        raise ValueError(
            f"`model` is a {type(model).__name__} already: give the network inside it."
        )
    if not isinstance(model, keras.Model):
        raise ValueError(f"`model` must be a Keras model; got {model!r}.")
    if not model.built:
        raise ValueError("`model` must be built: call it on data, or build it.")
    if stochastic_layers(model):
        raise ValueError("`model` has stochastic layers: give ibnn.to_deterministic(model).")
    return with_graph(model)


def with_graph(model: keras.Model) -> keras.Model:
    """Return a built model, or a Functional one around it if its `call` is its own."""
    if functional_graph(model) is not None:
        return model
    shapes = (model.get_build_config() or {}).get("input_shape")
    try:
        inputs = keras.tree.map_shape_structure(lambda shape: keras.Input(shape[1:]), shapes)
        network = keras.Model(inputs, model(inputs), name=model.name)
    except Exception as error:  # `call` is the user's, and Keras raises errors of many types
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"Model {model.name!r} has a `call` of its own, which must take symbolic inputs: "
            "give keras.Model(inputs, model(inputs)), compiled, for inputs = keras.Input(...). "
            f"Keras says: {reason}"
        ) from error
    if model.compiled:
        network.compile(optimizer=model.optimizer, loss=model.loss)
    return network


def without_graph(network: keras.Model) -> keras.Model:
    """Return the model with a `call` of its own that `with_graph` put a graph around, or the same.

    Masks that such a call makes are not seen in the graph.
    """
    called = [layer for layer in network.layers if not isinstance(layer, keras.layers.InputLayer)]
    if len(called) != 1 or not isinstance(called[0], keras.Model):
        return network
    (inner,) = called
    return inner if functional_graph(inner) is None else network
