"""What differs on JAX; `tensorflow.py` has the same names, and says what they stand for."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from tensorflow_probability.substrates import jax as tfp

from tfp_ibnn._core.backend.shared import NAMES, Tensor

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


def checked(x: Tensor, condition: Tensor, message: str) -> Tensor:
    """Return x: JAX knows all sizes while it traces, when they are checked already."""
    return x


def compiled(
    function: Callable[..., Any], variables: Sequence[keras.Variable]
) -> Callable[..., Any]:
    @jax.jit
    def jitted(values: list[Tensor], *arrays: Any) -> Any:
        with keras.StatelessScope(state_mapping=zip(variables, values, strict=True)):
            return function(*arrays)

    return lambda *arrays: jitted([v.value for v in variables], *arrays)


def gradient(
    function: Callable[..., Tensor], variables: Sequence[keras.Variable]
) -> Callable[..., Tensor]:
    return compiled(jax.grad(function), variables)


def pullback(
    function: Callable[[list[Tensor]], tuple[Tensor, Any]], points: list[Tensor]
) -> tuple[Tensor, Any, Callable[[Tensor], list[Tensor]]]:
    value, pull, others = jax.vjp(function, points, has_aux=True)
    return value, others, lambda cotangent: pull(cotangent)[0]


def jvp(
    function: Callable[[list[Tensor]], Tensor], points: list[Tensor], tangents: list[Tensor]
) -> tuple[Tensor, Tensor]:
    return jax.jvp(function, (points,), (tangents,))


def traced_once(function: Callable[..., Sequence[Tensor]]) -> Callable[..., Sequence[Tensor]]:
    """Return the function: JAX traces quickly."""
    return function


def set_diagonal(matrix: Tensor, diagonal: Tensor) -> Tensor:
    """Return matrices (..., n, n) with another diagonal, (..., n)."""
    eye = jnp.eye(matrix.shape[-1], dtype=bool)
    return jnp.where(eye, diagonal[..., None, :], matrix)


def jit_pays() -> bool:
    """Whether just-in-time compilation pays: JAX is slow without."""
    return True


def is_eager(tensor: Tensor) -> bool:
    return not isinstance(tensor, jax.core.Tracer)


def accelerators() -> list[str]:
    return [device.device_kind for device in jax.devices() if device.platform != "cpu"]


KEY_DTYPE = "uint32"


def replica_count() -> int:
    """Number of replicas that share the present training step: JAX sees one global batch."""
    return 1


def replica_id() -> int:
    """Number of this replica among those that share the step: JAX sees one global batch."""
    return 0


SeedGenerator = keras.random.SeedGenerator


def normal(
    shape: tuple[int | Tensor, ...], dtype: str, seed: Any, stddev: float | Tensor = 1.0
) -> Tensor:
    """Like `keras.random.normal`; the seed is a generator, or a tensor of two integers."""
    seed = seed.next() if isinstance(seed, keras.random.SeedGenerator) else seed
    return stddev * jax.random.normal(jnp.asarray(seed, "uint32"), shape, dtype)


SCANS_EPOCHS = True
"""Whether there is `epoch_in_one_call`."""


def epoch_in_one_call(
    train_step: Callable[..., Any], arrays: Sequence[Any]
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return a compiled function of a model's state and rows, (steps, batch), of the arrays.

    It takes a training step on each batch, and returns the logs of the last, and the state.
    """
    arrays = jax.device_put(tuple(arrays))

    def epoch(state: Any, order: Any, arrays: Any) -> tuple[Any, Any]:
        def step(state: Any, rows: Any) -> tuple[Any, Any]:
            logs, state = train_step(state, tuple(part[rows] for part in arrays))
            return state, logs

        state, logs = jax.lax.scan(step, state, order)
        return jax.tree.map(lambda values: values[-1], logs), state

    compiled = jax.jit(epoch, donate_argnums=0)
    return lambda state, order: compiled(state, order, arrays)


def save_functions(*_: Any) -> None:
    """Refuse."""
    raise RuntimeError(
        "A SavedModel is written by TensorFlow; the backend is 'jax'. Save the model here with "
        "model.save('model.keras'); there, with KERAS_BACKEND=tensorflow, load and export it, for "
        "example by scripts/export.py."
    )
