"""Write a LiteRT file."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfp_ibnn._core import backend, checks, files, keras_internals
from tfp_ibnn._core.extras import needs
from tfp_ibnn.export.checking import check_file_answers
from tfp_ibnn.export.frozen import check_file, converted, freeze
from tfp_ibnn.export.inputs import Inputs
from tfp_ibnn.export.reading import METADATA_KEY
from tfp_ibnn.export.served import Served

QUANTIZATIONS = ("dynamic", "float16", "int8")


def write_litert(
    served: Served,
    path: Path,
    overwrite: bool,
    quantization: str | None = None,
    representative_data: Any = None,
) -> None:
    """Write a file for LiteRT; see `tfp_ibnn.export`.

    Args:
        served: what the file predicts.
        path: of the file, which ends in ".tflite". It is written completely or not at all.
        overwrite: whether to replace a file.
        quantization: None, "dynamic", "float16" or "int8".
        representative_data: inputs, arrays as the model takes them, for "int8".

    Raises:
        ValueError: If LiteRT cannot represent what the model computes.
    """
    check_file(path, ".tflite", overwrite)
    if quantization is not None:
        checks.one_of("quantization", quantization, QUANTIZATIONS)
    examples = _examples(served.inputs, quantization, representative_data)
    with needs("litert"):
        import ai_edge_litert  # noqa: F401
    _check_precision(served)
    graph = freeze(served)
    content = converted("LiteRT", backend.litert_of, graph, quantization, examples)
    facts = {**served.facts("ai_edge_litert"), "quantization": quantization}
    content = _with_metadata(content, json.dumps(facts, allow_nan=False))
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as temporary:
        temporary.write_bytes(content)
        check_file_answers(served, temporary, is_exact=quantization is None)


def _check_precision(served: Served) -> None:
    """Raise for a model that computes in float64."""
    types = {spec.dtype for spec in served.inputs.specs.values()}
    types |= {layer.compute_dtype for layer in keras_internals.nested_layers(served.model)}
    if "float64" in types:
        raise ValueError(
            f"Model {served.network.name!r} has inputs or layers in float64, which LiteRT cannot "
            "compute in: build it with dtype='float32', or export ONNX or a SavedModel."
        )


def _examples(inputs: Inputs, quantization: str | None, data: Any) -> list[dict[str, Any]]:
    """Return single examples of inputs by name, or raise if they are needed and missing."""
    if quantization != "int8":
        if data is not None:
            raise ValueError(
                "`representative_data` is for quantization='int8'; `quantization` is "
                f"{quantization!r}."
            )
        return []
    if data is None:
        raise ValueError(
            "quantization='int8' needs `representative_data`, a few hundred typical inputs: give "
            "representative_data=x_train[:200]."
        )
    return list(_one_by_one(inputs, data))


def _one_by_one(inputs: Inputs, data: Any) -> Iterator[dict[str, Any]]:
    """Yield single examples of arrays."""
    names = [*inputs.specs]
    if isinstance(data, Mapping) and sorted(data) == sorted(names):
        parts = [data[name] for name in names]  # by name, whatever order the model has them in
    else:
        parts = keras.tree.flatten(data)
    arrays = [np.asarray(part) for part in parts]
    if len(arrays) != len(names):
        raise ValueError(
            f"`representative_data` must hold an array for each of the inputs {names}; "
            f"got {len(arrays)}."
        )
    lengths = [len(array) for array in arrays]
    if len(set(lengths)) > 1:
        raise ValueError(
            "`representative_data` must hold the same number of examples of each input; got "
            f"{dict(zip(names, lengths, strict=True))}."
        )
    for place in range(lengths[0]):
        example = {}
        for name, array in zip(names, arrays, strict=True):
            one = array[place : place + 1]
            example[name] = one.astype(inputs.specs[name].dtype)
        yield example


def _with_metadata(content: bytes, text: str) -> bytes:
    """Return a file with an entry in its metadata."""
    from ai_edge_litert import schema_py_generated as schema
    from ai_edge_litert.tools import flatbuffer_utils

    model = flatbuffer_utils.read_model_from_bytearray(bytearray(content))
    buffer = schema.BufferT()
    buffer.data = np.frombuffer(text.encode(), "uint8")
    entry = schema.MetadataT()
    entry.name = METADATA_KEY
    entry.buffer = len(model.buffers)
    model.buffers.append(buffer)
    model.metadata = [*(model.metadata or ()), entry]
    return flatbuffer_utils.convert_object_to_bytearray(model)
