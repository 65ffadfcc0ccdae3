"""A model cut in two: what comes before the first noisy layer, and the rest."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
from keras import ops

from tfp_ibnn._core import keras_internals
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.layers import StochasticLayer, stochastic_layers
from tfp_ibnn.layers.model import StochasticModel

Call = Callable[..., Any]
"""How to run a layer: (layer, *args, **kwargs) -> its output."""


def infer(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a layer, or an operation, as in inference.

    Args:
        layer: a layer or an operation.
        *args: what it is called on.
        **kwargs: further arguments of its call.
    """
    if isinstance(layer, keras.layers.Layer):
        kwargs["training"] = False
    return layer(*args, **kwargs)


def extended(graph: keras.Model, outputs: Any, name: str) -> keras.Model:
    """Return a model from the inputs of a graph to tensors that were computed from its own.

    Keras numbers automatic names anew in every process, so what was added may have names of a graph
    that comes from a file; it gets others.

    Args:
        graph: a Functional model.
        outputs: symbolic tensors, in any structure.
        name: of the model.
    """
    seen = {id(operation) for operation in graph.operations}
    taken = {operation.name for operation in graph.operations}
    tensors = keras.tree.flatten(outputs)
    while tensors:
        operation, node = keras_internals.origin(tensors.pop())
        if id(operation) in seen:
            continue
        seen.add(id(operation))
        tensors += node.input_tensors
        first_name = operation.name
        number = 1
        while operation.name in taken:
            operation.name = f"{first_name}_added_{number}"
            number += 1
        taken.add(operation.name)
    # The config of a StochasticModel has the stochastic layers inside of others, as in an RNN.
    kind = StochasticModel if stochastic_layers(graph) else keras.Model
    return kind(graph.input, outputs, name=name)


class _Step(NamedTuple):
    """One call of one layer, by the numbers of the tensors that it takes and gives."""

    node: Any
    sources: tuple[int, ...]
    results: tuple[int, ...]

    def run(self, values: dict[int, Tensor], call: Call) -> None:
        """Add the results of the call to the values.

        Args:
            values: tensors by their numbers.
            call: how to run the layer.
        """
        symbolic = zip(self.node.input_tensors, self.sources, strict=True)
        inputs = {id(tensor): values[number] for tensor, number in symbolic}
        args, kwargs = self.node.arguments.fill_in(inputs)
        outputs = call(self.node.operation, *args, **kwargs)
        values.update(zip(self.results, keras.tree.flatten(outputs), strict=True))


def functional_graph(model: Any) -> keras.Model | None:
    """Return the Functional model whose calls are all that a model does.

    Args:
        model: any object.

    Returns:
        The model itself, or what a Sequential one runs; None of other objects, of a Sequential one
        that is not built, and of models with a `call` of their own.
    """
    is_sequential = isinstance(model, keras.Sequential)
    if not is_sequential and not keras_internals.is_functional(model):
        return None
    if not keras_internals.has_plain_call(model, StochasticModel):
        return None
    return keras_internals.functional_behind(model) if is_sequential else model


