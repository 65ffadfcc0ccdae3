"""Every private name of Keras that this package uses, each behind a small function.

No other file of the package uses one. Each function has a contract test in
tests/test_keras_internals.py, which fails when Keras changes, with what to do.
"""

import contextlib
import copy
import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter, methodcaller
from typing import Any

import keras
from keras import ops

TESTED_VERSIONS = ">=3.12,<3.16"
"""The versions of Keras that the tests have run with; pyproject.toml states the same."""

try:
    from keras.src import backend
    from keras.src.backend.common import global_state, stateless_scope, symbolic_scope
    from keras.src.layers.core.einsum_dense import _analyze_einsum_string
    from keras.src.layers.rnn.dropout_rnn_cell import DropoutRNNCell as DropoutRNNCell
    from keras.src.models.functional import Functional
    from keras.src.ops.function import map_graph
    from keras.src.trainers.compile_utils import CompileLoss as CompileLoss
    from keras.src.trainers.compile_utils import get_loss as get_loss
    from keras.src.utils.naming import to_snake_case
    from keras.src.utils.tracking import DotNotTrackScope
except ImportError as error:
    remedy = f"pip install 'keras{TESTED_VERSIONS}'"
    raise ImportError(f"Keras {keras.__version__} does not fit tfp_ibnn: {remedy}.") from error

_STATELESS_CALL = inspect.unwrap(keras.layers.Layer.stateless_call).__code__


def find_call() -> Any | None:
    """Return an object that lives as long as the call of a pass; None outside of calls.

    That is the innermost `stateless_call` in progress, by its scope, or else the outermost plain
    call, by Keras's call context. A scope alone will not do: a user may make any number of calls in
    one. Nor will the context: `stateless_call` makes none, and each layer inside then seems
    outermost. Where Keras only infers shapes it is the innermost scope: nothing may leave it.
    """
    scope = stateless_scope.get_stateless_scope()
    if scope is not None and symbolic_scope.in_symbolic_scope():
        return scope
    frame = inspect.currentframe() if scope is not None else None
    while frame is not None:
        if frame.f_code is _STATELESS_CALL:
            return frame.f_locals.get("scope")
        frame = frame.f_back
    return global_state.get_global_attribute("current_call_ctx")


# Of a layer itself, not of the layers inside; of losses, those that Keras has not forgotten.
own_losses = methodcaller("_get_own_losses")
own_trainable_variables = attrgetter("_trainable_variables")
own_metrics = attrgetter("_metrics")
seed_generators = attrgetter("_seed_generators")

functional_behind = attrgetter("_functional")  # of a Sequential model; None before it is built
learning_rate_of = attrgetter("_learning_rate")  # of an optimizer: a schedule, or a variable

_LATER = {"input_axes", "output_axes", "quantization_config"}
_OF_DENSE = inspect.signature(keras.layers.Dense).parameters
_OF_INITIALIZERS = inspect.signature(keras.initializers.GlorotUniform).parameters
_UNKNOWN = _LATER - {*_OF_DENSE, *_OF_INITIALIZERS}
"""Arguments that Keras 3.13 or 3.15 added, and that this version does not know."""


def readable(config: Any) -> Any:
    """Return a copy of a config without what a newer Keras has added to it and left at None."""
    if isinstance(config, dict):
        kept = {k: v for k, v in config.items() if v is not None or k not in _UNKNOWN}
        return {name: readable(value) for name, value in kept.items()}
    return [readable(x) for x in config] if type(config) is list else config


def output_shape(layer: keras.layers.Layer, input_shape: tuple[int | None, ...]) -> Any:
    """Return the shape of a layer's outputs, before it is built too."""
    if not isinstance(layer, keras.layers.EinsumDense):
        return layer.compute_output_shape(input_shape)
    # Before Keras 3.15 the layer knows the one that it was built with alone.
    settings = layer.equation, layer.bias_axes, input_shape, layer.partial_output_shape
    return tuple(_analyze_einsum_string(*settings)[2])


mask_of, set_mask = backend.get_keras_mask, backend.set_keras_mask  # of a tensor


def added_loss(model: keras.Model) -> Any:
    """Return the sum of `model.losses` as it enters the loss that Keras computes."""
    terms = [ops.sum(term) if len(term.shape) else term for term in model.losses]
    return model._aggregate_additional_loss(sum(terms)) if terms else 0


def nested_layers(layer: keras.layers.Layer, include_self: bool = True) -> list[keras.layers.Layer]:
    """Return all layers inside of a layer, at any depth, each once; itself first, if included."""
    return layer._flatten_layers(include_self=include_self)


_BOOKKEEPING = ("_functional", "_layers", "_operations", "_operations_by_depth", "_tracked")
GRAPH, HIDDEN = "graph", "hidden"
"""Where a sublayer is that is in no attribute: in the graph of a model; nobody knows where."""


