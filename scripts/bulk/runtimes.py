"""Exported files in their runtimes, without the library that wrote them."""

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from apache_beam.io.filesystems import FileSystems

KEY = "tfp_ibnn"
"""Of the metadata inside a file."""

MANIFEST = "assets.extra/tfp_ibnn.json"
"""Of a SavedModel."""


_Opened = tuple[Callable[..., Any], list[str], str | None]
"""A function of arrays by name, the names of its outputs, and the metadata if there are any."""


@dataclasses.dataclass
class Model:
    """An exported file, ready to run on one thread."""

    run: Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]
    """Of a batch of each input by name; returns all outputs by name."""
    outputs: list[str]
    facts: dict[str, Any]
    digest: str
    """SHA-256 of the content."""


def open_model(path: str) -> Model:
    """Open an exported file, wherever it is stored.

    Args:
        path: of an ".onnx" or ".tflite" file, or of the folder of a SavedModel.

    Raises:
        ValueError: If it is not such a file.
    """
    openers = {".onnx": _open_onnx, ".tflite": _open_litert}
    opener = openers.get(os.path.splitext(path)[1], _open_saved_model)
    with tempfile.TemporaryDirectory() as folder:
        place = _local(path, Path(folder))
        try:
            run, outputs, text = opener(place)
        except ImportError:
            raise
        except Exception as error:  # each runtime has its own
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(f"{path} cannot be opened: {lines[0]}") from error
        digest = _digest(place)
    if text is None:
        raise ValueError(f"{path} was not written by `python -m tfp_ibnn export`.")
    return Model(run, outputs, json.loads(text), digest)


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of all files of a folder."""
    digest = hashlib.sha256()
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    for file in files:
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _local(path: str, folder: Path) -> Path:
    """Return a path on this machine."""
    if Path(path).exists():
        return Path(path)
    copy = folder / os.path.basename(path.rstrip("/"))
    found = FileSystems.match([path, f"{path.rstrip('/')}/**"])
    files = [entry.path for match in found for entry in match.metadata_list]
    if not files:
        raise ValueError(f"No model found at {path}.")
    for file in files:
        place = copy / os.path.relpath(file, path)
        place.parent.mkdir(parents=True, exist_ok=True)
        with FileSystems.open(file, compression_type="uncompressed") as source:
            place.write_bytes(source.read())
    return copy


def _open_onnx(path: Path) -> _Opened:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        path.read_bytes(), options, providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]

    def run(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(names, session.run(names, dict(arrays)), strict=True))

    return run, names, session.get_modelmeta().custom_metadata_map.get(KEY)


def _open_litert(path: Path) -> _Opened:
    from ai_edge_litert import schema_py_generated as schema
    from ai_edge_litert.interpreter import Interpreter

    content = path.read_bytes()
    runner = Interpreter(model_content=content, num_threads=1).get_signature_runner()
    model = schema.Model.GetRootAs(content, 0)
    entries = [model.Metadata(place) for place in range(model.MetadataLength())]
    texts = [model.Buffers(x.Buffer()).DataAsNumpy() for x in entries if x.Name() == KEY.encode()]
    text = texts[0].tobytes().decode() if texts else None
    return lambda arrays: runner(**arrays), list(runner.get_output_details()), text


def _open_saved_model(path: Path) -> _Opened:
    manifest = path / MANIFEST
    if not manifest.exists():
        raise ValueError(f"{path} is neither an .onnx or .tflite file nor an exported SavedModel.")
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    module = tf.saved_model.load(str(path))
    serve = module.signatures["serve"]

    def run(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        tensors = {name: tf.constant(values) for name, values in arrays.items()}
        return {name: value.numpy() for name, value in serve(**tensors).items()}

    run.module = module  # whose variables live as long as it does
    return run, list(serve.structured_outputs), manifest.read_text()
