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

tfb, tfd = tfp.bijectors, tfp.distributions

# On GPUs JAX multiplies float32 matrices in a shorter format by default. A rotation is then no
# rotation, and the KL of a posterior that equals its prior is not 0.
matmul = functools.partial(jnp.matmul, precision="highest")

# Both go through float32 in keras.ops, even for a float64 argument.
mean = jnp.mean
tanh = jnp.tanh

fori_loop = keras.ops.fori_loop
times = keras.ops.multiply


def compiled(function: Function, variables: Variables) -> Function:
    @jax.jit
    def jitted(values: list[Tensor], *arrays: Any) -> Any:
        with keras.StatelessScope(state_mapping=zip(variables, values, strict=True)):
            return function(*arrays)

    return lambda *arrays: jitted([v.value for v in variables], *arrays)


def gradient(function: Function, variables: Variables) -> Function:
    return compiled(jax.grad(function), variables)


def pullback(function: Function, points: list[Tensor]) -> tuple[Tensor, Any, Function]:
    value, pull, others = jax.vjp(function, points, has_aux=True)
    return value, others, lambda cotangent: pull(cotangent)[0]


def jvp(function: Function, points: list[Tensor], tangents: list[Tensor]) -> tuple[Tensor, Tensor]:
    return jax.jvp(function, (points,), (tangents,))


def traced_once(function: Function) -> Function:
    """Return the function: JAX traces quickly."""
    return function


def set_diagonal(matrix: Tensor, diagonal: Tensor) -> Tensor:
    """Return matrices (..., n, n) with another diagonal, (..., n)."""
    return jnp.where(jnp.eye(matrix.shape[-1], dtype=bool), diagonal[..., None, :], matrix)


def jit_pays() -> bool:
    """Whether just-in-time compilation pays: JAX is slow without."""
    return True


def is_eager(tensor: Tensor) -> bool:
    return not isinstance(tensor, jax.core.Tracer)


def words(tensor: Tensor) -> Tensor:
    return jax.lax.bitcast_convert_type(tensor, "uint32")


KEY_DTYPE = "uint32"


def replica_count() -> int:
    """Return 1: JAX sees one global batch."""
    return 1


def replica_id() -> int:
    return 0


SeedGenerator = keras.random.SeedGenerator


def normal(shape: Sequence[Any], dtype: str, seed: Any, stddev: float | Tensor = 1.0) -> Tensor:
    seed = seed.next() if isinstance(seed, keras.random.SeedGenerator) else seed
    return stddev * jax.random.normal(jnp.asarray(seed, "uint32"), shape, dtype)


SCANS_EPOCHS = True


def save_functions(*_: Any) -> None:
    raise RuntimeError(
        "A SavedModel is written by TensorFlow; the backend is 'jax'. Save the model here with "
        "model.save('model.keras'); with KERAS_BACKEND=tensorflow, export that (scripts/export.py)."
    )
