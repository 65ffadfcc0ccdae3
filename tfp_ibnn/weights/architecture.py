"""What differs between two models besides the values of their weights."""

import contextlib
import itertools
import re
import types
from collections.abc import Iterator, Mapping, Set
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import keras_internals

_UNUSED = (
    "_?name|backend|use_cudnn|seed|train_size|summary|token_.*counts|num_documents|lookup_table"
    "|.*initializer|states|_frozen_vocab_size|_expected_batch_size|_return_attention_scores"
    "|_output_shape|_(build_)?input_shape|_batch_shape|_input_tensor|_(already_)?warned.*|_self_.*"
    "|_abc_.*|_auto_config.*|_rows_checked|is_.*_calibrated"
)
"""Attributes that no output depends on, that remember calls, or that are compared otherwise."""

_OF_TRAINING = ".*(regularizer|constraint)|trainable|kl_scale"
"""Attributes that only training depends on."""

_IGNORED = (
    keras.initializers.Initializer,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.random.SeedGenerator,
)
_NUMBERED = (keras.Variable, keras.KerasTensor, keras.Operation)
_PLAIN = (bool, int, float, complex, str, bytes, range, Set, types.NoneType)

Differences = Iterator[str]
"""The places where two things differ, in words."""


def difference(model: keras.Model, other: keras.Model, training: bool = False) -> str | None:
    """Return where another model differs in more than the values of its weights.

    Both are compared as graphs of objects: layers by class and attributes, functions by their code
    and what they enclose, calls by the tensors that they take, arrays by value.

    Args:
        model: a built model.
        other: another one.
        training: also compare what training depends on, such as losses and regularizers.

    Returns:
        The first difference, in words; None if there is none.
    """
    comparison = _Comparison(model, other, training)
    return next(comparison.models(model, other), None)


