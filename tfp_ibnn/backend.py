"""The one place that knows which Keras backend is active.

Everything else asks this module for TensorFlow Probability's distributions (`tfd`) and bijectors
(`tfb`), and for the few array functions whose precision `keras.ops` does not keep on JAX.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras

__all__ = [
    "NAME",
    "REPLICA_STRIDE",
    "SeedGenerator",
    "accelerators",
    "fori_loop",
    "gradient",
    "jit_compiles_well",
    "matmul",
    "mean",
    "replica_count",
    "replica_id",
    "tanh",
    "tfb",
    "tfd",
    "tfp",
]

Tensor = Any
"""A tensor of the active backend (`tf.Tensor` or `jax.Array`)."""

NAME = keras.backend.backend()
"""The active backend, "tensorflow" or "jax"."""

REPLICA_STRIDE = 0x5851F42D
"""Distance between the seeds of two replicas: seeds that users and layers choose lie close."""

if NAME == "tensorflow":
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

    def gradient(
        function: Callable[..., Tensor], variables: Sequence[keras.Variable]
    ) -> Callable[..., Tensor]:
        """Return the compiled gradient of a scalar function with respect to its first argument.

        Args:
            function: of arrays; it may assign to `variables`, which need not take effect.
            variables: those that it reads; their values are read at each call.
        """
        del variables  # TensorFlow's functions find them by themselves

        @tf.function
        def compiled(x: Tensor, *others: Tensor) -> Tensor:
            with tf.GradientTape() as tape:
                tape.watch(x)
                value = function(x, *others)
            return tape.gradient(value, x, unconnected_gradients="zero")

        return lambda *arrays: compiled(*map(tf.convert_to_tensor, arrays))

    def jit_compiles_well() -> bool:
        """Whether just-in-time compilation pays: XLA is slow on CPUs, to compile and to run."""
        return bool(tf.config.list_physical_devices("GPU"))

    def accelerators() -> list[str]:
        """Names of the GPUs and TPUs in use."""
        found = tf.config.list_physical_devices("GPU") + tf.config.list_physical_devices("TPU")
        details = tf.config.experimental.get_device_details
        return [details(device).get("device_name", device.device_type) for device in found]

    def replica_count() -> int:
        """Number of replicas that share the present training step."""
        return tf.distribute.get_strategy().num_replicas_in_sync

    def replica_id() -> int | Tensor:
        """Number of this replica among those that share the step; 0 outside of replicas."""
        context = tf.distribute.get_replica_context()
        return 0 if context is None else context.replica_id_in_sync_group

    class SeedGenerator(keras.random.SeedGenerator):
        """A generator whose replicas under `tf.distribute` draw apart.

        Each replica has a copy of the state, and all copies count alike: Keras's generators give
        every replica the same noise. Here the seed depends on the replica, the state does not. The
        first replica, and a model without any, draw as they do with Keras's.
        """

        def next(self, ordered: bool = True) -> Tensor:
            """Return the next seed of this replica."""
            seed = super().next(ordered)
            if replica_count() == 1:
                return seed
            stride = tf.constant([REPLICA_STRIDE, 0], seed.dtype)
            return seed + tf.cast(replica_id(), seed.dtype) * stride

elif NAME == "jax":
    import functools

    import jax
    import jax.numpy as jnp
    from tensorflow_probability.substrates import jax as tfp

    # On GPUs JAX multiplies float32 matrices in a shorter format by default. A rotation is then no
    # rotation, and the KL of a posterior that equals its prior is not 0.
    matmul = functools.partial(jnp.matmul, precision="highest")

    # Both go through float32 in keras.ops, even for a float64 argument.
    mean = jnp.mean
    tanh = jnp.tanh

    fori_loop = keras.ops.fori_loop

    def gradient(
        function: Callable[..., Tensor], variables: Sequence[keras.Variable]
    ) -> Callable[..., Tensor]:
        """Return the compiled gradient of a scalar function with respect to its first argument.

        Args:
            function: of arrays; it may assign to `variables`, which need not take effect.
            variables: those that it reads; their values are read at each call.
        """

        @jax.jit
        def compiled(values: list[Tensor], x: Tensor, *others: Tensor) -> Tensor:
            def scalar(x: Tensor) -> Tensor:
                with keras.StatelessScope(state_mapping=zip(variables, values, strict=True)):
                    return function(x, *others)

            return jax.grad(scalar)(x)

        return lambda *arrays: compiled([v.value for v in variables], *arrays)

    def jit_compiles_well() -> bool:
        """Whether just-in-time compilation pays: JAX is slow without."""
        return True

    def accelerators() -> list[str]:
        """Names of the GPUs and TPUs in use."""
        return [device.device_kind for device in jax.devices() if device.platform != "cpu"]

    def replica_count() -> int:
        """Number of replicas that share the present training step: JAX sees one global batch."""
        return 1

    def replica_id() -> int:
        """Number of this replica among those that share the step: JAX sees one global batch."""
        return 0

    SeedGenerator = keras.random.SeedGenerator

else:
    raise ImportError(
        f"tfp_ibnn works with the Keras backends 'tensorflow' and 'jax'; the active one is "
        f"{NAME!r}. Set the environment variable KERAS_BACKEND before Keras is imported."
    )

tfb = tfp.bijectors
tfd = tfp.distributions
