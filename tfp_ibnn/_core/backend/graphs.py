"""TensorFlow's graphs with all that no input changes as constants, for other runtimes."""

import collections
import hashlib
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.lite.python.convert import mlir_quantize
from tensorflow.lite.tools import flatbuffer_utils
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from tfp_ibnn._core.backend.shared import NETWORK, Function

_SIGNATURE = tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY


class FrozenGraph(NamedTuple):
    """A function as a graph without variables."""

    definition: Any  # a tf.compat.v1.GraphDef
    specs: Mapping[str, tuple]  # (shape, dtype) of the inputs by name
    outputs: Mapping[str, str]  # tensors in the graph by the names of the outputs
    operations: frozenset[str]  # the types of what is computed from inputs
    stateful: frozenset[str]  # the types of what draws random numbers or assigns in each run
    loops: frozenset[str] = frozenset()  # the types of what loops of unknown length start with
    size: int = 0  # of all constants, in bytes


def freeze_graph(function: Function, specs: Mapping[str, Any], largest: int) -> FrozenGraph:
    """Trace a function, and compute once what does not depend on its inputs.

    Args:
        function: takes tensors by name, and returns a dict of tensors.
        specs: (shape, dtype) of the inputs by name.
        largest: size in bytes that all constants together may have.

    Returns:
        The graph of what is left. Its definition is None if it assigns, has loops of unknown
        length, or is too large.
    """
    tensors = {name: tf.TensorSpec(*spec, name) for name, spec in specs.items()}
    traced = tf.function(function, autograph=False).get_concrete_function(**tensors)
    assigned = {op.type for op in traced.graph.get_operations() if op.type.startswith("Assign")}
    if assigned:
        return FrozenGraph(None, specs, {}, frozenset(), frozenset(assigned))
    size = sum(_bytes(variable) for variable in traced.graph.variables)
    if size > largest:
        return FrozenGraph(None, specs, {}, frozenset(), frozenset(), size=size)
    names = sorted(traced.structured_outputs)
    constant = convert_variables_to_constants_v2(traced, lower_control_flow=False)
    return _Folding(constant, specs, names).graph(largest)


def _bytes(tensor: Any) -> int:
    """Return the size of a tensor or variable of known shape."""
    return tensor.shape.num_elements() * tensor.dtype.size


class _Folding:
    """What of a function depends on its inputs, and what does not.

    Args:
        function: a concrete function without variables.
        specs: of its inputs by name.
        names: of its outputs, in order.
    """

    def __init__(self, function: Any, specs: Mapping[str, Any], names: Sequence[str]) -> None:
        self._graph = function.graph
        self._specs = specs
        self._outputs = dict(zip(names, function.outputs, strict=True))
        self._dependent = _consumers(tensor.op for tensor in function.inputs)
        needed = _producers(x.op for x in (*function.inputs, *function.outputs))
        self._kept = [
            op for op in self._graph.get_operations() if op in needed and op in self._dependent
        ]
        self._needed = needed
        self._nodes: dict[tuple, Any] = {}
        self._constants: dict[str, str] = {}

    def graph(self, largest: int) -> FrozenGraph:
        """Return the graph with constants in place of what does not depend on inputs."""
        fixed = self._fixed()
        # Lists of tensors, and other handles, have no value that a constant could hold.
        handles = {x.op.type for x in fixed.values() if x.dtype in (tf.variant, tf.resource)}
        if handles:
            return FrozenGraph(None, self._specs, {}, frozenset(), frozenset(), frozenset(handles))
        size = self._make_constants(fixed, largest)
        if size > largest:
            return FrozenGraph(None, self._specs, {}, frozenset(), frozenset(), size=size)
        source = self._graph.as_graph_def()
        functions = _called(source.library, [op.node_def for op in self._kept])
        definition = tf.compat.v1.GraphDef(versions=source.versions)
        definition.library.function.extend(functions)
        definition.node.extend(self._nodes.values())
        for op in self._kept:
            node = definition.node.add()
            node.CopyFrom(op.node_def)
            node.device = ""
            del node.input[:]
            node.input.extend(self._name(tensor) for tensor in op.inputs)
        outputs = {}
        for number, (name, tensor) in enumerate(self._outputs.items()):
            node = definition.node.add(name=f"tfp_ibnn_output_{number}", op="Identity")
            node.input.append(self._name(tensor))
            node.attr["T"].type = tensor.dtype.as_datatype_enum
            outputs[name] = f"{node.name}:0"
        operations = {op.type for op in self._kept}
        operations |= {node.op for function in functions for node in function.node_def}
        stateful = {name for name in operations if "Random" in name}
        stateful |= {op.type for op in self._needed if _is_random(op)}
        return FrozenGraph(
            definition,
            self._specs,
            outputs,
            frozenset(operations),
            frozenset(stateful),
            size=size,
        )

    def _fixed(self) -> dict[str, Any]:
        """Return the tensors by name that are taken from operations that are not kept."""
        tensors = {}
        taken = [tensor for op in self._kept for tensor in op.inputs]
        for tensor in (*taken, *self._outputs.values()):
            if tensor.op not in self._dependent:
                tensors[tensor.name] = tensor
        return tensors

    def _make_constants(self, tensors: dict[str, Any], largest: int) -> int:
        """Compute tensors, equal values once, and return their size in bytes.

        Args:
            tensors: by name.
            largest: size at which to stop.
        """
        size = 0
        with tf.compat.v1.Session(graph=self._graph) as session:
            values = session.run(tensors)
        for name, value in values.items():
            value = np.asarray(value)
            digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).digest()
            content = (tensors[name].dtype, value.shape, digest)
            if content not in self._nodes:
                size += value.nbytes
                if size > largest:
                    return size
                node = tf.compat.v1.NodeDef(
                    name=f"tfp_ibnn_constant_{len(self._nodes)}", op="Const"
                )
                node.attr["dtype"].type = tensors[name].dtype.as_datatype_enum
                proto = tf.make_tensor_proto(value, tensors[name].dtype)
                node.attr["value"].tensor.CopyFrom(proto)
                self._nodes[content] = node
            self._constants[name] = self._nodes[content].name
        return size

    def _name(self, tensor: Any) -> str:
        """Return what an operation that takes a tensor has in its list of inputs."""
        return self._constants.get(tensor.name, tensor.name)


