"""The network to calibrate, as a graph, and those that it is compared with."""

import warnings
from collections.abc import Mapping
from typing import Any

import keras

from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.conversion.wrappers import PredictionWrapper
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.layers.carried import own_methods
from tfp_ibnn.likelihoods.last_layer import activation_of
from tfp_ibnn.weights import WeightPosterior, WeightSets


def as_network(model: Any) -> keras.Model:
    """Return a built Functional or Sequential model, or raise.

    A model with its own `call` becomes the only layer of a Functional model, which is compiled
    with the same optimizer and loss.

    Args:
        model: the model to calibrate.

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


def warn_of_own_training(model: Any, build: Any) -> None:
    """Warn that candidates are not trained as a model's class trains it.

    Args:
        model: the model to calibrate, as it was given.
        build: the user's function for fresh networks, or None.
    """
    own = [name for name in ("train_step", "compute_loss") if name in own_methods(type(model))]
    if not own:
        return
    fresh = "" if build is not None else ", and `build` for fresh networks"
    warnings.warn(
        f"`model` has a `{own[0]}` of its own; candidates that `calibrate` trains may do without "
        "it: they are trained by Keras, with the loss of `compile`. Give posteriors that you "
        f"trained yourself as `candidates`{fresh}.",
        stacklevel=4,
    )


def with_graph(model: keras.Model) -> keras.Model:
    """Return a built model, or a Functional one around it if it has its own `call`."""
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
        network.history = getattr(model, "history", None)
    return network


def without_graph(network: keras.Model) -> keras.Model:
    """Return the model that `with_graph` put a graph around, or the same network.

    Masks that its `call` makes are not seen in the graph.
    """
    called = [layer for layer in network.layers if not isinstance(layer, keras.layers.InputLayer)]
    if len(called) != 1 or not isinstance(called[0], keras.Model):
        return network
    (inner,) = called
    return inner if functional_graph(inner) is None else network


def posteriors_of(candidates: Mapping[str, Any], model: keras.Model) -> dict[str, WeightPosterior]:
    """Return the candidates of the user as posteriors over weights, or raise.

    Args:
        candidates: posteriors over weights or Keras models, by name.
        model: the model whose inputs and outputs they must have.
    """
    posteriors = {}
    for name, candidate in dict(candidates).items():
        is_posterior = isinstance(candidate, WeightPosterior)
        network = candidate.network if is_posterior else candidate
        if isinstance(network, PredictionWrapper) or not isinstance(network, keras.Model):
            raise ValueError(
                f"`candidates[{name!r}]` must be a posterior over weights, such as "
                "ibnn.DeepEnsemble(models), or a plain Keras model; "
                f"got {type(candidate).__name__}."
            )
        if not is_posterior and network.built:
            candidate = network = with_graph(network)
        ends = _ends(functional_graph(network))
        expected_ends = _ends(functional_graph(model))
        if ends != expected_ends:
            raise ValueError(
                f"`candidates[{name!r}]` has {ends}; `model` has {expected_ends}, "
                "and they must be the same."
            )
        posteriors[name] = candidate if is_posterior else WeightSets([candidate])
    return posteriors


def _ends(graph: keras.Model | None) -> str:
    """Describe the shapes of inputs and outputs, and whether the outputs are probabilities."""
    if graph is None:
        return "no graph: it is not built, or not a Functional or Sequential model"
    inputs = [tuple(tensor.shape[1:]) for tensor in graph.inputs]
    outputs = [tuple(tensor.shape[1:]) for tensor in graph.outputs]
    if activation_of(graph) in ("softmax", "sigmoid"):
        return f"inputs {inputs} and outputs {outputs}, probabilities"
    return f"inputs {inputs} and outputs {outputs}, not probabilities"
