"""A prediction as a graph in which all draws are constants, for runtimes without random numbers."""

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras

from tfp_ibnn._core import backend, keras_internals
from tfp_ibnn._core.unrolling import unrolled
from tfp_ibnn.decisions import Conformal
from tfp_ibnn.export.served import Served

_MISSING = re.compile(r"(?:'tf\.|No Op registered for )(\w+)")
"""An operation that the format lacks, in the error of a converter."""

_HASHES = frozenset({"BitwiseXor", "LeftShift", "RightShift"})
"""The operations that make draws, and the random numbers of `Conformal`."""

_LARGEST = 2_000_000_000  # bytes; the formats end at 2 GiB


def freeze(served: Served) -> Any:
    """Return the graph of a prediction; its draws, and all that depends on no input, are constants.

    Args:
        served: what to predict.

    Returns:
        The value of `freeze_graph` of the backend.

    Raises:
        ValueError: If draws depend on the inputs, their number or their shape, or the graph holds
            what no file can.
    """
    _check_inputs(served)
    if served.average.independent:
        raise ValueError(
            "Draws in an ONNX or LiteRT file are constants, the same for all examples: export "
            "ibnn.MonteCarlo(model) without independent=True."
        )

    def serve(**tensors: Any) -> dict[str, Any]:
        with unrolled(), in_float32(served.model), _unrolled_recurrence(served.model):
            return served.serve(**tensors)

    graph = backend.freeze_graph(serve, served.inputs.specs, _LARGEST)
    _check_contents(served, graph)
    _check_draws(served, graph)
    return graph


@contextlib.contextmanager
def in_float32(model: keras.Model) -> Iterator[None]:
    """Compute in float32 what a model computes in 16 bits, which few runtimes can.

    Args:
        model: a model; it is as before at the end of this context.
    """
    policies = {}
    for layer in keras_internals.nested_layers(model):
        if layer.compute_dtype in ("float16", "bfloat16"):
            policies[layer] = layer.dtype_policy
    try:
        for layer in policies:
            layer.dtype_policy = "float32"
        yield
    finally:
        for layer, policy in policies.items():
            layer.dtype_policy = policy


@contextlib.contextmanager
def _unrolled_recurrence(model: keras.Model) -> Iterator[None]:
    """Unroll recurrent layers whose number of steps is known."""
    layers = []
    for layer in keras_internals.nested_layers(model):
        is_loop = isinstance(layer, keras.layers.RNN) and not layer.unroll
        if is_loop and _steps_of(layer) is not None:
            layers.append(layer)
    for layer in layers:
        layer.unroll = True
    try:
        yield
    finally:
        for layer in layers:
            layer.unroll = False


def _steps_of(layer: keras.layers.RNN) -> int | None:
    """Return the number of steps that a recurrent layer was built for, or None if unknown."""
    config = layer.get_build_config() or {}
    shapes = config.get("shapes_dict", {"sequences_shape": config.get("input_shape")})
    shape = shapes.get("sequences_shape")
    return None if shape is None else shape[1]


def _check_inputs(served: Served) -> None:
    """Raise for inputs that other runtimes do not take."""
    for name, spec in served.inputs.specs.items():
        if spec.dtype == "string":
            raise ValueError(
                f"The input {name!r} takes strings, but ONNX and LiteRT files take numbers: export "
                "the model after its TextVectorization or StringLookup, or a SavedModel."
            )


def _check_contents(served: Served, graph: Any) -> None:
    """Raise for loops of unknown length, and for more numbers than a file can hold."""
    if graph.loops:
        raise ValueError(
            f"Model {served.network.name!r} has a loop whose length is not fixed, such as that of "
            "a recurrent layer over a sequence of any length. ONNX and LiteRT files cannot hold "
            "it: give the inputs a fixed length, such as keras.Input((20, 3)) instead of "
            "keras.Input((None, 3)), or export a SavedModel."
        )
    if graph.size > _LARGEST:
        raise ValueError(
            f"The file would hold at least {graph.size / 1e9:.1f} GB, but ONNX and LiteRT files "
            "end at 2 GB: give fewer `draws`, or export a SavedModel."
        )


def _check_draws(served: Served, graph: Any) -> None:
    """Raise if a graph still draws random numbers."""
    name = served.network.name
    if graph.stateful:
        raise ValueError(
            f"Model {name!r} draws random numbers by itself, or changes its weights, when it "
            f"predicts ({', '.join(sorted(graph.stateful))}). ONNX and LiteRT files cannot do "
            "that: remove the layer that does."
        )
    is_random_set = isinstance(served.model, Conformal) and served.model.randomized is not None
    if is_random_set:
        raise ValueError(
            "`randomized` sets depend on the bits of the inputs, which ONNX and LiteRT files "
            "cannot read: fit ibnn.Conformal without `randomized`, or export a SavedModel."
        )
    if graph.operations & _HASHES:
        raise ValueError(
            f"The noise of model {name!r} depends on the size of its inputs, so its draws cannot "
            "be constants. Give the inputs a fixed size, such as keras.Input((20, 3)) instead of "
            "keras.Input((None, 3)), or use noise='channel'."
        )


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silence the warnings that a converter causes in TensorFlow and NumPy."""
    loggers = [logging.getLogger(name) for name in ("tensorflow", "tf2onnx")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def converted(format: str, convert: Callable[..., bytes], *arguments: Any) -> bytes:
    """Return what a converter returns, or raise its error in one line.

    Args:
        format: of the file.
        convert: the converter.
        *arguments: of the converter.
    """
    try:
        with quietly():
            return convert(*arguments)
    except Exception as error:  # converters raise anything, and mean that something is missing
        text = str(error).strip() or type(error).__name__
        missing = sorted(set(_MISSING.findall(text)))
        reason = ", ".join(missing) or text.splitlines()[0][:200]
        raise ValueError(
            f"{format} cannot hold what this model computes ({reason}). Export a SavedModel "
            "instead, which holds any model."
        ) from error


def check_file(path: Path, suffix: str, overwrite: bool) -> None:
    """Raise if a file has the wrong suffix, or if writing it would overwrite something.

    Args:
        path: of the file.
        suffix: the one that it must have.
        overwrite: whether a file may be replaced.
    """
    if path.suffix != suffix:
        raise ValueError(f"`path` must end in {suffix!r} for this format; got {str(path)!r}.")
    if path.is_dir():
        raise ValueError(f"`path` must be a file; {path} is a folder.")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists: choose another path, or give overwrite=True.")