def _consumers(operations: Iterable[Any]) -> set[Any]:
    """Return operations and all that compute with their results."""
    found = set()
    waiting = collections.deque(operations)
    while waiting:
        op = waiting.popleft()
        if op not in found:
            found.add(op)
            for tensor in op.outputs:
                waiting.extend(tensor.consumers())
    return found


def _producers(operations: Iterable[Any]) -> set[Any]:
    """Return operations and all whose results they compute with."""
    found = set()
    waiting = collections.deque(operations)
    while waiting:
        op = waiting.popleft()
        if op not in found:
            found.add(op)
            waiting.extend(tensor.op for tensor in op.inputs)
    return found


def _called(library: Any, nodes: Iterable[Any]) -> list[Any]:
    """Return the functions of a library that nodes call, and those that these call."""
    known = {function.signature.name: function for function in library.function}
    called = {}
    waiting = list(nodes)
    while waiting:
        for value in waiting.pop().attr.values():
            for name in (value.func.name, *(part.name for part in value.list.func)):
                if name in known and name not in called:
                    called[name] = known[name]
                    waiting.extend(known[name].node_def)
    return list(called.values())


def _is_random(op: Any) -> bool:
    return "Random" in op.type and op.op_def.is_stateful


def litert_of(
    graph: FrozenGraph, quantization: str | None, examples: Sequence[Mapping[str, Any]]
) -> bytes:
    """Return a graph as a LiteRT file, with a signature that has its names.

    Args:
        graph: what to convert.
        quantization: None, "dynamic", "float16" or "int8".
        examples: inputs by name, one after another, by which "int8" chooses its ranges.
    """
    with tempfile.TemporaryDirectory() as folder:
        module = tf.Module()
        module.serve = tf.function(lambda **tensors: _run(graph, tensors), autograph=False)
        tensors = {name: tf.TensorSpec(*spec, name) for name, spec in graph.specs.items()}
        signature = module.serve.get_concrete_function(**tensors)
        tf.saved_model.save(module, folder, signatures={_SIGNATURE: signature})
        converter = tf.lite.TFLiteConverter.from_saved_model(folder)
        if quantization is not None:
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
        if quantization == "float16":
            converter.target_spec.supported_types = [tf.float16]
        if quantization == "int8":
            converter.representative_dataset = lambda: iter(examples)
            return _with_whole_numbers(converter)
        return converter.convert()


def _with_whole_numbers(converter: Any) -> bytes:
    """Return a file whose network computes in 8 bits, and what follows from its outputs in 32.

    Entropies, variances and logarithms of probabilities in 8 bits would be worth nothing.
    """
    converter._experimental_calibrate_only = True
    calibrated = converter.convert()
    (graph,) = flatbuffer_utils.read_model_from_bytearray(bytearray(calibrated)).subgraphs
    is_of_network = re.compile(rf"\b{NETWORK}(_\d+)?/").search
    names = [tensor.name.decode() for tensor in graph.tensors]
    others = [name for name in names if not is_of_network(name)]
    return mlir_quantize(calibrated, denylisted_nodes=others)


def _run(graph: FrozenGraph, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the outputs by name for inputs by name."""
    results = tf.graph_util.import_graph_def(
        graph.definition,
        input_map={f"{name}:0": tensor for name, tensor in tensors.items()},
        return_elements=list(graph.outputs.values()),
        name="",
    )
    return dict(zip(graph.outputs, results, strict=True))


def load_function(path: str, signature: str) -> Function:
    """Return a function of a SavedModel: it takes arrays by name, and returns arrays by name.

    Args:
        path: of the folder.
        signature: which of its functions.
    """
    module = tf.saved_model.load(path)
    loaded = module.signatures[signature]

    def run(**arrays: Any) -> dict[str, np.ndarray]:
        tensors = {name: tf.constant(array) for name, array in arrays.items()}
        outputs = loaded(**tensors)
        return {name: output.numpy() for name, output in outputs.items()}

    run.module = module  # whose variables live as long as it does
    return run
