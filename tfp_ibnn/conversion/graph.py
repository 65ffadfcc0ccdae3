"""A model cut in two: what comes before the first noisy layer, and the rest."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras import ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.layers import StochasticLayer
from tfp_ibnn.layers.model import StochasticModel

Call = Callable[..., Any]
"""How to run a layer: (layer, *args, **kwargs) -> its output."""


def infer(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a layer, or an operation, as in inference."""
    if isinstance(layer, keras.layers.Layer):
        kwargs["training"] = False
    return layer(*args, **kwargs)


class _Step(NamedTuple):
    """One call of one layer, by the numbers of the tensors that it takes and gives."""

    node: Any
    sources: tuple[int, ...]
    results: tuple[int, ...]

    def run(self, values: dict[int, Tensor], call: Call) -> None:
        """Add the results of the call to the values."""
        numbered = zip(self.node.input_tensors, self.sources, strict=True)
        known = {id(x): values[number] for x, number in numbered}
        args, kwargs = self.node.arguments.fill_in(known)
        outputs = keras.tree.flatten(call(self.node.operation, *args, **kwargs))
        values.update(zip(self.results, outputs, strict=True))


def functional_graph(model: Any) -> keras.Model | None:
    """Return the Functional model that a model runs; None if not built, or of its own `call`."""
    is_sequential = isinstance(model, keras.Sequential)
    if not is_sequential and not keras_internals.is_functional(model):
        return None
    if not keras_internals.has_plain_call(model, StochasticModel):
        return None
    return keras_internals.functional_behind(model) if is_sequential else model


