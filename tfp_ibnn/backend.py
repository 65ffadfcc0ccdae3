"""The one place that knows which Keras backend is active.

Everything else asks this module for TensorFlow Probability's distributions (`tfd`) and bijectors
(`tfb`), and for the few array functions whose precision `keras.ops` does not keep on JAX.
"""

from typing import Any

import keras

__all__ = [
    "fori_loop",
    "jit_compiles_well",
    "matmul",
    "mean",
    "replica_count",
    "tanh",
    "tfb",
    "tfd",
    "tfp",
]

Tensor = Any
"""A tensor of the active backend (`tf.Tensor` or `jax.Array`)."""

_NAME = keras.backend.backend()

if _NAME == "tensorflow":
    import tensorflow as tf
    import tensorflow_probability as tfp

    matmul = keras.ops.matmul
    mean = keras.ops.mean
    tanh = tf.tanh

    def fori_loop(lower: Any, upper: Any, body: Any, state: Any) -> Any:
        """Like `keras.ops.fori_loop`, but one step at a time: parallel steps take more memory."""
        _, state = tf.while_loop(
            lambda i, _: i < upper,
            lambda i, state: (i + 1, body(i, state)),
            (tf.convert_to_tensor(lower), state),
            parallel_iterations=1,
        )
        return state

    def jit_compiles_well() -> bool:
        """Whether just-in-time compilation pays: XLA is slow on CPUs, to compile and to run."""
        return bool(tf.config.list_physical_devices("GPU"))

    def replica_count() -> int:
        """Number of replicas that share the present training step."""
        return tf.distribute.get_strategy().num_replicas_in_sync

elif _NAME == "jax":
    import functools

    import jax.numpy as jnp
    from tensorflow_probability.substrates import jax as tfp

    # On GPUs JAX multiplies float32 matrices in a shorter format by default. A rotation is then no
    # rotation, and the KL of a posterior that equals its prior is not 0.
    matmul = functools.partial(jnp.matmul, precision="highest")

    # Both go through float32 in keras.ops, even for a float64 argument.
    mean = jnp.mean
    tanh = jnp.tanh

    fori_loop = keras.ops.fori_loop

    def jit_compiles_well() -> bool:
        """Whether just-in-time compilation pays: JAX is slow without."""
        return True

    def replica_count() -> int:
        """Number of replicas that share the present training step: JAX sees one global batch."""
        return 1

else:
    raise ImportError(
        f"tfp_ibnn works with the Keras backends 'tensorflow' and 'jax'; the active one is "
        f"{_NAME!r}. Set the environment variable KERAS_BACKEND before Keras is imported."
    )

tfb = tfp.bijectors
tfd = tfp.distributions
