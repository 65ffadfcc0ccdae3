"""Write a TensorFlow SavedModel."""

import hashlib
import importlib
import json
import keyword
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from tfp_ibnn._core import backend, files, keras_internals
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.conversion.wrappers import innermost

MANIFEST = "assets.extra/tfp_ibnn.json"
"""The manifest of an exported folder."""

_PACKAGES = ("tfp_ibnn", "keras", "tensorflow")
"""Whose versions the manifest has."""


class _Spec(NamedTuple):
    """What an input of a signature is."""

    shape: tuple[int | None, ...]
    dtype: str


class _Inputs(NamedTuple):
    """The inputs of a model as a signature has them: tensors by name."""

    specs: dict[str, _Spec]
    structure: Any  # how the model takes them

    def pack(self, tensors: Mapping[str, Any]) -> Any:
        """Return what the model is called with."""
        in_order = [tensors[name] for name in self.specs]
        return keras.tree.pack_sequence_as(self.structure, in_order)


def write_saved_model(
    served: Any, path: str | os.PathLike, input_signature: Any, overwrite: bool
) -> Path:
    """Write what has `serve` as a folder that TensorFlow loads; see `tfp_ibnn.export`.

    Args:
        served: a `MonteCarlo` with a seed, or a decision whose `inner` is one.
        path: of the folder. It is written whole or not at all.
        input_signature: `keras.InputSpec` or arrays, by name or in a list; None takes those of the
            model's graph.
        overwrite: replace a folder that is not empty, if a SavedModel is in it.

    Returns:
        The path.

    Raises:
        ValueError: If something else is at the path, or the inputs are unknown or cannot be named.
    """
    path = Path(path)
    _check_replaceable(path, overwrite)
    network = innermost(served)
    average = served if hasattr(served, "sampling") else served.inner
    inputs = _inputs(network, input_signature)
    functions = _signatures(served.serve, average, inputs)
    # The vocabularies of lookup layers are not variables.
    tables = keras_internals.lookup_tables(network)
    with files.replacing_folder(path) as folder:
        backend.save_functions(str(folder), functions, tables)
        manifest = {
            "format": 1,
            "model": network.name,
            "samples": average.samples,
            "sampling": average.sampling,
            "seed": average.seed,
            "inputs": {
                name: {"shape": list(spec.shape), "dtype": spec.dtype}
                for name, spec in inputs.specs.items()
            },
            "signatures": list(functions),
            "versions": {name: importlib.import_module(name).__version__ for name in _PACKAGES},
            "sha256": _checksums(folder),
        }
        text = json.dumps(manifest, indent=2, allow_nan=False)
        manifest_path = folder / MANIFEST
        manifest_path.parent.mkdir()
        manifest_path.write_text(text + "\n")
    return path


def _check_replaceable(path: Path, overwrite: bool) -> None:
    """Raise if writing a folder would destroy what should stay."""
    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(f"`path` must be a folder; {path} is a file.")
    is_empty = not any(path.iterdir())
    if is_empty:
        return
    if not overwrite:
        raise ValueError(f"{path} is not empty: choose another folder, or overwrite it.")
    if not (path / "saved_model.pb").exists():
        raise ValueError(f"{path} holds no SavedModel: it is not overwritten.")


def _signatures(serve: Callable[[Any], dict], average: Any, inputs: _Inputs) -> dict[str, tuple]:
    """Return the functions of the file by name, each with the specs of its arguments."""
    specs = inputs.specs
    with_seed = {**specs, "seed": _Spec((), "int32")}

    def serve_named(**tensors: Any) -> dict[str, Any]:
        return _flat(serve(inputs.pack(tensors)))

    def sample_named(seed: Any, **tensors: Any) -> dict[str, Any]:
        return _flat(average.draw(inputs.pack(tensors), seed))

    def mean_named(**tensors: Any) -> dict[str, Any]:
        return _flat(average.at_mean(inputs.pack(tensors)))

    return {
        "serve": (serve_named, specs),
        "sample": (sample_named, with_seed),
        "deterministic": (mean_named, specs),
    }


def _checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file by its path in the folder."""
    checksums = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            checksums[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return checksums


def _flat(prediction: dict[str, Any]) -> dict[str, Any]:
    """Return a prediction in one dict: of the output "digit", say, "digit_mean" and the like."""
    flat = {}
    for name, value in prediction.items():
        entries = {name: value}
        if isinstance(value, dict):
            entries = {f"{name}_{key}": part for key, part in value.items()}
        if flat.keys() & entries.keys():
            raise ValueError(
                f"Rename outputs: some of {[*prediction]} cannot be told apart in a file."
            )
        flat |= entries
    return flat


def _inputs(model: keras.Model, signature: Any) -> _Inputs:
    """Return the inputs of a model; those of a signature, if it is given."""
    structure = _structure(model, signature)
    tensors = keras.tree.flatten(structure)
    if not tensors:
        raise ValueError(f"`input_signature` must hold InputSpec or arrays; got {signature!r}.")
    names = _names(structure, tensors)
    if "seed" in names or len(set(names)) < len(names):
        raise ValueError(
            "The inputs must have different names in a file, and none the name 'seed' of its own "
            f"input; got {names}."
        )
    specs = {name: _spec(tensor) for name, tensor in zip(names, tensors, strict=True)}
    if isinstance(signature, Mapping) and len(signature) == 1:  # a name, not a key
        structure = tensors[0]
    return _Inputs(specs, structure)


def _structure(model: keras.Model, signature: Any) -> Any:
    """Return what the model is called with, of specs, arrays or symbolic tensors."""
    if signature is None:
        graph = functional_graph(model)
        if graph is None:
            raise ValueError(
                f"The inputs of model {model.name!r} are unknown: give them, like "
                "input_signature={'x': keras.InputSpec(shape=(None, 3), dtype='float32')}."
            )
        return graph.input
    if isinstance(signature, (list, tuple)) and len(signature) == 1:
        return signature[0]  # Keras lists the arguments of `call`, of which there is one
    return signature


def _names(structure: Any, tensors: list) -> list[str]:
    """Return a name for each input, with a number where several would have the same."""
    if isinstance(structure, Mapping) and len(structure) == len(tensors):
        paths = keras.tree.flatten_with_path(structure)
        names = [_name_in_file(path[0]) for path, _ in paths]
    else:
        names = [_name_in_file(getattr(x, "name", None) or "inputs") for x in tensors]
    numbered = []
    for place, name in enumerate(names):
        if names.count(name) > 1:
            earlier = names[:place].count(name)
            name = f"{name}_{earlier}"
        numbered.append(name)
    return numbered


def _spec(tensor: Any) -> _Spec:
    """Return shape and dtype; the first axis, that of the examples, stays open in an array's."""
    if getattr(tensor, "shape", None) is None:
        raise ValueError(f"An input needs an InputSpec with a shape, or an array; got {tensor!r}.")
    shape = tuple(tensor.shape)
    if isinstance(tensor, np.ndarray) or keras.ops.is_tensor(tensor):
        shape = (None, *shape[1:])
    dtype = keras.backend.standardize_dtype(tensor.dtype or "float32")
    return _Spec(shape, dtype)


def _name_in_file(name: str) -> str:
    """Return a name that TensorFlow takes; Keras's own, which count up, become the same for all."""
    if re.fullmatch(r"(input_layer|keras_tensor)(_\d+)?", name):
        return "inputs"
    name = re.sub(r"\W", "_", name, flags=re.ASCII)
    is_valid = name[:1].isalpha() and name != "self" and not keyword.iskeyword(name)
    return name if is_valid else f"inputs_{name}"