def _in_attributes(layer: keras.layers.Layer) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield the attributes of a layer, less Keras's own lists, and the parts of what is in each."""
    for name, value in list(vars(layer).items()):
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            value = tuple(value)  # TensorFlow has put a class of its own around it
        is_nested = isinstance(value, (list, tuple, dict))
        if name not in _BOOKKEEPING and not name.startswith("_self_unconditional"):
            with contextlib.suppress(TypeError):  # of keys that cannot be sorted
                yield name, value, keras.tree.flatten(value) if is_nested else [value]


def sublayers(layer: keras.layers.Layer) -> dict[tuple[str, int], keras.layers.Layer]:
    """Return the layers directly inside of a layer, by where it keeps each, or `HIDDEN`."""
    graph = graph_of(layer)
    parts = {GRAPH: graph.layers if graph is not None else []}
    for name, _, inside in _in_attributes(layer):
        parts[f"self.{name}" if name in (GRAPH, HIDDEN) else name] = inside
    parts[HIDDEN] = list(layer._layers)
    open_ones, found = {id(x) for x in layer._layers}, {}
    for name, inside in parts.items():
        for position, part in enumerate(inside):
            if id(part) in open_ones:
                open_ones.remove(id(part))
                found[name, position] = part
    return found


def swap_sublayers(layer: keras.layers.Layer, swaps: Mapping[int, keras.layers.Layer]) -> None:
    """Put other layers, given by the `id` of the present ones, wherever a layer keeps these."""

    def swapped(x: Any) -> Any:
        return swaps.get(id(x), x)

    with DotNotTrackScope():
        for name, value, inside in _in_attributes(layer):
            if any(id(part) in swaps for part in inside):
                setattr(layer, name, keras.tree.map_structure(swapped, value))
    for store in (layer._layers, layer._tracker.config["layers"][1]):
        store[:] = map(swapped, store)
    layer._tracker.stored_ids["layers"] = {id(x) for x in store}
    if isinstance(layer, keras.Sequential) and layer._functional is not None:
        swap_sublayers(layer._functional, swaps)
    if not isinstance(layer, Functional):
        return
    for old in (x for x in layer.operations if id(x) in swaps):
        new = swaps[id(old)]
        new._inbound_nodes, old._inbound_nodes = [*new._inbound_nodes, *old._inbound_nodes], []
        for node in new._inbound_nodes:
            node.operation = new
            if not new._call_has_mask_arg:
                node.arguments.kwargs.pop("mask", None)
            for x in node.outputs:
                x._keras_history = x._keras_history._replace(operation=new)
    mapped = map_graph(layer._inputs, layer._outputs)
    layer._nodes, layer._nodes_by_depth, layer._operations, layer._operations_by_depth = mapped


def deep_copy(layer: keras.layers.Layer) -> keras.layers.Layer:
    """Return a layer, not a model, with copies of all attributes and variables, in no graph."""
    inside, memo = nested_layers(layer), {id(backend): backend}
    for old in inside:
        if isinstance(old, keras.Model):
            raise TypeError(f"the model {old.name!r} is inside")
        memo[id(old)] = type(old).__new__(type(old))
        states = [generator.state for generator in old._seed_generators]
        for variable in (*old._trainable_variables, *old._non_trainable_variables, *states):
            options = {"dtype": variable.dtype, "trainable": variable.trainable}
            new = keras.Variable(ops.convert_to_numpy(variable.value).copy(), **options)
            own = ("_value", "_self_")
            vars(new).update({k: v for k, v in vars(variable).items() if not k.startswith(own)})
            memo[id(variable)] = new
    for old in inside:
        new = memo[id(old)]
        # What `__new__` has put around `build` belongs to the copy, and nodes to the old graph.
        for name in vars(old).keys() - {"build", "quantize"}:
            nodes = name in ("_inbound_nodes", "_outbound_nodes")
            with DotNotTrackScope():
                vars(new)[name] = [] if nodes else copy.deepcopy(vars(old)[name], memo)
        stores = new._tracker.config.items()
        new._tracker.stored_ids = {name: {id(x) for x in store} for name, (_, store) in stores}
    return memo[id(layer)]


def lookup_tables(model: keras.layers.Layer) -> list[Any]:
    """Return TensorFlow's tables behind the lookup layers of a model, which are not variables."""
    return [x.lookup_table for x in nested_layers(model) if hasattr(x, "lookup_table")]


def copy_vocabulary(layer: keras.layers.Layer, to: keras.layers.Layer) -> None:
    """Give a lookup layer the vocabulary of another one, which its config need not have."""
    if not hasattr(layer, "lookup_table") or not layer.get_vocabulary(include_special_tokens=False):
        return
    has_frequencies = layer.output_mode == "tf_idf"
    frequencies = ops.convert_to_numpy(layer.idf_weights_const) if has_frequencies else None
    to.set_vocabulary(layer.get_vocabulary(), frequencies)


def has_value(variable: keras.Variable) -> bool:
    """Whether a variable can be read and written: Keras's JAX trainer takes the values out."""
    return variable._value is not None or stateless_scope.in_stateless_scope()


