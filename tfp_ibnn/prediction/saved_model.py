"""Write a TensorFlow SavedModel."""

import hashlib
import importlib.metadata
import itertools
import json
import keyword
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfp_ibnn._core import backend, files, keras_internals
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.prediction.wrapping import innermost

__all__ = [
    "MANIFEST",
    "write_saved_model",
]

MANIFEST = "assets.extra/tfp_ibnn.json"
"""Where an exported folder says what it holds."""


_SEED = "seed"


def write_saved_model(
    served: Any, path: str | os.PathLike, input_signature: Any, overwrite: bool
) -> Path:
    """Write a `MonteCarlo` with a seed; `tfp_ibnn.export` says what the folder holds.

    Args:
        served: the model.
        path: of a folder. It is written whole or not at all.
        input_signature: `keras.InputSpec` or arrays, where the inputs are unknown.
        overwrite: replace a folder that is not empty.
    """
    path = _free(Path(path), overwrite)
    inputs = _inputs(innermost(served), input_signature)
    with files.replacing_folder(path) as temporary:
        _write(served, inputs, temporary)
        manifest = _manifest(served, inputs, temporary)
        (temporary / MANIFEST).parent.mkdir()
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2, allow_nan=False) + "\n")
    return path


def _free(path: Path, overwrite: bool) -> Path:
    """Return the path of a folder that may be written."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"`path` must be a folder; {path} is a file.")
    if path.exists() and any(path.iterdir()):
        if not overwrite:
            raise ValueError(f"{path} is not empty: choose another folder, or overwrite it.")
        if not (path / "saved_model.pb").exists():
            raise ValueError(f"{path} holds no SavedModel: it is not overwritten.")
    return path


class _Inputs:
    """The inputs of a model by name.

    Args:
        specs: (shape, dtype) by name.
        pack: puts tensors by name into what the model is called with.
    """

    def __init__(
        self,
        specs: dict[str, tuple[tuple[int | None, ...], str]],
        pack: Callable[[dict[str, Any]], Any],
    ) -> None:
        if _SEED in specs:
            raise ValueError(
                "The model has an input named 'seed', which is a name of the signature `sample`: "
                "rename the input."
            )
        self.specs, self.pack = specs, pack


def _inputs(model: keras.Model, signature: Any) -> _Inputs:
    graph = functional_graph(model)
    if signature is None and graph is None:
        raise ValueError(
            f"The inputs of model {model.name!r} are unknown, since its `call` is its own: say "
            "input_signature={'x': keras.InputSpec(shape=(None, 3), dtype='float32')}, for example."
        )
    structure = graph.input if signature is None else signature
    if isinstance(structure, (list, tuple)) and len(structure) == 1 and signature is not None:
        structure = structure[0]  # Keras lists the arguments of `call`, of which there is one
    tensors = keras.tree.flatten(structure)
    if not tensors:
        raise ValueError(
            f"`input_signature` must hold keras.InputSpec or arrays; got {signature!r}."
        )
    if isinstance(structure, Mapping) and len(structure) == len(tensors):
        numbered = keras.tree.pack_sequence_as(structure, list(range(len(tensors))))
        names = sorted(numbered, key=numbered.get)
    else:
        names = [_name(x) for x in tensors]
    names = _make_unique([_plain(name) for name in names])
    specs = {name: _spec(x) for name, x in zip(names, tensors, strict=True)}
    if isinstance(signature, Mapping) and len(signature) == 1:  # a name, not a key
        structure = tensors[0]
    return _Inputs(
        specs,
        lambda named: keras.tree.pack_sequence_as(structure, [named[name] for name in names]),
    )


def _name(given: Any) -> str:
    """Return the name of an input layer's tensor or of a specification."""
    if isinstance(given, keras.KerasTensor):
        return keras_internals.origin(given)[0].name
    return getattr(given, "name", None) or "inputs"


def _spec(given: Any) -> tuple[tuple[int | None, ...], str]:
    """Return shape and dtype; the first axis, that of the examples, stays open in an array's."""
    if getattr(given, "shape", None) is None:
        raise ValueError(
            f"An input needs a keras.InputSpec with a shape, or an array; got {given!r}."
        )
    shape = tuple(given.shape)
    if isinstance(given, np.ndarray) or keras.ops.is_tensor(given):
        shape = (None, *shape[1:])
    return shape, keras.backend.standardize_dtype(given.dtype or "float32")


def _plain(name: str) -> str:
    """Return a name that TensorFlow takes; Keras's own, which count up, become the same for all."""
    if re.fullmatch(r"(input_layer|keras_tensor)(_\d+)?", name):
        return "inputs"
    name = re.sub(r"\W", "_", name, flags=re.ASCII)
    plain = name[:1].isalpha() and name != "self" and not keyword.iskeyword(name)
    return name if plain else f"inputs_{name}"


def _make_unique(names: list[str]) -> list[str]:
    """Number the names that occur more than once."""
    found = [name for name in names if names.count(name) == 1]
    result = []
    for name in names:
        if names.count(name) > 1:
            name = next(x for i in itertools.count() if (x := f"{name}_{i}") not in found)
            found.append(name)
        result.append(name)
    return result


def _write(served: Any, inputs: _Inputs, path: Path) -> None:
    def by_name(function: Callable[..., dict[str, Any]], *extra: str) -> Callable[..., Any]:
        def with_names(**named: Any) -> dict[str, Any]:
            more = [named.pop(name) for name in extra]
            return function(inputs.pack(named), *more)

        return with_names

    functions = {
        "serve": (by_name(served.average), inputs.specs),
        "sample": (by_name(served.draw, _SEED), {**inputs.specs, _SEED: ((), "int32")}),
        "deterministic": (by_name(served.at_mean), inputs.specs),
    }
    # The vocabularies of lookup layers, which are not variables.
    backend.save_functions(str(path), functions, keras_internals.lookup_tables(innermost(served)))


def _manifest(served: Any, inputs: _Inputs, path: Path) -> dict[str, Any]:
    written = sorted(x for x in path.rglob("*") if x.is_file())
    return {
        "format": 1,
        "model": innermost(served).name,
        "samples": served.samples,
        "sampling": served.sampling,
        "seed": served.seed,
        "inputs": {
            name: {"shape": list(shape), "dtype": dtype}
            for name, (shape, dtype) in inputs.specs.items()
        },
        "signatures": ["serve", "sample", "deterministic"],
        "versions": {
            name: importlib.metadata.version(name) for name in ("tfp_ibnn", "keras", "tensorflow")
        },
        "sha256": {
            x.relative_to(path).as_posix(): hashlib.sha256(x.read_bytes()).hexdigest()
            for x in written
        },
    }