class Graph:
    """The calls of all layers of a model, nested models opened, in an order that works.

    A model whose `call` is its own cannot be opened; all of it counts as noisy. `layers` are those
    of all calls, `noisy_layers` those of the calls in `suffix`, `is_noisy` is whether the output
    depends on noise, and `largest` the size of the largest tensor of one example behind the first
    noisy layer, or a guess.
    """

    def __init__(self, model: keras.Model, is_noisy: Callable[[Any], bool]) -> None:
        self._model = model
        self._functional = functional_graph(model)
        self._without_batch: set[int] = set()
        self._numbers: dict[tuple[int, ...], int] = {}
        self._after: list[_Step] = []
        self.layers: list[Any] = []
        self.noisy_layers: list[Any] = []
        self.is_noisy, self.largest = True, 4096
        if self._functional is None:
            return
        steps: list[_Step] = []
        self._outputs = self._open(self._functional, (), steps)
        self._inputs = [self._number((), x) for x in self._functional.inputs]
        noisy: set[int] = set()
        for step in steps:
            if is_noisy(step.node.operation) or noisy.intersection(step.sources):
                noisy.update(step.results)
        needed = set(self._outputs)
        for step in reversed(steps):
            if needed.intersection(step.results):
                needed.update(step.sources)
        steps = [step for step in steps if needed.intersection(step.results)]
        self._before = [step for step in steps if not noisy.intersection(step.results)]
        self._after = [step for step in steps if noisy.intersection(step.results)]
        self._frontier = {x for step in self._after for x in step.sources}
        self._frontier.update(self._outputs)
        self.layers = [step.node.operation for step in steps]
        self.noisy_layers = [step.node.operation for step in self._after]
        self.is_noisy, self._noisy = bool(self._after), noisy
        nodes = [step.node for step in self._after]
        tensors = [x for node in nodes for x in (*node.input_tensors, *node.outputs)]
        # An axis of unknown size counts as 1.
        sizes = (math.prod(size or 1 for size in x.shape[1:]) for x in tensors)
        self.largest = max(sizes, default=1)
        # A tensor whose first axis is not that of the examples, such as a table of weights.
        batches = {None, *(x.shape[0] for x in self._functional.inputs)}
        self._without_batch = {
            number
            for step in self._before
            for number, x in zip(step.results, step.node.outputs, strict=True)
            if not x.shape or x.shape[0] not in batches
        }

    def prefix(self, inputs: Any, call: Call = infer) -> dict[int, Any]:
        """Run what does not depend on noise; return the tensors that the rest needs."""
        if self._functional is None:
            return {0: inputs}
        given = keras_internals.graph_inputs(self._functional, inputs)
        values = dict(zip(self._inputs, given, strict=True))
        for step in self._before:
            step.run(values, call)
        return {number: values[number] for number in self._frontier & values.keys()}

    def first(self) -> dict[Any, int]:
        """Return noisy layers whose work all draws can share, with the number of their input."""
        return {
            step.node.operation: step.sources[0]
            for step in self._after
            if isinstance(step.node.operation, StochasticLayer)
            and len(step.sources) == 1
            and step.sources[0] not in self._noisy
            and self.layers.count(step.node.operation) == 1  # called once
            and step.node.operation.shares_work(step.node.input_tensors[0])
        }

    def repeat(self, values: dict[int, Any], times: int | Tensor) -> dict[int, Any]:
        """Return what `prefix` returned with the examples repeated as a block."""
        batched = {n: x for n, x in values.items() if n not in self._without_batch}
        return {**values, **keras.tree.map_structure(lambda x: _repeat(x, times), batched)}

    def suffix(self, values: dict[int, Any], call: Call = infer) -> Any:
        """Run the rest on what `prefix` or `repeat` returned; return the model's output, or all."""
        if self._functional is None:
            return call(self._model, values[0])
        values = dict(values)
        for step in self._after:
            step.run(values, call)
        outputs = [values[number] for number in self._outputs]
        return outputs if len(outputs) > 1 else outputs[0]

    def _number(self, place: tuple[int, ...], tensor: Any) -> int:
        return self._numbers.setdefault((*place, id(tensor)), len(self._numbers))

    def _open(self, graph: keras.Model, place: tuple[int, ...], steps: list[_Step]) -> list[int]:
        """Append the calls of a graph, nested ones in a `place` each; return its outputs."""
        for node in keras_internals.nodes_in_order(graph):
            sources = tuple(self._number(place, x) for x in node.input_tensors)
            inner = _nested(node)
            if inner is None:
                results = tuple(self._number(place, x) for x in node.outputs)
                steps.append(_Step(node, sources, results))
                continue
            inside = (*place, id(node))
            for number, x in zip(sources, inner.inputs, strict=True):
                self._numbers[(*inside, id(x))] = number
            for number, x in zip(self._open(inner, inside, steps), node.outputs, strict=True):
                self._numbers[(*place, id(x))] = number
        return [self._number(place, x) for x in graph.outputs]


def _repeat(x: Tensor, times: int | Tensor) -> Tensor:
    """Return a tensor whose examples are repeated as a block, with its mask."""
    mask, shape = keras_internals.mask_of(x), ops.shape(x)
    blocks = ops.broadcast_to(x[None], (times, *shape))
    repeated = ops.reshape(blocks, (times * shape[0], *shape[1:]))
    if mask is not None:
        keras_internals.set_mask(repeated, _repeat(mask, times))
    return repeated


def _nested(node: Any) -> keras.Model | None:
    """Return the graph of a nested model that is called in the plain way, or None."""
    args, kwargs = node.arguments.args, keras.tree.flatten(node.arguments.kwargs)
    plain = len(args) == 1 and all(value is None for value in kwargs)
    inner = functional_graph(node.operation) if plain else None
    if inner is None:
        return None
    if len(inner.inputs) != 1 or len(node.input_tensors) != 1:
        try:
            keras.tree.assert_same_structure(args[0], inner.input)
        except (TypeError, ValueError):
            return None
    # Keras adds an axis where one is missing; such a model is left closed.
    pairs = zip(node.input_tensors, inner.inputs, strict=True)
    return inner if all(len(x.shape) == len(y.shape) for x, y in pairs) else None
