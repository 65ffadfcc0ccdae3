"""Find, replace and copy layers inside other layers, by private names of Keras."""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import keras
from keras import ops

from tfp_ibnn._core.keras_internals import (
    DotNotTrackScope,
    backend,
    graph_of,
    is_functional,
    map_graph,
    nested_layers,
)

_BOOKKEEPING = ("_functional", "_layers", "_operations", "_operations_by_depth", "_tracked")
_NODES = ("_inbound_nodes", "_outbound_nodes")

GRAPH = "graph"
"""The place of a sublayer that the graph of a model calls."""

HIDDEN = "hidden"
"""The place of a sublayer that Keras tracks, but that is in no attribute and no graph."""


def _in_attributes(layer: keras.layers.Layer) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield the attributes of a layer, less Keras's own lists, and the parts of what is in each."""
    for name, value in list(vars(layer).items()):
        # TensorFlow keeps what it tracks itself under `_self_unconditional...`.
        if name in _BOOKKEEPING or name.startswith("_self_unconditional"):
            continue
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            value = tuple(value)  # TensorFlow wraps it in a class
        if not isinstance(value, (list, tuple, dict)):
            yield name, value, [value]
            continue
        with contextlib.suppress(TypeError):  # keys that cannot be sorted
            yield name, value, keras.tree.flatten(value)


def sublayers(layer: keras.layers.Layer) -> dict[tuple[str, int], keras.layers.Layer]:
    """Return the layers directly inside of a layer, by where it keeps each.

    Keras's tracker knows which layers these are: `_layers` has each once. It does not know where
    they are, so each key comes from the graph, or else from the attributes: `GRAPH`, the name of
    the attribute, or `HIDDEN`; then the position there.
    """
    graph = graph_of(layer)
    parts: dict[str, list[Any]] = {GRAPH: [] if graph is None else graph.layers}
    for name, _, values in _in_attributes(layer):
        is_taken = name in (GRAPH, HIDDEN)
        parts[f"self.{name}" if is_taken else name] = values
    parts[HIDDEN] = list(layer._layers)
    unplaced = {id(sublayer) for sublayer in layer._layers}
    places = {}
    for name, values in parts.items():
        for position, value in enumerate(values):
            if id(value) in unplaced:
                unplaced.remove(id(value))
                places[name, position] = value
    return places


def swap_sublayers(layer: keras.layers.Layer, swaps: Mapping[int, keras.layers.Layer]) -> None:
    """Replace layers directly inside of a layer, everywhere it keeps them.

    Keras cannot do that: it refuses to track a layer that is set after `build`, and its trackers
    keep the old one. So the new ones go into the attributes untracked, into `_layers` and the
    tracker's list behind it, and into the nodes of the graph.

    Args:
        layer: the layer or model to change.
        swaps: the new layers, by the `id` of the old ones.
    """
    _swap_in_attributes(layer, swaps)
    tracked = layer._tracker.config["layers"][1]
    for layers in (layer._layers, tracked):
        layers[:] = [swaps.get(id(sublayer), sublayer) for sublayer in layers]
    layer._tracker.stored_ids["layers"] = {id(sublayer) for sublayer in tracked}
    if isinstance(layer, keras.Sequential) and layer._functional is not None:
        swap_sublayers(layer._functional, swaps)
    if is_functional(layer):
        _swap_in_graph(layer, swaps)


def _swap_in_attributes(layer: keras.layers.Layer, swaps: Mapping[int, keras.layers.Layer]) -> None:
    """Put other layers into the attributes of a layer, and the lists and dicts there."""
    with DotNotTrackScope():
        for name, value, values in _in_attributes(layer):
            if any(id(part) in swaps for part in values):
                swapped = keras.tree.map_structure(lambda part: swaps.get(id(part), part), value)
                setattr(layer, name, swapped)


def _swap_in_graph(model: keras.Model, swaps: Mapping[int, keras.layers.Layer]) -> None:
    """Turn the nodes of a graph, Keras's records of calls, into calls of other layers.

    A node names its layer in `operation`, a layer its nodes in `_inbound_nodes`, and a tensor the
    layer that made it in `_keras_history`. `map_graph` then makes the model's lists of nodes anew.
    """
    for old in model.operations:
        if id(old) not in swaps:
            continue
        new = swaps[id(old)]
        new._inbound_nodes = [*new._inbound_nodes, *old._inbound_nodes]
        old._inbound_nodes = []
        for node in new._inbound_nodes:
            node.operation = new
            if not new._call_has_mask_arg:
                node.arguments.kwargs.pop("mask", None)
            for tensor in node.outputs:
                tensor._keras_history = tensor._keras_history._replace(operation=new)
    mapped = map_graph(model._inputs, model._outputs)
    model._nodes, model._nodes_by_depth, model._operations, model._operations_by_depth = mapped


def deep_copy(layer: keras.layers.Layer) -> keras.layers.Layer:
    """Return a layer, not a model, with copies of all attributes and variables, in no graph.

    `copy.deepcopy` alone fails: variables refuse it, trackers hold the ids of what they track, and
    nodes lead to all other layers of the model.
    """
    layers = nested_layers(layer)
    memo: dict[int, Any] = {id(backend): backend}
    for old in layers:
        if isinstance(old, keras.Model):
            raise TypeError(f"the model {old.name!r} is inside")
        memo[id(old)] = type(old).__new__(type(old))
        states = [generator.state for generator in old._seed_generators]
        for variable in (*old._trainable_variables, *old._non_trainable_variables, *states):
            memo[id(variable)] = _copy_variable(variable)
    for old in layers:
        _copy_attributes(old, memo[id(old)], memo)
    return memo[id(layer)]


def _copy_variable(variable: keras.Variable) -> keras.Variable:
    """Return a variable of the same value, with all that Keras has recorded about the other one."""
    value = ops.convert_to_numpy(variable.value).copy()
    copied = keras.Variable(value, dtype=variable.dtype, trainable=variable.trainable)
    for name, attribute in vars(variable).items():
        if not name.startswith(("_value", "_self_")):  # the value, and TensorFlow's own
            vars(copied)[name] = attribute
    return copied


def _copy_attributes(
    layer: keras.layers.Layer, copied: keras.layers.Layer, memo: dict[int, Any]
) -> None:
    """Give a new layer the attributes of another one.

    Args:
        layer: the one to copy from.
        copied: the new one, as `__new__` of its class made it.
        memo: the copies of layers and variables, by the `id` of each.
    """
    # `__new__` has wrapped these two methods of the copy, and nodes belong to the old graph.
    for name in vars(layer).keys() - {"build", "quantize"}:
        with DotNotTrackScope():
            value = [] if name in _NODES else copy.deepcopy(vars(layer)[name], memo)
            vars(copied)[name] = value
    tracker = copied._tracker
    for name, (_, tracked) in tracker.config.items():
        tracker.stored_ids[name] = {id(part) for part in tracked}
