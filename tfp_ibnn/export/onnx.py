"""Write an ONNX file."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfp_ibnn._core import files, keras_internals
from tfp_ibnn._core.extras import needs
from tfp_ibnn.export.checking import check_file_answers
from tfp_ibnn.export.frozen import check_file, converted, freeze, quietly
from tfp_ibnn.export.onnx_operations import handlers
from tfp_ibnn.export.reading import METADATA_KEY
from tfp_ibnn.export.served import Served

_OPSET = 18


def write_onnx(served: Served, path: Path, overwrite: bool) -> None:
    """Write a file for onnxruntime; see `tfp_ibnn.export`.

    Args:
        served: what the file predicts.
        path: of the file, which ends in ".onnx". It is written completely or not at all.
        overwrite: whether to replace a file.

    Raises:
        ValueError: If ONNX cannot represent what the model computes.
    """
    check_file(path, ".onnx", overwrite)
    with needs("onnx"):
        import onnx
        import onnxruntime  # noqa: F401

        with quietly():
            tf2onnx = keras_internals.tf2onnx()
    graph = freeze(served)
    model = converted("ONNX", _convert, onnx, tf2onnx, graph)
    facts = served.facts("onnx", "tf2onnx")
    onnx.helper.set_model_props(model, {METADATA_KEY: json.dumps(facts, allow_nan=False)})
    model.graph.name = served.network.name
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as temporary:
        temporary.write_bytes(model.SerializeToString())
        check_file_answers(served, temporary)


def _keep_choices(graph: Any, operations: list[Any]) -> list[Any]:
    """Keep selections between two tensors, which the converter would replace by products.

    A product with 0 is NaN where the other alternative is NaN or infinite.
    """
    for operation in operations:
        if operation.type in ("Select", "SelectV2"):
            operation.set_attr("handles_nan", True)
    return operations


@contextlib.contextmanager
def _keep_reshapes() -> Iterator[None]:
    """Keep the first of two reshapes in a row, which the converter would remove.

    In the second one's shape, 0 copies a size from the first one's output, so the first must stay.
    """
    from tf2onnx.optimizer import back_to_back_optimizer

    removals = back_to_back_optimizer._func_map
    removal = removals.pop(("Reshape",), None)
    try:
        yield
    finally:
        if removal is not None:
            removals["Reshape",] = removal


def _convert(onnx: Any, tf2onnx: Any, graph: Any) -> Any:
    """Return a graph as an ONNX model with its names; the axis of the examples is "batch"."""
    names = {tensor: name for name, tensor in graph.outputs.items()}
    inputs = {f"{name}:0": name for name in graph.specs}
    with _keep_reshapes():
        model, _ = tf2onnx.convert.from_graph_def(
            graph.definition,
            input_names=[*inputs],
            output_names=[*names],
            opset=_OPSET,
            custom_op_handlers=handlers(onnx.helper.tensor_dtype_to_np_dtype),
            custom_rewriter=[_keep_choices],
            tensors_to_rename={**inputs, **names},
        )
    for tensor in (*model.graph.input, *model.graph.output):
        axes = tensor.type.tensor_type.shape.dim
        if axes and not axes[0].HasField("dim_value"):
            axes[0].dim_param = "batch"
    onnx.checker.check_model(model)  # raises for operations that ONNX lacks
    return model
