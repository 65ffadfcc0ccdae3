"""Packages that only a part of the library needs, and that a plain install leaves out."""

import contextlib
import os
from collections.abc import Iterator

EXTRAS: dict[str, tuple[str, ...]] = {
    "diagnostics": ("arviz",),
    "litert": ("ai_edge_litert",),
    "onnx": ("onnx", "onnxruntime", "tf2onnx"),
    "plots": ("matplotlib",),
}
"""The modules of each extra that the library imports; pyproject.toml names their packages."""

BACKENDS = ("jax", "jaxlib", "keras", "tensorflow", "tensorflow_probability", "tf_keras", "torch")
"""The modules without which no backend can be imported, or not the one that Keras is set to."""


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Import modules of an extra in this context; a missing one raises the line to run."""
    try:
        yield
    except ModuleNotFoundError as cause:
        module = (cause.name or "").split(".")[0]
        if module not in EXTRAS[extra]:
            raise
        raise ImportError(f'{module} is missing. Run: pip install "tfp_ibnn[{extra}]"') from cause


@contextlib.contextmanager
def needs_backend() -> Iterator[None]:
    """Import Keras and the active backend in this context; what is missing raises what to run."""
    try:
        yield
    except ModuleNotFoundError as cause:
        module = (cause.name or "").split(".")[0]
        if module not in BACKENDS:
            raise
        raise ImportError(
            f"{module} is missing{_chosen_backend()}. tfp_ibnn needs one of two backends. "
            "For TensorFlow run\n"
            '    pip install "tfp_ibnn[tensorflow]"\n'
            "and leave KERAS_BACKEND unset, or set it to tensorflow. For JAX run\n"
            '    pip install "tfp_ibnn[jax]"\n'
            "and set the environment variable KERAS_BACKEND=jax before Keras is imported. Both in "
            'one environment: pip install "tfp_ibnn[both]".'
        ) from cause


def _chosen_backend() -> str:
    """Return what an error says of KERAS_BACKEND, if it is set."""
    backend = os.environ.get("KERAS_BACKEND")
    return f", and KERAS_BACKEND is {backend!r}" if backend else ""
