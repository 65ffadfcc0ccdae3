"""Every private name of Keras that this package uses, each behind a small function.

No other file of the package uses one. Each function has a contract test in
tests/_core/test_keras_internals.py, which fails when Keras changes, with what to do.
"""

import contextlib
import functools
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

import keras
from keras import ops

TESTED_VERSIONS: Final = ">=3.12,<3.16"
"""The versions of Keras that the tests have run with; pyproject.toml states the same."""

try:
    from keras.src import backend
    from keras.src.backend.common import global_state, stateless_scope, symbolic_scope
    from keras.src.layers.core.einsum_dense import _analyze_einsum_string
    from keras.src.layers.rnn.dropout_rnn_cell import DropoutRNNCell as DropoutRNNCell
    from keras.src.models.functional import Functional
    from keras.src.ops.function import map_graph as map_graph
    from keras.src.trainers.compile_utils import CompileLoss as CompileLoss
    from keras.src.trainers.compile_utils import get_loss as get_loss
    from keras.src.utils.naming import to_snake_case
    from keras.src.utils.tracking import DotNotTrackScope as DotNotTrackScope
except ImportError as error:
    raise ImportError(
        f"Keras {keras.__version__} does not fit tfp_ibnn: pip install 'keras{TESTED_VERSIONS}'."
    ) from error

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
    # The scope of a `stateless_call` is a local variable of it, which nobody else can reach.
    frame = inspect.currentframe() if scope is not None else None
    while frame is not None:
        if frame.f_code is _STATELESS_CALL:
            return frame.f_locals.get("scope")
        frame = frame.f_back
    # Layer.__call__ keeps the context under this name while the outermost call runs.
    return global_state.get_global_attribute("current_call_ctx")


def own_losses(layer: keras.layers.Layer) -> list[Any]:
    """Return the losses that a layer itself has added, less those that Keras has forgotten.

    `layer.losses` has those of all layers inside as well, and regularizers.
    """
    return layer._get_own_losses()


