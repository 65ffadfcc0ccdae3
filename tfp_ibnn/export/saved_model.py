"""Write a TensorFlow SavedModel."""

import hashlib
import json
from pathlib import Path
from typing import Any

from tfp_ibnn._core import backend, files, keras_internals
from tfp_ibnn.export.inputs import Spec
from tfp_ibnn.export.served import Served, flat

MANIFEST = "assets.extra/tfp_ibnn.json"
"""The manifest of an exported folder."""


def write_saved_model(served: Served, path: Path, overwrite: bool) -> None:
    """Write a folder that TensorFlow loads; see `tfp_ibnn.export`.

    Args:
        served: what the folder serves.
        path: of the folder. It is written completely or not at all.
        overwrite: replace a folder that is not empty, if it contains a SavedModel.

    Raises:
        ValueError: If something else is at the path.
    """
    check_replaceable(path, overwrite)
    functions = _signatures(served)
    # The vocabularies of lookup layers are not variables.
    tables = keras_internals.lookup_tables(served.network)
    with files.replacing_folder(path) as folder:
        backend.save_functions(str(folder), functions, tables)
        manifest = {
            **served.facts(),
            "signatures": list(functions),
            "sha256": _checksums(folder),
        }
        text = json.dumps(manifest, indent=2, allow_nan=False)
        manifest_path = folder / MANIFEST
        manifest_path.parent.mkdir()
        manifest_path.write_text(text + "\n")


def check_replaceable(path: Path, overwrite: bool) -> None:
    """Raise if writing a folder would overwrite something else.

    Args:
        path: of the folder.
        overwrite: whether a SavedModel may be replaced.
    """
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
        raise ValueError(f"{path} contains no SavedModel, so it is not overwritten.")


def _signatures(served: Served) -> dict[str, tuple]:
    """Return the functions of the file by name, each with the specs of its arguments."""
    specs = served.inputs.specs
    with_seed = {**specs, "seed": Spec((), "int32")}
    average = served.average

    def sample(seed: Any, **tensors: Any) -> dict[str, Any]:
        return flat(average.draw(served.inputs.pack(tensors), seed))

    def deterministic(**tensors: Any) -> dict[str, Any]:
        return flat(average.at_mean(served.inputs.pack(tensors)))

    return {
        "serve": (served.serve, specs),
        "sample": (sample, with_seed),
        "deterministic": (deterministic, specs),
    }


def _checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file by its path in the folder."""
    checksums = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            checksums[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return checksums