class _Comparison:
    """Walks through two models at once.

    Weights and symbolic tensors are the same if their numbers are: those of weights are their
    positions, and those of tensors are counted as the two graphs are walked through.
    """

    def __init__(self, model: keras.Model, other: keras.Model, training: bool) -> None:
        self._training = training
        self._skipped = re.compile(_UNUSED if training else f"{_UNUSED}|{_OF_TRAINING}")
        # The pairs are kept, so that no `id` is given to something else.
        self._compared: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._numbers_of_one = _positions(model.weights)
        self._numbers_of_other = _positions(other.weights)
        self._next = itertools.count(len(model.weights))
        self._by_kind = (
            (keras.Variable, self._variables),
            (keras.KerasTensor, self._tensors),
            (keras.Operation, self._operations),
            (_PLAIN, self._plain),
            (Mapping, self._mappings),
            ((list, tuple), self._sequences),
            (types.FunctionType, self._functions),
            (type, self._classes),
            (object, self._objects),
        )

    def models(self, one: keras.Model, other: keras.Model) -> Differences:
        if _kinds_of_weights(one) != _kinds_of_weights(other):
            yield f"the weights of {other.name!r}"
        yield from self.values(one, other, repr(other.name))
        if self._training:
            arguments = keras_internals.compile_arguments(one)
            other_arguments = keras_internals.compile_arguments(other)
            where = f"`compile` of {other.name!r}"
            yield from self._mappings(arguments, other_arguments, where)

    def values(self, one: Any, other: Any, where: str) -> Differences:
        """Yield where two values of any kind differ."""
        if one is other and not isinstance(one, _NUMBERED):
            return
        pair = (id(one), id(other))
        if pair in self._compared or isinstance(one, _IGNORED):
            return
        self._compared[pair] = (one, other)
        if _is_array(one) and _is_array(other):
            yield from self._arrays(one, other, where)
            return
        kinds, compare = next(entry for entry in self._by_kind if isinstance(one, entry[0]))
        if isinstance(other, kinds):
            yield from compare(one, other, where)
        else:
            yield where

    def _variables(self, one: keras.Variable, other: keras.Variable, where: str) -> Differences:
        if id(one) in self._numbers_of_one or id(other) in self._numbers_of_other:
            yield from self._tensors(one, other, where)
        else:
            yield from self._arrays(one.value, other.value, where)

    def _tensors(self, one: Any, other: Any, where: str) -> Differences:
        number = self._numbers_of_one.get(id(one))
        if number != self._numbers_of_other.get(id(other)):
            yield where

    def _operations(self, one: Any, other: Any, where: str) -> Differences:
        """Compare layers, or operations such as an addition."""
        where = repr(other.name)
        yield from self._classes(type(one), type(other), f"the class of {where}")
        state = _state(one)
        other_state = _state(other)
        _add_inherited(one, state, other_state)
        _add_inherited(other, other_state, state)
        yield from self._attributes(state, other_state, where)
        graph = keras_internals.graph_of(one)
        other_graph = keras_internals.graph_of(other)
        if graph is not None and other_graph is not None:
            yield from self._graphs(graph, other_graph, f"the connections inside {where}")

    def _graphs(self, one: keras.Model, other: keras.Model, where: str) -> Differences:
        """Compare which tensors each call takes and gives."""
        nodes = list(keras_internals.nodes_in_order(one))
        other_nodes = list(keras_internals.nodes_in_order(other))
        if len(nodes) != len(other_nodes):
            yield where
        self._number(one.inputs, other.inputs)
        yield from self._ends(one.input, other.input, where)
        for pair in zip(nodes, other_nodes, strict=False):
            yield from self._calls(*pair, where)
        yield from self._ends(one.output, other.output, where)

    def _calls(self, one: Any, other: Any, where: str) -> Differences:
        """Compare what is called, and on which arguments."""
        yield from self.values(one.operation, other.operation, where)
        yield from self._sequences(one.arguments.args, other.arguments.args, where)
        keywords = _given(one.arguments.kwargs)
        other_keywords = _given(other.arguments.kwargs)
        yield from self._mappings(keywords, other_keywords, where)
        self._number(one.outputs, other.outputs)

    def _number(self, one: list[Any], other: list[Any]) -> None:
        """Give tensors in the same place the same number."""
        for tensor, other_tensor in zip(one, other, strict=False):
            number = next(self._next)
            self._numbers_of_one[id(tensor)] = number
            self._numbers_of_other[id(other_tensor)] = number

    def _ends(self, one: Any, other: Any, where: str) -> Differences:
        """Compare inputs or outputs: their structure, tensors, and names that the user chose."""
        try:
            keras.tree.assert_same_structure(one, other)
        except (TypeError, ValueError):
            yield where
            return
        tensors = keras.tree.flatten(one)
        other_tensors = keras.tree.flatten(other)
        yield from self._sequences(tensors, other_tensors, where)
        names = [keras_internals.chosen_name(tensor) for tensor in tensors]
        other_names = [keras_internals.chosen_name(tensor) for tensor in other_tensors]
        shared = {*names}.intersection(other_names) - {None}
        if any(names.index(name) != other_names.index(name) for name in shared):
            yield where

    def _attributes(self, one: Mapping, other: Mapping, owner: str) -> Differences:
        for name in sorted({*one, *other}):
            if not self._skipped.fullmatch(name):
                where = f"`{name}` of {owner}"
                yield from self.values(one.get(name), other.get(name), where)

    def _mappings(self, one: Mapping, other: Mapping, where: str) -> Differences:
        if one.keys() != other.keys():
            yield where
        for key in one.keys() & other.keys():
            yield from self.values(one[key], other[key], where)

    def _sequences(self, one: Any, other: Any, where: str) -> Differences:
        if len(one) != len(other):
            yield where
        for pair in zip(one, other, strict=False):
            yield from self.values(*pair, where)

    def _functions(self, one: Any, other: Any, where: str) -> Differences:
        if one.__code__ != other.__code__:
            yield where
        yield from self._sequences(_bound_values(one), _bound_values(other), where)

    def _classes(self, one: type, other: type, where: str) -> Differences:
        """Compare classes; a function that builds a model may define one at each call."""
        if one is other:
            return
        if one.__module__ != other.__module__ or one.__qualname__ != other.__qualname__:
            yield where
        yield from self._sequences(one.__bases__, other.__bases__, where)
        yield from self._mappings(_used_members(one), _used_members(other), where)

    def _objects(self, one: Any, other: Any, where: str) -> Differences:
        yield from self._classes(type(one), type(other), where)
        parts = _parts(one)
        other_parts = _parts(other)
        if parts or other_parts:
            yield from self._attributes(parts, other_parts, where)
        elif not _is_equal(one, other):
            yield where

    def _plain(self, one: Any, other: Any, where: str) -> Differences:
        are_nan = one != one and other != other
        if type(one) is not type(other) or not (one == other or are_nan):
            yield where

    def _arrays(self, one: Any, other: Any, where: str) -> Differences:
        try:
            array = ops.convert_to_numpy(one)
            other_array = ops.convert_to_numpy(other)
        except Exception:  # of what has no value, such as a handle of TensorFlow's
            yield where
            return
        if array.dtype != other_array.dtype or array.shape != other_array.shape:
            yield where
            return
        has_same_bytes = array.tobytes() == other_array.tobytes()  # NaN included
        if not has_same_bytes and not np.array_equal(array, other_array):
            yield where


