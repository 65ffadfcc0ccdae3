"""Export as a SavedModel, which TensorFlow runs without this library."""

import hashlib
import importlib.metadata
import itertools
import keyword
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfp_ibnn import _checks, _files, backend
from tfp_ibnn._core import keras_internals
from tfp_ibnn._graph import functional_graph
from tfp_ibnn.metrics.temperature import innermost
from tfp_ibnn.monte_carlo import MonteCarlo

__all__ = ["MANIFEST", "export"]

MANIFEST = "assets.extra/tfp_ibnn.json"
"""Where an exported folder says what it holds."""

_SEED = "seed"


def export(
    model: keras.Model,
    path: str | os.PathLike,
    *,
    samples: int | None = None,
    seed: int | None = None,
    input_signature: Any = None,
    overwrite: bool = False,
) -> Path:
    """Write a TensorFlow SavedModel that gives the averaged prediction and its uncertainty.

    It takes TensorFlow alone to load it, and TensorFlow Serving serves it as it is. Its signatures
    take the model's inputs by name, in batches of any size:

    - `serve`, also the default: all that `MonteCarlo.predict` returns;
    - `sample`: `mean` and `aleatoric` of one sampled network, which the further input `seed`, a
      whole number, chooses. The seeds 0 to `samples` - 1 are the networks that `serve` averages;
    - `deterministic`: `mean` and `aleatoric` of the network at the posterior mean, without noise.

    The sampled networks are those of the seed, fixed in the file: one question has always one
    answer. (Of a `MonteCarlo` with `independent` draws it depends on the place in the batch. An
    input that was made for one batch size keeps it. Of a `TemperatureScaling` of a `MonteCarlo` all
    signatures give the scaled average.) `assets.extra/tfp_ibnn.json` in the folder
    names versions, seed and signatures, and the SHA-256 of each file.

    The backend must be TensorFlow. A model that was trained on JAX is saved there as `.keras`, and
    exported where TensorFlow is, by `scripts/export.py` for example.

    Args:
        model: a `MonteCarlo`, or a model that `MonteCarlo` can average.
        path: of a folder. It is written whole or not at all.
        samples: number of draws; None takes the `MonteCarlo`'s.
        seed: of the draws; None takes the `MonteCarlo`'s, or a random one.
        input_signature: `keras.InputSpec` or arrays, for a model whose `call` is its own, so that
            its inputs are unknown: by name, or in a list as Keras has it.
        overwrite: replace a folder that is not empty.

    Returns:
        The path.

    Example:
        >>> import keras, tempfile, tfp_ibnn as ibnn
        >>> inputs = keras.Input((3,), name="features")
        >>> outputs = ibnn.StochasticDense(2, activation="softmax", train_size=100)(inputs)
        >>> mc = ibnn.MonteCarlo(keras.Model(inputs, outputs), samples=16)
        >>> if keras.backend.backend() == "tensorflow":
        ...     path = ibnn.export(mc, tempfile.mkdtemp() + "/1", seed=0)

        And where only TensorFlow is:

            served = tf.saved_model.load("saved_model/1")
            served.signatures["serve"](features=tf.ones((5, 3)))["epistemic"]
    """
    if backend.NAME != "tensorflow":
        raise RuntimeError(
            f"A SavedModel is written by TensorFlow; the backend is {backend.NAME!r}. Save the "
            "model here with model.save('model.keras'); there, with KERAS_BACKEND=tensorflow, "
            "load and export it, for example by scripts/export.py."
        )
    path = _free(Path(path), overwrite)
    served = _frozen(model, samples, seed)
    inputs = _inputs(innermost(served), input_signature)
    with _files.replacing_folder(path) as temporary:
        _write(served, inputs, temporary)
        manifest = _manifest(served, inputs, temporary)
        (temporary / MANIFEST).parent.mkdir()
        _files.write_json(temporary / MANIFEST, manifest)
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


def _frozen(model: Any, samples: int | None, seed: int | None) -> MonteCarlo:
    """Return a MonteCarlo of the model with a seed, of the samples and the seed that are given."""
    options: dict[str, Any] = {}
    if samples is not None:
        options["samples"] = _checks.positive_integer("samples", samples)
    if seed is not None:
        options["seed"] = _checks.whole("seed", seed)
    if isinstance(model, MonteCarlo):
        # It may get a new key at any time; the one that is exported has its own.
        model, options = model.inner, {**model.options(), **options}
    if options.get("seed") is None:
        options["seed"] = int(np.random.default_rng().integers(2**31))
    return MonteCarlo(model, **options)


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
    names = _told_apart([_plain(name) for name in names])
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


def _told_apart(names: list[str]) -> list[str]:
    """Number the names that occur more than once."""
    found = [name for name in names if names.count(name) == 1]
    result = []
    for name in names:
        if names.count(name) > 1:
            name = next(x for i in itertools.count() if (x := f"{name}_{i}") not in found)
            found.append(name)
        result.append(name)
    return result


def _write(served: MonteCarlo, inputs: _Inputs, path: Path) -> None:
    import tensorflow as tf

    specs = {
        name: tf.TensorSpec(shape, dtype, name) for name, (shape, dtype) in inputs.specs.items()
    }

    def traced(function: Callable[..., dict[str, Any]], **more: Any) -> Any:
        def with_names(**named: Any) -> dict[str, Any]:
            extra = [named.pop(name) for name in more]
            return function(inputs.pack(named), *extra)

        compiled = tf.function(with_names, autograph=False)
        return compiled.get_concrete_function(**specs, **more)

    serve = traced(served.average)
    signatures = {
        "serve": serve,
        "sample": traced(served.draw, **{_SEED: tf.TensorSpec((), "int32", _SEED)}),
        "deterministic": traced(served.at_mean),
        tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY: serve,
    }
    module = tf.Module()
    # What the functions read; the optimizer and the metrics stay behind.
    module.read = list(
        {v.ref(): v for function in signatures.values() for v in function.graph.variables}.values()
    )
    # The vocabularies of lookup layers, which are no variables.
    module.tables = keras_internals.lookup_tables(served.inner)
    tf.saved_model.save(module, str(path), signatures=signatures)


def _manifest(served: MonteCarlo, inputs: _Inputs, path: Path) -> dict[str, Any]:
    files = sorted(x for x in path.rglob("*") if x.is_file())
    return {
        "format": 1,
        "model": served.inner.name,
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
            for x in files
        },
    }
