"""What differs between two models besides the values of their weights."""

import contextlib
import itertools
import re
import types
from collections.abc import Callable, Iterator, Mapping, Set
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
    """Return where another model differs in more than the values of its weights, or None.

    Both are compared as graphs of objects: layers by class and attributes, functions by their code
    and what they enclose, calls by the tensors that they take, arrays by value.

    Args:
        model: a built model.
        other: another one.
        training: also compare what training depends on, such as losses and regularizers.
    """
    return next(_Comparison(model, other, training).models(model, other), None)


class _Comparison:
    """Walks through two models at once."""

    def __init__(self, model: keras.Model, other: keras.Model, training: bool) -> None:
        self._training = training
        self._skipped = re.compile(_UNUSED if training else f"{_UNUSED}|{_OF_TRAINING}")
        # The pairs are kept, so that no `id` is given to something else.
        self._seen: dict[tuple[int, int], tuple[Any, Any]] = {}
        # Weights and symbolic tensors are the same if their numbers are.
        self._numbers = [{id(w): n for n, w in enumerate(x.weights)} for x in (model, other)]
        self._next = itertools.count(len(model.weights))
        self._by_kind: tuple[tuple[Any, Callable[[Any, Any, str], Differences]], ...] = (
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
        weights = [[(tuple(w.shape), w.dtype) for w in model.weights] for model in (one, other)]
        if weights[0] != weights[1]:
            yield f"the weights of {other.name!r}"
        yield from self.values(one, other, repr(other.name))
        if self._training:
            arguments = [keras_internals.compile_arguments(model) for model in (one, other)]
            yield from self._mappings(*arguments, f"`compile` of {other.name!r}")

    def values(self, one: Any, other: Any, where: str) -> Differences:
        """Yield where two values of any kind differ."""
        pair = id(one), id(other)
        is_same = one is other and not isinstance(one, _NUMBERED)
        if is_same or pair in self._seen or isinstance(one, _IGNORED):
            return
        self._seen[pair] = one, other
        if _is_array(one) and _is_array(other):
            yield from self._arrays(one, other, where)
            return
        kinds, compare = next(x for x in self._by_kind if isinstance(one, x[0]))
        if isinstance(other, kinds):
            yield from compare(one, other, where)
        else:
            yield where

    def _variables(self, one: keras.Variable, other: keras.Variable, where: str) -> Differences:
        if id(one) in self._numbers[0] or id(other) in self._numbers[1]:
            yield from self._tensors(one, other, where)
        else:
            yield from self._arrays(one.value, other.value, where)

    def _tensors(self, one: Any, other: Any, where: str) -> Differences:
        if self._numbers[0].get(id(one)) != self._numbers[1].get(id(other)):
            yield where

    def _operations(self, one: Any, other: Any, where: str) -> Differences:
        """Compare layers, or operations such as an addition."""
        where = repr(other.name)
        yield from self._classes(type(one), type(other), f"the class of {where}")
        yield from self._attributes(self._state(one), self._state(other), where)
        graphs = [keras_internals.graph_of(layer) for layer in (one, other)]
        if None not in graphs:
            yield from self._graphs(*graphs, f"the connections inside {where}")

    def _state(self, layer: Any) -> dict[str, Any]:
        """Return what the output of a layer depends on, but for the graph."""
        state = {k: v for k, v in vars(layer).items() if k not in keras_internals.bookkeeping()}
        if type(layer).__module__.startswith("tfp_ibnn."):  # whose private flags remember calls
            state = {k: v for k, v in state.items() if k[0] != "_" or not isinstance(v, _PLAIN)}
        if isinstance(layer, keras.layers.Layer):
            state |= {"dtype": layer.dtype_policy.name, "masking": layer.supports_masking}
            state["vocabulary"] = layer.get_vocabulary() if hasattr(layer, "lookup_table") else None
            state["layers"] = layer.layers if isinstance(layer, keras.Sequential) else None
            state["trainable"] = layer.trainable
            state["activity_regularizer"] = layer.activity_regularizer
        return state

    def _graphs(self, one: keras.Model, other: keras.Model, where: str) -> Differences:
        """Compare which tensors each call takes and gives."""
        nodes = [list(keras_internals.nodes_in_order(graph)) for graph in (one, other)]
        if len(nodes[0]) != len(nodes[1]):
            yield where
        self._number(one.inputs, other.inputs)
        yield from self._ends(one.input, other.input, where)
        for first, second in zip(*nodes, strict=False):
            yield from self.values(first.operation, second.operation, where)
            yield from self._sequences(first.arguments.args, second.arguments.args, where)
            given = [_given(node.arguments.kwargs) for node in (first, second)]
            yield from self._mappings(*given, where)
            self._number(first.outputs, second.outputs)
        yield from self._ends(one.output, other.output, where)

    def _number(self, one: list[Any], other: list[Any]) -> None:
        for pair in zip(one, other, strict=False):
            number = next(self._next)
            for numbers, tensor in zip(self._numbers, pair, strict=True):
                numbers[id(tensor)] = number

    def _ends(self, one: Any, other: Any, where: str) -> Differences:
        """Compare inputs or outputs: their structure, tensors, and names that the user chose."""
        try:
            keras.tree.assert_same_structure(one, other)
        except (TypeError, ValueError):
            yield where
            return
        tensors = [keras.tree.flatten(end) for end in (one, other)]
        yield from self._sequences(*tensors, where)
        names = [[keras_internals.chosen_name(x) for x in each] for each in tensors]
        shared = {*names[0]}.intersection(names[1]) - {None}
        if any(names[0].index(name) != names[1].index(name) for name in shared):
            yield where

    def _attributes(self, one: Mapping, other: Mapping, owner: str) -> Differences:
        for name in sorted({*one, *other}):
            if not self._skipped.fullmatch(name):
                yield from self.values(one.get(name), other.get(name), f"`{name}` of {owner}")

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
        parts = [(x.__defaults__, x.__kwdefaults__, _enclosed(x)) for x in (one, other)]
        yield from self._sequences(*parts, where)

    def _classes(self, one: type, other: type, where: str) -> Differences:
        """Compare classes; a function that builds a model may define one at each call."""
        if one is other:
            return
        if (one.__module__, one.__qualname__) != (other.__module__, other.__qualname__):
            yield where
        yield from self._sequences(one.__bases__, other.__bases__, where)
        members = [{k: v for k, v in vars(x).items() if _is_used(k)} for x in (one, other)]
        yield from self._mappings(*members, where)

    def _objects(self, one: Any, other: Any, where: str) -> Differences:
        yield from self._classes(type(one), type(other), where)
        parts = [_parts(x) for x in (one, other)]
        if any(parts):
            yield from self._attributes(*parts, where)
        elif not _is_equal(one, other):
            yield where

    def _plain(self, one: Any, other: Any, where: str) -> Differences:
        if type(one) is not type(other) or not (one == other or one != one != other != other):
            yield where

    def _arrays(self, one: Any, other: Any, where: str) -> Differences:
        try:
            one, other = ops.convert_to_numpy(one), ops.convert_to_numpy(other)
        except Exception:  # of what has no value, such as a handle of TensorFlow's
            yield where
            return
        is_like = (one.dtype, one.shape) == (other.dtype, other.shape)
        if not is_like or not (one.tobytes() == other.tobytes() or np.array_equal(one, other)):
            yield where


def _is_array(x: Any) -> bool:
    is_array = isinstance(x, (np.ndarray, np.generic)) or ops.is_tensor(x)
    return is_array and not isinstance(x, _NUMBERED)


def _is_equal(one: Any, other: Any) -> bool:
    with contextlib.suppress(Exception):  # whatever a class of the user's does with it
        return bool(one == other)
    return False


def _is_used(name: str) -> bool:
    """Whether a prediction depends on a member of a class; what `__init__` makes is compared."""
    return name == "__call__" or not (name in ("build", "get_config") or name.startswith("__"))


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments less those that say nothing, which files add."""
    return {name: value for name, value in arguments.items() if value is not None}


def _enclosed(function: Any) -> list[Any]:
    """Return the values that a function takes from those around it; a name may have none yet."""
    cells = function.__closure__ or ()
    return [cell.cell_contents for cell in cells if cell != types.CellType()]


def _parts(x: Any) -> dict[str, Any]:
    """Return what an object consists of: its attributes, or what a callable one is made of."""
    names = ("__func__", "__self__", "__wrapped__", "func", "args", "keywords", "fget")
    return {**getattr(x, "__dict__", {}), **{k: getattr(x, k) for k in names if hasattr(x, k)}}