class Graph:
    """The calls of all layers of a model, nested models opened, in an order that works.

    A model whose `call` is its own cannot be opened; all of it counts as noisy.

    Args:
        model: a built model.
        is_noisy: whether a layer or operation counts as noisy.

    Attributes:
        nodes: Keras's nodes of all calls that the output depends on.
        noisy_nodes: those of the calls in `suffix`.
        layers: the layers and operations of `nodes`.
        noisy_layers: those of `noisy_nodes`.
        is_noisy: whether the output depends on noise.
        largest: size of the largest tensor of one example behind the first noisy layer, or a guess.
    """

    def __init__(self, model: keras.Model, is_noisy: Callable[[Any], bool]) -> None:
        self._model = model
        self._functional = functional_graph(model)
        self._before: list[_Step] = []
        self._after: list[_Step] = []
        self._noisy: set[int] = set()
        self._without_batch: set[int] = set()
        self.nodes: list[Any] = []
        self.noisy_nodes: list[Any] = []
        self.layers: list[Any] = []
        self.noisy_layers: list[Any] = []
        self.is_noisy = True
        self.largest = 4096
        if self._functional is not None:
            self._trace(self._functional, is_noisy)

    def _trace(self, functional: keras.Model, is_noisy: Callable[[Any], bool]) -> None:
        """Find the calls before the noise and those after it, and what the latter take."""
        tracer = _Tracer()
        self._outputs = tracer.open(functional, ())
        self._inputs = [tracer.number((), tensor) for tensor in functional.inputs]
        steps = _needed(tracer.steps, self._outputs)
        self._noisy = _noisy_tensors(steps, is_noisy)
        self._frontier = set(self._outputs)
        for step in steps:
            if self._noisy.isdisjoint(step.results):
                self._before.append(step)
            else:
                self._after.append(step)
                self._frontier.update(step.sources)
        self._without_batch = _without_batch(self._before, functional.inputs)
        self.nodes = [step.node for step in steps]
        self.noisy_nodes = [step.node for step in self._after]
        self.layers = [node.operation for node in self.nodes]
        self.noisy_layers = [node.operation for node in self.noisy_nodes]
        self.is_noisy = bool(self._after)
        self.largest = _largest_size(self._after)

    def prefix(self, inputs: Any, call: Call = infer) -> dict[int, Any]:
        """Run what does not depend on noise.

        Args:
            inputs: a batch, as the model takes it.
            call: how to run each layer.

        Returns:
            The tensors that the rest needs, by their numbers.
        """
        if self._functional is None:
            return {0: inputs}
        tensors = keras_internals.graph_inputs(self._functional, inputs)
        values = dict(zip(self._inputs, tensors, strict=True))
        for step in self._before:
            step.run(values, call)
        return {number: values[number] for number in self._frontier & values.keys()}

    def first(self) -> dict[Any, int]:
        """Return noisy layers whose work all draws can share, with the number of their input.

        These are called once, on one tensor that does not depend on noise, so that a part of their
        computation is the same for all draws.
        """
        shared = {}
        for step in self._after:
            layer = step.node.operation
            if not isinstance(layer, StochasticLayer) or len(step.sources) != 1:
                continue
            (source,) = step.sources
            is_called_once = self.layers.count(layer) == 1
            if source in self._noisy or not is_called_once:
                continue
            if layer.shares_work(step.node.input_tensors[0]):
                shared[layer] = source
        return shared

    def repeat(self, values: dict[int, Any], times: int | Tensor) -> dict[int, Any]:
        """Return what `prefix` returned with the examples repeated as a block.

        Args:
            values: what `prefix` returned.
            times: how often all examples come, one block after another.
        """
        repeated = {}
        for number, value in values.items():
            if number in self._without_batch:
                repeated[number] = value
            else:
                repeated[number] = keras.tree.map_structure(lambda x: _repeat(x, times), value)
        return repeated

    def suffix(self, values: dict[int, Any], call: Call = infer) -> Any:
        """Run the rest of the model.

        Args:
            values: what `prefix` or `repeat` returned.
            call: how to run each layer.

        Returns:
            The model's output, or a list of all if there are several.
        """
        if self._functional is None:
            return call(self._model, values[0])
        values = dict(values)
        for step in self._after:
            step.run(values, call)
        outputs = [values[number] for number in self._outputs]
        return outputs if len(outputs) > 1 else outputs[0]


