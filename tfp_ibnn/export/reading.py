"""Exported files, each in its own runtime."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfp_ibnn._core import backend
from tfp_ibnn._core.extras import needs
from tfp_ibnn.export.saved_model import MANIFEST

METADATA_KEY = "tfp_ibnn"
"""The entry of a file's metadata with the facts as JSON: in ONNX one of `metadata_props`."""


class Exported(NamedTuple):
    """A file written by `tfp_ibnn.export`, ready to run."""

    run: Callable[..., dict[str, np.ndarray]]  # of arrays by the names of the inputs
    facts: dict[str, Any]  # its metadata

    def predict(self, x: Any, batch_size: int) -> dict[str, np.ndarray]:
        """Return all outputs by name.

        Args:
            x: inputs: an array; for several inputs, a dict by name or a list in their order.
            batch_size: number of examples at a time.

        Returns:
            Arrays (N, ...).
        """
        arrays = self._named(x)
        counts = {name: len(array) for name, array in arrays.items()}
        count = next(iter(counts.values()))
        if set(counts.values()) == {0}:
            raise ValueError("`x` holds no examples.")
        if set(counts.values()) != {count}:
            raise ValueError(
                f"`x` must hold the same number of examples of each input; got {counts}."
            )
        batches = []
        for start in range(0, count, batch_size):
            examples = slice(start, start + batch_size)
            batch = {name: array[examples] for name, array in arrays.items()}
            batches.append(self.run(**batch))
        outputs = {}
        for name in batches[0]:
            parts = [batch[name] for batch in batches]
            outputs[name] = np.concatenate(parts)
        return outputs

    def _named(self, x: Any) -> dict[str, np.ndarray]:
        """Return inputs by name, with the dtypes that the file takes."""
        specs = self.facts["inputs"]
        names = list(specs)
        if isinstance(x, Mapping):
            parts = dict(x)
        elif isinstance(x, (list, tuple)) and len(names) > 1:
            if len(x) != len(names):
                raise ValueError(f"`x` must hold the inputs {names}; got {len(x)} arrays.")
            parts = dict(zip(names, x, strict=True))
        else:
            parts = {names[0]: x}
        if sorted(parts) != sorted(names):
            raise ValueError(f"`x` must hold the inputs {names}; got {sorted(parts)}.")
        return {name: _array(parts[name], specs[name]["dtype"]) for name in names}


def _array(x: Any, dtype: str) -> np.ndarray:
    """Return an input as an array of the dtype that a file takes; texts are "string" there."""
    return np.asarray(x, object if dtype == "string" else dtype)


def open_exported(path: str | os.PathLike) -> Exported:
    """Open an exported file in the runtime that its suffix names.

    Args:
        path: of an ".onnx" or ".tflite" file, or of the folder of a SavedModel.

    Raises:
        ValueError: If it was not written by `tfp_ibnn.export`.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"There is nothing at {path}.")
    openers = {".onnx": _open_onnx, ".tflite": _open_litert}
    run, text = openers.get(path.suffix, _open_saved_model)(path)
    if text is None:
        raise ValueError(f"{path} was not written by ibnn.export: it lacks its metadata.")
    return Exported(run, json.loads(text))


def _open_onnx(path: Path) -> tuple[Callable[..., Any], str | None]:
    with needs("onnx"):
        import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(**arrays: np.ndarray) -> dict[str, np.ndarray]:
        return dict(zip(names, session.run(names, arrays), strict=True))

    return run, session.get_modelmeta().custom_metadata_map.get(METADATA_KEY)


def _open_litert(path: Path) -> tuple[Callable[..., Any], str | None]:
    with needs("litert"):
        from ai_edge_litert.interpreter import Interpreter

    content = path.read_bytes()
    interpreter = Interpreter(model_content=content)
    return interpreter.get_signature_runner(), _litert_facts(content)


def _litert_facts(content: bytes) -> str | None:
    """Return the facts of a file, or None if this library has not written it."""
    from ai_edge_litert import schema_py_generated as schema

    model = schema.Model.GetRootAs(content, 0)
    for place in range(model.MetadataLength()):
        entry = model.Metadata(place)
        if entry.Name() == METADATA_KEY.encode():
            return model.Buffers(entry.Buffer()).DataAsNumpy().tobytes().decode()
    return None


def _open_saved_model(path: Path) -> tuple[Callable[..., Any], str | None]:
    manifest = path / MANIFEST
    if not manifest.exists():
        raise ValueError(f"{path} was not written by ibnn.export: it lacks {MANIFEST}.")
    return backend.load_function(str(path), "serve"), manifest.read_text()
