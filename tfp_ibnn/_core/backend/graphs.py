"""TensorFlow's graphs with all that no input changes as constants, for other runtimes."""

import collections
import hashlib
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.lite.python.convert import mlir_quantize
from tensorflow.lite.tools import flatbuffer_utils
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from tfp_ibnn._core.backend.shared import NETWORK, Function

_SIGNATURE = tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY


class FrozenGraph(NamedTuple):
    """A function as a graph without variables, or why there is none."""

    specs: Mapping[str, tuple]  # (shape, dtype) of the inputs by name
    definition: Any = None  # a tf.compat.v1.GraphDef
    outputs: Mapping[str, str] = MappingProxyType({})  # tensors in the graph, by the outputs' names
    operations: frozenset[str] = frozenset()  # the types of what is computed from inputs
    stateful: frozenset[str] = frozenset()  # of what draws random numbers or assigns in each run
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
    traced = _traced(function, specs)
    assigned = _assignments(traced.graph)
    if assigned:
        return FrozenGraph(specs, stateful=assigned)
    size = _size_of_variables(traced.graph)
    if size > largest:
        return FrozenGraph(specs, size=size)
    parts = _split(traced)
    handles = _handles(parts.fixed.values())
    if handles:
        return FrozenGraph(specs, loops=handles)
    constants = _computed(parts.graph, parts.fixed, largest)
    if constants.size > largest:
        return FrozenGraph(specs, size=constants.size)
    return _joined(specs, parts, constants)


def _traced(function: Function, specs: Mapping[str, Any]) -> Any:
    """Return the concrete function of inputs by name."""
    tensors = {name: tf.TensorSpec(*spec, name) for name, spec in specs.items()}
    return tf.function(function, autograph=False).get_concrete_function(**tensors)


def _assignments(graph: Any) -> frozenset[str]:
    """Return the types of the operations that change variables."""
    types = {op.type for op in graph.get_operations()}
    return frozenset(name for name in types if name.startswith("Assign"))


def _size_of_variables(graph: Any) -> int:
    """Return the size of all variables that a graph reads, in bytes."""
    size = 0
    for variable in graph.variables:
        size += variable.shape.num_elements() * variable.dtype.size
    return size


class _Parts(NamedTuple):
    """A graph without variables, cut where what depends on no input is used."""

    graph: Any
    outputs: dict[str, Any]  # tensors by the names of the function's outputs
    needed: set[Any]  # the operations that inputs or outputs depend on
    kept: list[Any]  # those of them that depend on inputs, in order
    fixed: dict[str, Any]  # the tensors that these or the outputs take from all others, by name


def _split(traced: Any) -> _Parts:
    """Return the parts of a concrete function: what depends on its inputs, and what does not."""
    function = convert_variables_to_constants_v2(traced, lower_control_flow=False)
    names = sorted(traced.structured_outputs)
    outputs = dict(zip(names, function.outputs, strict=True))
    ends = [*function.inputs, *function.outputs]
    needed = _producers(tensor.op for tensor in ends)
    dependent = _consumers(tensor.op for tensor in function.inputs)
    wanted = needed & dependent
    operations = function.graph.get_operations()
    kept = [op for op in operations if op in wanted]
    fixed = _taken(kept, outputs.values(), dependent)
    return _Parts(function.graph, outputs, needed, kept, fixed)


def _taken(kept: Iterable[Any], outputs: Iterable[Any], dependent: set[Any]) -> dict[str, Any]:
    """Return what kept operations and outputs take of tensors that depend on no input, by name.

    Args:
        kept: operations.
        outputs: tensors.
        dependent: the operations that depend on inputs.
    """
    fixed = {}
    taken = [tensor for op in kept for tensor in op.inputs]
    for tensor in (*taken, *outputs):
        if tensor.op not in dependent:
            fixed[tensor.name] = tensor
    return fixed


