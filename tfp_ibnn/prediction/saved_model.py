"""Write a TensorFlow SavedModel."""

import hashlib
import importlib
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
from tfp_ibnn.conversion.wrappers import innermost

MANIFEST = "assets.extra/tfp_ibnn.json"
"""The manifest of an exported folder."""


_Spec = tuple[tuple[int | None, ...], str]  # shape and dtype


def write_saved_model(
    served: Any, path: str | os.PathLike, input_signature: Any, overwrite: bool
) -> Path:
    """Write what has `serve`, around a `MonteCarlo` with a seed; `tfp_ibnn.export` describes it."""
    path, serve = Path(path), served.serve
    if path.exists() and not path.is_dir():
        raise ValueError(f"`path` must be a folder; {path} is a file.")
    if path.exists() and any(path.iterdir()):
        if not overwrite:
            raise ValueError(f"{path} is not empty: choose another folder, or overwrite it.")
        if not (path / "saved_model.pb").exists():
            raise ValueError(f"{path} holds no SavedModel: it is not overwritten.")
    network = innermost(served)
    served = served if hasattr(served, "sampling") else served.inner
    specs, pack = _inputs(network, input_signature)
    with_seed = {**specs, "seed": ((), "int32")}
    functions = {
        "serve": (lambda **named: _flat(serve(pack(named))), specs),
        "sample": (lambda seed, **named: _flat(served.draw(pack(named), seed)), with_seed),
        "deterministic": (lambda **named: _flat(served.at_mean(pack(named))), specs),
    }
    packages = ("tfp_ibnn", "keras", "tensorflow")
    with files.replacing_folder(path) as folder:
        # The vocabularies of lookup layers are not variables.
        backend.save_functions(str(folder), functions, keras_internals.lookup_tables(network))
        manifest = {
            "format": 1,
            "model": network.name,
            "samples": served.samples,
            "sampling": served.sampling,
            "seed": served.seed,
            "inputs": {x: {"shape": list(s), "dtype": dtype} for x, (s, dtype) in specs.items()},
            "signatures": list(functions),
            "versions": {name: importlib.import_module(name).__version__ for name in packages},
            "sha256": {
                x.relative_to(folder).as_posix(): hashlib.sha256(x.read_bytes()).hexdigest()
                for x in sorted(folder.rglob("*"))
                if x.is_file()
            },
        }
        (folder / MANIFEST).parent.mkdir()
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, allow_nan=False) + "\n")
    return path


def _flat(prediction: dict[str, Any]) -> dict[str, Any]:
    """Return a prediction in one dict: of the output "digit", say, "digit_mean" and the like."""
    parts = {k: v if isinstance(v, dict) else {None: v} for k, v in prediction.items()}
    named = [(f"{k}_{x}" if x else k, v) for k, part in parts.items() for x, v in part.items()]
    if len(dict(named)) < len(named):
        raise ValueError(f"Rename outputs: some of {[*prediction]} cannot be told apart in a file.")
    return dict(named)


def _inputs(model: keras.Model, signature: Any) -> tuple[dict[str, _Spec], Callable[..., Any]]:
    """Return the inputs by name, and what makes of such tensors what the model is called with."""
    graph = functional_graph(model)
    if signature is None and graph is None:
        like = "input_signature={'x': keras.InputSpec(shape=(None, 3), dtype='float32')}"
        raise ValueError(f"The inputs of model {model.name!r} are unknown: give them, like {like}.")
    structure = graph.input if signature is None else signature
    if isinstance(structure, (list, tuple)) and len(structure) == 1 and signature is not None:
        structure = structure[0]  # Keras lists the arguments of `call`, of which there is one
    tensors = keras.tree.flatten(structure)
    if not tensors:
        raise ValueError(f"`input_signature` must hold InputSpec or arrays; got {signature!r}.")
    if isinstance(structure, Mapping) and len(structure) == len(tensors):
        names = [name for (name, *_), _ in keras.tree.flatten_with_path(structure)]
    else:
        names = [getattr(x, "name", None) or "inputs" for x in tensors]
    names = [_plain(name) for name in names]
    numbered = [f"{name}_{names[:i].count(name)}" for i, name in enumerate(names)]
    names = [y if names.count(x) > 1 else x for x, y in zip(names, numbered, strict=True)]
    if "seed" in names or len(set(names)) < len(names):
        problem = "must have different names in a file, and none the name 'seed' of its own input"
        raise ValueError(f"The inputs {problem}; got {names}.")
    specs = {name: _spec(x) for name, x in zip(names, tensors, strict=True)}
    if isinstance(signature, Mapping) and len(signature) == 1:  # a name, not a key
        structure = tensors[0]
    pack = keras.tree.pack_sequence_as
    return specs, lambda named: pack(structure, [named[name] for name in names])


def _spec(given: Any) -> _Spec:
    """Return shape and dtype; the first axis, that of the examples, stays open in an array's."""
    if getattr(given, "shape", None) is None:
        raise ValueError(f"An input needs an InputSpec with a shape, or an array; got {given!r}.")
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