def own_trainable_variables(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Return the variables that a layer has made by itself, whether or not they train now.

    `layer.trainable_variables` has those of the layers inside too, and none of a frozen layer.
    """
    return layer._trainable_variables


def own_metrics(layer: keras.layers.Layer) -> list[keras.metrics.Metric]:
    """Return the metrics that a layer has as attributes.

    `model.metrics` has those of `compile` and of the layers inside too.
    """
    return layer._metrics


def seed_generators(layer: keras.layers.Layer) -> list[Any]:
    """Return the seed generators that a layer itself owns: Keras gives no public list of them."""
    return layer._seed_generators


def functional_behind(model: keras.Sequential) -> keras.Model | None:
    """Return the graph that a Sequential model runs; None before it is built.

    A Sequential model has no nodes of its own, so its calls can be listed there alone.
    """
    return model._functional


def learning_rate_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """Return an optimizer's learning rate, a schedule or a variable.

    The public `learning_rate` is the rate of the present step, in which a schedule cannot be seen.
    """
    return optimizer._learning_rate


_LATER = {"input_axes", "output_axes", "quantization_config"}
_OF_DENSE = inspect.signature(keras.layers.Dense).parameters
_OF_INITIALIZERS = inspect.signature(keras.initializers.GlorotUniform).parameters
_UNKNOWN = _LATER - {*_OF_DENSE, *_OF_INITIALIZERS}
"""Arguments that Keras 3.13 or 3.15 added, and that this version does not know."""


def readable(config: Any) -> Any:
    """Return a copy of a config without what a newer Keras has added to it and left at None."""
    if type(config) is list:
        return [readable(value) for value in config]
    if not isinstance(config, dict):
        return config
    kept = {}
    for name, value in config.items():
        if value is not None or name not in _UNKNOWN:
            kept[name] = readable(value)
    return kept


def output_shape(layer: keras.layers.Layer, input_shape: tuple[int | None, ...]) -> Any:
    """Return the shape of a layer's outputs, before it is built too.

    Before Keras 3.15 an EinsumDense layer knows the one alone that it was built with, so this reads
    the equation as its `build` does.

    Args:
        layer: one of Keras's layers.
        input_shape: of its inputs, with the axis of the examples.
    """
    if not isinstance(layer, keras.layers.EinsumDense):
        return layer.compute_output_shape(input_shape)
    analyzed = _analyze_einsum_string(
        layer.equation, layer.bias_axes, input_shape, layer.partial_output_shape
    )
    return tuple(analyzed[2])  # after the shapes of kernel and bias


def mask_of(tensor: Any) -> Any | None:
    """Return the mask that Keras has hung on a tensor, or None."""
    return backend.get_keras_mask(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Hang a mask on a tensor, where Keras's layers look for it.

    Args:
        tensor: the outputs of a layer, say.
        mask: which of its positions count.
    """
    backend.set_keras_mask(tensor, mask)


def added_loss(model: keras.Model) -> Any:
    """Return the sum of `model.losses` as it enters the loss that Keras computes.

    Under `tf.distribute` Keras scales it by the number of replicas, in a private method.
    """
    terms = [ops.sum(term) if len(term.shape) else term for term in model.losses]
    return model._aggregate_additional_loss(sum(terms)) if terms else 0


def nested_layers(layer: keras.layers.Layer, include_self: bool = True) -> list[keras.layers.Layer]:
    """Return all layers inside of a layer, at any depth, each once.

    The public `layers` of a model has those of one depth, and other layers have none.

    Args:
        layer: a layer or model.
        include_self: whether it is the first of them itself.
    """
    return layer._flatten_layers(include_self=include_self)


def lookup_tables(model: keras.layers.Layer) -> list[Any]:
    """Return TensorFlow's tables behind the lookup layers of a model, which are not variables."""
    return [x.lookup_table for x in nested_layers(model) if hasattr(x, "lookup_table")]


def copy_vocabulary(layer: keras.layers.Layer, to: keras.layers.Layer) -> None:
    """Give a lookup layer the vocabulary of another one, which its config need not have.

    Args:
        layer: any layer; only those with a vocabulary matter.
        to: one of the same class.
    """
    if not hasattr(layer, "lookup_table") or not layer.get_vocabulary(include_special_tokens=False):
        return
    frequencies = None
    if layer.output_mode == "tf_idf":  # without them Keras refuses the vocabulary
        frequencies = ops.convert_to_numpy(layer.idf_weights_const)
    to.set_vocabulary(layer.get_vocabulary(), frequencies)


def has_value(variable: keras.Variable) -> bool:
    """Whether a variable can be read and written.

    Keras's JAX trainer takes the values out of variables while it runs: the private `_value` is
    then None, which nothing public shows.
    """
    return variable._value is not None or stateless_scope.in_stateless_scope()


@contextlib.contextmanager
def values_kept(variables: list[keras.Variable]) -> Iterator[None]:
    """Give variables their arrays back after an error: Keras's JAX trainer takes them out.

    It puts them into the private `_value` only if all goes well.
    """
    values = [variable._value for variable in variables]
    try:
        yield
    except BaseException:
        for variable, value in zip(variables, values, strict=True):
            if variable._value is None:
                variable._value = value
        raise


def index_in(optimizer: keras.optimizers.Optimizer, variable: Any) -> int:
    """Return the place of a variable among those that an optimizer was built with.

    Keras's lists of moving averages and accumulated gradients go by it.

    Args:
        optimizer: a built optimizer.
        variable: one that it was built with.
    """
    return optimizer._get_variable_index(variable)


def decays(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> bool:
    """Whether the weight decay of an optimizer acts on a variable.

    What `exclude_from_weight_decay` was told, a private method alone knows.

    Args:
        optimizer: a built optimizer.
        variable: one of a model.
    """
    if not getattr(optimizer, "weight_decay", None):
        return False
    return optimizer._use_weight_decay(variable)


@functools.cache
def bookkeeping() -> frozenset[str]:
    """Return the names of attributes in which Keras keeps what it knows of layers and models."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
    model.compile()
    of_fit = ("history", "stop_evaluating", "stop_predicting", "_eval_epoch_iterator", "_jax_state")
    return frozenset({*vars(model), *vars(model._functional), *vars(keras.Operation()), *of_fit})


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Return the arguments of `compile` that the loss depends on, as the user wrote them.

    The public `get_compile_config` has configs in place of the objects.
    """
    config = getattr(model, "_compile_config", None)
    if not config:
        return {}
    return {name: config.config[name] for name in ("loss", "loss_weights")}


def graph_of(layer: Any) -> Any:
    """Return the Functional model that a layer is or holds as a Sequential one, or None."""
    graph = layer._functional if isinstance(layer, keras.Sequential) else layer
    return graph if isinstance(graph, Functional) else None


def chosen_name(tensor: Any) -> str | None:
    """Return the name of what a symbolic tensor comes from, or None if Keras chose it.

    Keras makes names of class names, as "dense_1" of Dense, and does not note that it did.
    """
    operation, _ = origin(tensor)
    automatic = to_snake_case(type(operation).__name__)
    if re.fullmatch(rf"{automatic}(_\d+)?", operation.name):
        return None
    return operation.name


def is_functional(model: Any) -> bool:
    """Whether a model was made from symbolic inputs and outputs, by a subclass perhaps."""
    return isinstance(model, Functional)


def is_plain_graph(model: Any) -> bool:
    """Whether a model is of Keras's own Functional or Sequential class."""
    return type(model) in (Functional, keras.Sequential)


def has_plain_call(model: keras.Model, *others: type[keras.Model]) -> bool:
    """Whether a model is called as Keras's Functional and Sequential models are, or as others.

    Args:
        model: any model.
        *others: further classes whose way of being called counts as plain.
    """
    kind = type(model)
    plain = (Functional, keras.Sequential, *others)
    inherits_call = any(kind.call is other.call for other in plain)
    return inherits_call and any(kind.__call__ is other.__call__ for other in plain)


def nodes_in_order(model: keras.Model) -> Iterator[Any]:
    """Yield the calls in a Functional model, Keras's nodes, in an order that works.

    A node's depth is its distance from the outputs, so the deepest ones come first.
    """
    for depth in sorted(model._nodes_by_depth, reverse=True):
        for node in model._nodes_by_depth[depth]:
            if not node.is_input:
                yield node


def graph_inputs(model: keras.Model, inputs: Any) -> list[Any]:
    """Return the flat inputs of a Functional model as its graph takes them, or raise as it does.

    A Functional model checks, sorts and expands its inputs in private methods before it runs.

    Args:
        model: a Functional model.
        inputs: a batch in any form that the model takes.
    """
    model._assert_input_compatibility(inputs)
    return model._standardize_inputs(inputs)


def origin(tensor: Any) -> tuple[Any, Any]:
    """Return the layer or operation that a symbolic tensor comes from, and that call's node.

    The tensor notes the number of the call, and the layer has its calls in order.
    """
    operation, number, _ = tensor._keras_history
    return operation, operation._inbound_nodes[number]


@contextlib.contextmanager
def values_in_place(pairs: Iterable[tuple[keras.Variable, Any]]) -> Iterator[None]:
    """Let variables have other values inside; those of a `StatelessScope` around it stay."""
    # Scopes do not nest: an inner one hides the values of the outer one, so it gets them as well.
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
    """Return `layer.call(inputs, *args, **options)` with other attributes, its kernel say.

    The layer itself is left alone: a shallow copy has the attributes. Its `call` runs without
    `__call__`, which would cast, trace and track, so the scope in which other weights come in the
    inputs' type is opened here.

    Args:
        layer: a built layer.
        inputs: of its `call`.
        *args: further positional arguments of its `call`.
        options: keyword arguments of its `call`, or None.
        **values: attributes by their names. A `kernel` that is a property stands for `_kernel`.
    """
    copied = object.__new__(type(layer))
    vars(copied).update(vars(layer))
    for name, value in values.items():
        is_property = isinstance(getattr(type(layer), name, None), property)
        vars(copied)[f"_{name}" if is_property else name] = value
    dtype = keras.backend.standardize_dtype(inputs.dtype)
    cast_to = dtype if keras.backend.is_float_dtype(dtype) else None
    with backend.AutocastScope(cast_to):
        return type(layer).call(copied, inputs, *args, **(options or {}))


def tf2onnx() -> Any:
    """Return the converter to ONNX, with Keras's repairs for NumPy 2."""
    import tf2onnx as module
    from keras.src.export.tf2onnx_lib import patch_tf2onnx

    patch_tf2onnx()
    return module