def _positions(weights: list[keras.Variable]) -> dict[int, int]:
    return {id(weight): position for position, weight in enumerate(weights)}


def _kinds_of_weights(model: keras.Model) -> list[tuple[tuple[int, ...], str]]:
    return [(tuple(weight.shape), weight.dtype) for weight in model.weights]


def _state(layer: Any) -> dict[str, Any]:
    """Return what the output of a layer depends on, but for the graph."""
    bookkeeping = keras_internals.bookkeeping()
    is_own = type(layer).__module__.startswith("tfp_ibnn.")
    state = {}
    for name, value in vars(layer).items():
        # The package's own private flags remember calls.
        is_flag = is_own and name.startswith("_") and isinstance(value, _PLAIN)
        if name not in bookkeeping and not is_flag:
            state[name] = value
    if isinstance(layer, keras.layers.Layer):
        has_vocabulary = hasattr(layer, "lookup_table")
        state["dtype"] = layer.dtype_policy.name
        state["masking"] = layer.supports_masking
        state["vocabulary"] = layer.get_vocabulary() if has_vocabulary else None
        state["layers"] = layer.layers if isinstance(layer, keras.Sequential) else None
        state["trainable"] = layer.trainable
        state["activity_regularizer"] = layer.activity_regularizer
    return state


def _add_inherited(layer: Any, state: dict[str, Any], other_state: dict[str, Any]) -> None:
    """Add to a state what only the other one has, if the class of the layer has it as well.

    TensorFlow does not set an attribute that is the very object that the class has, and the same
    string may or may not be the same object.
    """
    for name in other_state.keys() - state.keys():
        if hasattr(type(layer), name):
            state[name] = getattr(layer, name)


def _is_array(x: Any) -> bool:
    if isinstance(x, _NUMBERED):
        return False
    return isinstance(x, (np.ndarray, np.generic)) or ops.is_tensor(x)


def _is_equal(one: Any, other: Any) -> bool:
    with contextlib.suppress(Exception):  # whatever a class of the user's does with it
        return bool(one == other)
    return False


def _is_used(name: str) -> bool:
    """Whether a prediction depends on a member of a class; what `__init__` makes is compared."""
    if name == "__call__":
        return True
    return name not in ("build", "get_config") and not name.startswith("__")


def _used_members(kind: type) -> dict[str, Any]:
    return {name: member for name, member in vars(kind).items() if _is_used(name)}


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments less those that say nothing, which files add."""
    return {name: value for name, value in arguments.items() if value is not None}


def _bound_values(function: Any) -> list[Any]:
    """Return the defaults of a function, and the values that it takes from those around it."""
    empty = types.CellType()  # of a name that has no value yet
    cells = function.__closure__ or ()
    enclosed = [cell.cell_contents for cell in cells if cell != empty]
    return [function.__defaults__, function.__kwdefaults__, enclosed]


def _parts(x: Any) -> dict[str, Any]:
    """Return what an object consists of: its attributes, or what a callable one is made of."""
    parts = dict(getattr(x, "__dict__", {}))
    for name in ("__func__", "__self__", "__wrapped__", "func", "args", "keywords", "fget"):
        if hasattr(x, name):
            parts[name] = getattr(x, name)
    return parts
