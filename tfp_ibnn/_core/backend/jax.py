"""What differs on JAX; `tensorflow.py` has the same names, and says what they stand for."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from tensorflow_probability.substrates import jax as tfp

from tfp_ibnn._core.backend.shared import NAMES, Function, Tensor, Variables

__all__ = NAMES

tfb = tfp.bijectors
tfd = tfp.distributions

# On GPUs JAX multiplies float32 matrices in a shorter format by default. A rotation is then no
# rotation, and the KL of a posterior that equals its prior is not 0.
matmul = functools.partial(jnp.matmul, precision="highest")

# Both go through float32 in keras.ops, even for a float64 argument.
mean = jnp.mean
tanh = jnp.tanh

fori_loop = keras.ops.fori_loop
times = keras.ops.multiply


def compiled(function: Function, variables: Variables) -> Function:
    """Return a compiled function of arrays.

    Args:
        function: takes arrays, and returns a nest of tensors. What it assigns is lost.
        variables: those that it reads; it sees the values of each call.
    """

    @jax.jit
    def jitted(values: list[Tensor], *arrays: Any) -> Any:
        with keras.StatelessScope(state_mapping=zip(variables, values, strict=True)):
            return function(*arrays)

    return lambda *arrays: jitted([v.value for v in variables], *arrays)


def gradient(function: Function, variables: Variables) -> Function:
    """Return the compiled gradient of a scalar function with respect to its first argument.

    Args:
        function: takes arrays, and returns a scalar.
        variables: those that it reads.
    """
    return compiled(jax.grad(function), variables)


def pullback(function: Function, points: list[Tensor]) -> tuple[Tensor, Any, Function]:
    """Return a function's value, what else it returns, and its vector-Jacobian product.

    Args:
        function: takes a list of tensors, and returns a tensor and anything else.
        points: where it is differentiated.
    """
    value, pull, others = jax.vjp(function, points, has_aux=True)
    return value, others, lambda cotangent: pull(cotangent)[0]


def jvp(function: Function, points: list[Tensor], tangents: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return a function's value, and its derivative along tangents.

    Args:
        function: takes a list of tensors, and returns a tensor.
        points: where it is differentiated.
        tangents: a direction for each point, of its shape.
    """
    return jax.jvp(function, (points,), (tangents,))


def traced_once(function: Function) -> Function:
    """Return the function: JAX traces quickly."""
    return function


def set_diagonal(matrix: Tensor, diagonal: Tensor) -> Tensor:
    """Return matrices with another diagonal.

    Args:
        matrix: (..., n, n).
        diagonal: (..., n).
    """
    is_diagonal = jnp.eye(matrix.shape[-1], dtype=bool)
    return jnp.where(is_diagonal, diagonal[..., None, :], matrix)


def jit_pays() -> bool:
    """Whether just-in-time compilation pays: JAX is slow without."""
    return True


def is_eager(tensor: Tensor) -> bool:
    """Whether a tensor has a value already, as it has not while a function is compiled."""
    return not isinstance(tensor, jax.core.Tracer)


def words(tensor: Tensor) -> Tensor:
    """Return the bits of float32 as uint32."""
    return jax.lax.bitcast_convert_type(tensor, "uint32")


KEY_DTYPE = "uint32"
"""Of a key of two integers, as TensorFlow Probability takes it."""


def replica_count() -> int:
    """Return 1: JAX sees one global batch."""
    return 1


def replica_id() -> int:
    """Return 0: JAX sees one global batch."""
    return 0


SeedGenerator = keras.random.SeedGenerator


def normal(shape: Sequence[Any], dtype: str, seed: Any, stddev: float | Tensor = 1.0) -> Tensor:
    """Return normal random numbers.

    Args:
        shape: ints.
        dtype: "float32" or "float64".
        seed: a `SeedGenerator`, or a key: a tensor of two integers.
        stddev: standard deviation, a number or a scalar.
    """
    if isinstance(seed, keras.random.SeedGenerator):
        seed = seed.next()
    key = jnp.asarray(seed, "uint32")
    return stddev * jax.random.normal(key, shape, dtype)


SCANS_EPOCHS = True
"""Whether several steps, or networks, can be trained in one compiled call."""


def check_exports(*_: Any) -> None:
    """Raise: JAX writes no SavedModel, and no ONNX or LiteRT file."""
    raise RuntimeError(
        "SavedModel, ONNX and LiteRT files are written by TensorFlow; the backend is 'jax'. Save "
        "the model here with model.save('model.keras'); with KERAS_BACKEND=tensorflow, export that "
        "(python -m tfp_ibnn export, or scripts/export.py)."
    )


save_functions = freeze_graph = litert_of = check_exports


def load_function(*_: Any) -> None:
    """Raise: JAX runs no SavedModel."""
    raise RuntimeError(
        "A SavedModel is run by TensorFlow; the backend is 'jax'. Set KERAS_BACKEND=tensorflow "
        "before Keras is imported, or score an ONNX or LiteRT file."
    )