def _handles(tensors: Iterable[Any]) -> frozenset[str]:
    """Return the types of what makes lists of tensors and the like, which no constant can hold."""
    return frozenset(x.op.type for x in tensors if x.dtype in (tf.variant, tf.resource))


class _Constants(NamedTuple):
    """Computed values as nodes of a graph."""

    nodes: list[Any]  # one for each value that differs from the others
    names: dict[str, str]  # of these nodes, by the names of the tensors
    size: int  # in bytes; if it is over the limit, values are missing


def _computed(graph: Any, tensors: Mapping[str, Any], largest: int) -> _Constants:
    """Compute tensors, and return equal values once.

    Args:
        graph: of the tensors.
        tensors: by name.
        largest: size at which to stop.
    """
    with tf.compat.v1.Session(graph=graph) as session:
        values = session.run(dict(tensors))
    nodes: dict[tuple, Any] = {}
    names: dict[str, str] = {}
    size = 0
    for name, result in values.items():
        value = np.asarray(result)
        content = _content(value, tensors[name].dtype)
        if content not in nodes:
            size += value.nbytes
            if size > largest:
                break
            nodes[content] = _constant_node(len(nodes), value, tensors[name].dtype)
        names[name] = nodes[content].name
    return _Constants(list(nodes.values()), names, size)


def _content(value: np.ndarray, dtype: Any) -> tuple[Any, ...]:
    """Return what is the same for equal values only."""
    digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).digest()
    return dtype, value.shape, digest


def _constant_node(number: int, value: np.ndarray, dtype: Any) -> Any:
    """Return the node of a constant, whose name has a number."""
    node = tf.compat.v1.NodeDef(name=f"tfp_ibnn_constant_{number}", op="Const")
    node.attr["dtype"].type = dtype.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
    return node


def _joined(specs: Mapping[str, Any], parts: _Parts, constants: _Constants) -> FrozenGraph:
    """Return the graph with constants in place of what does not depend on inputs."""
    source = parts.graph.as_graph_def()
    functions = _called(source.library, [op.node_def for op in parts.kept])
    definition = tf.compat.v1.GraphDef(versions=source.versions)
    definition.library.function.extend(functions)
    definition.node.extend(constants.nodes)
    for op in parts.kept:
        _add_operation(definition, op, constants.names)
    operations = {op.type for op in parts.kept}
    operations |= {node.op for function in functions for node in function.node_def}
    return FrozenGraph(
        specs,
        definition,
        outputs=_add_outputs(definition, parts.outputs, constants.names),
        operations=frozenset(operations),
        stateful=_random_types(operations, parts.needed),
        size=constants.size,
    )


def _add_operation(definition: Any, op: Any, constants: Mapping[str, str]) -> None:
    """Add an operation to a graph; what it takes may be a constant, by the tensor's name."""
    node = definition.node.add()
    node.CopyFrom(op.node_def)
    node.device = ""
    del node.input[:]
    names = [tensor.name for tensor in op.inputs]
    node.input.extend(constants.get(name, name) for name in names)


def _add_outputs(
    definition: Any, tensors: Mapping[str, Any], constants: Mapping[str, str]
) -> dict[str, str]:
    """Add an operation for each output to a graph, and return the names of their tensors."""
    outputs = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        node = definition.node.add(name=f"tfp_ibnn_output_{number}", op="Identity")
        node.input.append(constants.get(tensor.name, tensor.name))
        node.attr["T"].type = tensor.dtype.as_datatype_enum
        outputs[name] = f"{node.name}:0"
    return outputs


def _random_types(operations: Iterable[str], needed: Iterable[Any]) -> frozenset[str]:
    """Return the types of what draws random numbers in each run, or drew those of a constant."""
    in_each_run = {name for name in operations if "Random" in name}
    once = {op.type for op in needed if "Random" in op.type and op.op_def.is_stateful}
    return frozenset(in_each_run | once)


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