class _Tracer:
    """Lists the calls of graphs, and numbers the tensors between them.

    A nested model that is called twice has its tensors twice: a tensor's number depends on its
    `place`, the calls of nested models around it.
    """

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self._numbers: dict[tuple[int, ...], int] = {}

    def number(self, place: tuple[int, ...], tensor: Any) -> int:
        """Return the number of a symbolic tensor, a new one the first time.

        Args:
            place: the calls of nested models around it, from the outermost on.
            tensor: a tensor of the innermost of these models.
        """
        return self._numbers.setdefault((*place, id(tensor)), len(self._numbers))

    def open(self, graph: keras.Model, place: tuple[int, ...]) -> list[int]:
        """Append the calls of a graph to `steps`, those of nested models in place of their own.

        Args:
            graph: a Functional model.
            place: the calls of nested models around it, from the outermost on.

        Returns:
            The numbers of its outputs.
        """
        for node in keras_internals.nodes_in_order(graph):
            sources = tuple(self.number(place, tensor) for tensor in node.input_tensors)
            nested = _nested(node)
            if nested is None:
                results = tuple(self.number(place, tensor) for tensor in node.outputs)
                self.steps.append(_Step(node, sources, results))
                continue
            # Inside, the inputs are the tensors that the call takes; so are the outputs outside.
            inner_place = (*place, id(node))
            self._identify(inner_place, nested.inputs, sources)
            self._identify(place, node.outputs, self.open(nested, inner_place))
        return [self.number(place, tensor) for tensor in graph.outputs]

    def _identify(
        self, place: tuple[int, ...], tensors: Sequence[Any], numbers: Sequence[int]
    ) -> None:
        """Give tensors the numbers of those that they are."""
        for tensor, number in zip(tensors, numbers, strict=True):
            self._numbers[(*place, id(tensor))] = number


def _needed(steps: Sequence[_Step], outputs: Sequence[int]) -> list[_Step]:
    """Return the calls that the outputs depend on, in the same order."""
    tensors = set(outputs)
    needed = []
    for step in reversed(steps):
        if not tensors.isdisjoint(step.results):
            tensors.update(step.sources)
            needed.append(step)
    return needed[::-1]


def _noisy_tensors(steps: Sequence[_Step], is_noisy: Callable[[Any], bool]) -> set[int]:
    """Return the tensors that depend on the result of a noisy layer."""
    noisy: set[int] = set()
    for step in steps:
        if is_noisy(step.node.operation) or not noisy.isdisjoint(step.sources):
            noisy.update(step.results)
    return noisy


def _largest_size(steps: Sequence[_Step]) -> int:
    """Return the size of the largest tensor of one example; an axis of unknown size counts as 1."""
    largest = 1
    for step in steps:
        for tensor in (*step.node.input_tensors, *step.node.outputs):
            size = math.prod(size or 1 for size in tensor.shape[1:])
            largest = max(largest, size)
    return largest


def _without_batch(steps: Sequence[_Step], inputs: Sequence[Any]) -> set[int]:
    """Return the tensors whose first axis is not that of the examples: a table of weights, say."""
    batches = {None, *(tensor.shape[0] for tensor in inputs)}
    numbers = set()
    for step in steps:
        for number, tensor in zip(step.results, step.node.outputs, strict=True):
            if not tensor.shape or tensor.shape[0] not in batches:
                numbers.add(number)
    return numbers


def _repeat(x: Tensor, times: int | Tensor) -> Tensor:
    """Return a tensor whose examples are repeated as a block, with its mask."""
    mask = keras_internals.mask_of(x)
    batch, *rest = ops.shape(x)
    blocks = ops.broadcast_to(x[None], (times, batch, *rest))
    repeated = ops.reshape(blocks, (times * batch, *rest))
    if mask is not None:
        keras_internals.set_mask(repeated, _repeat(mask, times))
    return repeated


def _nested(node: Any) -> keras.Model | None:
    """Return the graph of a nested model that is called in the plain way, or None."""
    args = node.arguments.args
    options = keras.tree.flatten(node.arguments.kwargs)
    is_plain = len(args) == 1 and all(value is None for value in options)
    graph = functional_graph(node.operation) if is_plain else None
    if graph is None:
        return None
    takes_one = len(graph.inputs) == len(node.input_tensors) == 1
    if not takes_one and not _same_structure(args[0], graph.input):
        return None
    for tensor, inner in zip(node.input_tensors, graph.inputs, strict=True):
        if len(tensor.shape) != len(inner.shape):  # Keras adds an axis; the model is left closed
            return None
    return graph


def _same_structure(first: Any, second: Any) -> bool:
    """Whether two nests of tensors have the same form."""
    try:
        keras.tree.assert_same_structure(first, second)
    except (TypeError, ValueError):
        return False
    return True