@contextlib.contextmanager
def values_kept(variables: list[keras.Variable]) -> Iterator[None]:
    """Give variables their arrays back after an error: Keras's JAX trainer takes them out."""
    values = [variable._value for variable in variables]
    try:
        yield
    except BaseException:
        for variable, value in zip(variables, values, strict=True):
            if variable._value is None:
                variable._value = value
        raise


def index_in(optimizer: keras.optimizers.Optimizer, variable: Any) -> int:
    """Return the place of a variable among those that an optimizer was built with."""
    return optimizer._get_variable_index(variable)


def decays(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> bool:
    """Whether the weight decay of an optimizer acts on a variable."""
    return bool(getattr(optimizer, "weight_decay", None)) and optimizer._use_weight_decay(variable)


@functools.cache
def bookkeeping() -> frozenset[str]:
    """Return the names of attributes in which Keras keeps what it knows of layers and models."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
    model.compile()
    of_fit = ("history", "stop_evaluating", "stop_predicting", "_eval_epoch_iterator", "_jax_state")
    return frozenset({*vars(model), *vars(model._functional), *vars(keras.Operation()), *of_fit})


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Return the arguments of `compile` that the loss depends on."""
    config = getattr(model, "_compile_config", None)
    return {name: config.config[name] for name in ("loss", "loss_weights")} if config else {}


def graph_of(layer: Any) -> Any:
    """Return the Functional model that a layer is or holds as a Sequential one, or None."""
    graph = layer._functional if isinstance(layer, keras.Sequential) else layer
    return graph if isinstance(graph, Functional) else None


def chosen_name(tensor: Any) -> str | None:
    """Return the name of what a symbolic tensor comes from, or None if Keras chose it."""
    operation = origin(tensor)[0]
    automatic = to_snake_case(type(operation).__name__)
    return None if re.fullmatch(rf"{automatic}(_\d+)?", operation.name) else operation.name


def is_functional(model: Any) -> bool:
    """Whether a model was made from symbolic inputs and outputs, by a subclass perhaps."""
    return isinstance(model, Functional)


def is_plain_graph(model: Any) -> bool:
    """Whether a model is of Keras's own Functional or Sequential class."""
    return type(model) in (Functional, keras.Sequential)


def has_plain_call(model: keras.Model, *others: type[keras.Model]) -> bool:
    """Whether a model is called as Keras's Functional and Sequential models are, or as others."""
    own, plain = type(model), (Functional, keras.Sequential, *others)
    return any(own.call is x.call for x in plain) and any(own.__call__ is x.__call__ for x in plain)


def nodes_in_order(model: keras.Model) -> Iterator[Any]:
    """Yield the calls in a Functional model, Keras's nodes, in an order that works."""
    for depth in sorted(model._nodes_by_depth, reverse=True):
        yield from (node for node in model._nodes_by_depth[depth] if not node.is_input)


def graph_inputs(model: keras.Model, inputs: Any) -> list[Any]:
    """Return the flat inputs of a Functional model as its graph takes them, or raise as it does."""
    model._assert_input_compatibility(inputs)
    return model._standardize_inputs(inputs)


def origin(tensor: Any) -> tuple[Any, Any]:
    """Return the layer or operation that a symbolic tensor comes from, and that call's node."""
    operation, number, _ = tensor._keras_history
    return operation, operation._inbound_nodes[number]


@contextlib.contextmanager
def values_in_place(pairs: Iterable[tuple[keras.Variable, Any]]) -> Iterator[None]:
    """Let variables have other values inside; those of a `StatelessScope` around it stay."""
    # Scopes do not nest: an inner one hides the values of the outer one.
    with keras.StatelessScope(state_mapping=pairs) as scope:
        if scope.original_scope is not None:
            scope.state_mapping = {**scope.original_scope.state_mapping, **scope.state_mapping}
        yield


def uncast(variable: keras.Variable) -> Any:
    """Return a variable's value as a tensor in its own type, in layers of mixed precision too."""
    # Not by `variable.dtype`, which inside of this scope is that of `floatx`.
    with backend.AutocastScope(None):
        return ops.convert_to_tensor(variable.value)


def call_with(
    layer: keras.layers.Layer, inputs: Any, *args: Any, options: Any = None, **values: Any
) -> Any:
    """Return `layer.call(inputs, *args, **options)` with other attributes, its kernel say."""
    copied = object.__new__(type(layer))
    vars(copied).update(vars(layer))
    for name, value in values.items():  # some layers keep `kernel` behind a property
        is_property = isinstance(getattr(type(layer), name, None), property)
        vars(copied)[f"_{name}" if is_property else name] = value
    dtype = keras.backend.standardize_dtype(inputs.dtype)  # in which all other weights come
    with backend.AutocastScope(dtype if keras.backend.is_float_dtype(dtype) else None):
        return type(layer).call(copied, inputs, *args, **(options or {}))
