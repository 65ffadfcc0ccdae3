"""What differs on TensorFlow; `jax.py` has the same names."""

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
import tensorflow_probability as tfp

from tfp_ibnn._core.backend.shared import NAMES, REPLICA_STRIDE, Function, Tensor, Variables

__all__ = NAMES

tfb, tfd = tfp.bijectors, tfp.distributions

mean = keras.ops.mean
tanh = tf.tanh


def fori_loop(lower: Any, upper: Any, body: Any, state: Any) -> Any:
    """Like `keras.ops.fori_loop`, but one step at a time: parallel steps take more memory."""
    is_known = isinstance(lower, int) and isinstance(upper, int)
    _, state = tf.while_loop(
        lambda i, _: i < upper,
        lambda i, state: (i + 1, body(i, state)),
        (tf.convert_to_tensor(lower), state),
        parallel_iterations=1,
        maximum_iterations=upper - lower if is_known else None,  # XLA's gradients need it
    )
    return state


def compiled(function: Function, variables: Variables) -> Function:
    """Return a compiled function of arrays. It reads `variables`, and may lose what it assigns."""
    traced = tf.function(function, autograph=False)  # which finds the variables by itself
    return lambda *arrays: traced(*keras.tree.map_structure(tf.convert_to_tensor, arrays))


def gradient(function: Function, variables: Variables) -> Function:
    """Return the compiled gradient of a scalar function with respect to its first argument."""

    def derived(x: Tensor, *others: Tensor) -> Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = function(x, *others)
        return tape.gradient(value, x, unconnected_gradients="zero")

    return compiled(derived, variables)


def pullback(function: Function, points: list[Tensor]) -> tuple[Tensor, Any, Function]:
    """Return a function's value, what else it returns, and its vector-Jacobian product."""
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(points)
        value, others = function(points)
    options = {"unconnected_gradients": "zero"}
    return value, others, lambda vector: tape.gradient(value, points, vector, **options)


def jvp(function: Function, points: list[Tensor], tangents: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return a function's value, and its derivative along tangents."""
    with tf.autodiff.ForwardAccumulator(points, tangents) as accumulator:
        value = function(points)
    return value, accumulator.jvp(value, unconnected_gradients="zero")


def jit_pays() -> bool:
    """Whether just-in-time compilation pays: XLA is slow on CPUs, to compile and to run."""
    return bool(tf.config.list_physical_devices("GPU"))


def is_eager(tensor: Tensor) -> bool:
    """Whether a tensor has a value already, as it has not while a function is compiled."""
    return hasattr(tensor, "numpy")


def words(tensor: Tensor) -> Tensor:
    """Return the bits of float32 as uint32; `keras.ops.view` needs a shape that is known."""
    return tf.bitcast(tensor, "uint32")


KEY_DTYPE = "int32"
"""Of a key of two integers, as TensorFlow Probability takes it."""


def replica_count() -> int:
    """Number of replicas that share the present training step."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def replica_id() -> int | Tensor:
    """Number of this replica among those that share the step; 0 outside of replicas."""
    context = tf.distribute.get_replica_context()
    return 0 if context is None else context.replica_id_in_sync_group


def normal(shape: Sequence[Any], dtype: str, seed: Any, stddev: float | Tensor = 1.0) -> Tensor:
    """Like `keras.random.normal`; the seed may be a tensor of two integers.

    By Box and Muller, from uniform numbers: TensorFlow's own normal ones are others under XLA than
    without it, and runs that were saved resume by these.
    """
    if isinstance(seed, keras.random.SeedGenerator):
        # XLA knows seeds of 32 bits only.
        seed = tf.cast(tf.math.floormod(seed.next(), tf.int32.max - 1), "int32")
    known = math.prod(size for size in shape if isinstance(size, int))
    count = functools.reduce(operator.mul, (s for s in shape if not isinstance(s, int)), known)
    pairs = (2, (count + 1) // 2)
    first, second = tf.unstack(tf.random.stateless_uniform(pairs, seed, dtype=dtype))
    radius = tf.sqrt(-2 * stddev * stddev * tf.math.log(1 - first))
    angle = 2 * math.pi * second
    both = tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], axis=0)
    return tf.reshape(both[:count] if known % 2 else both, shape)


def times(x: Tensor, z: Tensor) -> Tensor:
    """Return x * z, where z broadcasts.

    TensorFlow is slow on CPUs where the last axis is short, as an image's, and z broadcasts over
    the one before it. The two are made one axis here, by repeating z, which is small. With `normal`
    above, LeNet's step under noise takes 1.4 times as long as without, not 1.6 times (on x86).
    """
    *_, width, channels = (1, 1, *x.shape)
    is_short = channels is not None and channels <= 16 and width not in (1, None)
    same_rank = 2 < len(x.shape) == len(z.shape)
    if jit_pays() or not is_short or not same_rank or tuple(z.shape[-2:]) != (1, channels):
        return x * z
    repeated = tf.tile(z[..., 0, :], (*(1,) * (len(z.shape) - 2), width))
    rows = tf.concat([tf.shape(x)[:-2], [width * channels]], axis=0)
    return tf.reshape(tf.reshape(x, rows) * repeated, tf.shape(x))


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """Like `keras.ops.matmul`, but in full precision on GPUs too: rotations stay exact."""
    if len(y.shape) == 2 < len(x.shape):  # for unknown sizes Keras's way fails in XLA
        *rows, size = keras.ops.shape(x)
        return tf.reshape(matmul(tf.reshape(x, (-1, size)), y), (*rows, y.shape[-1]))
    if not tf.config.list_physical_devices("GPU") or x.dtype != tf.float32:
        return keras.ops.matmul(x, y)
    product = keras.ops.matmul(tf.cast(x, tf.float64), tf.cast(y, tf.float64))
    return tf.cast(product, tf.float32)


def set_diagonal(matrix: Tensor, diagonal: Tensor) -> Tensor:
    """Return matrices (..., n, n) with another diagonal, (..., n)."""
    if matrix.shape.is_fully_defined():  # else XLA lacks its gradient, which keeps no matrix
        return tf.linalg.set_diag(matrix, diagonal)
    return tf.where(tf.eye(matrix.shape[-1], dtype=bool), diagonal[..., None, :], matrix)


def traced_once(function: Function) -> Function:
    """Let an elementwise function of tensors of any shapes be traced once, as one operation."""
    compiled = tf.function(function, autograph=False)

    def call(*tensors: Tensor) -> Sequence[Tensor]:
        specs = [tf.TensorSpec(None, tensor.dtype) for tensor in tensors]
        results = compiled.get_concrete_function(*specs)(*tensors)
        shape = functools.reduce(tf.broadcast_static_shape, (tensor.shape for tensor in tensors))
        for result in results:
            result.set_shape(shape)
        return results

    return call


class SeedGenerator(keras.random.SeedGenerator):
    """A generator whose replicas under `tf.distribute` draw different noise, unlike Keras's."""

    def next(self, ordered: bool = True) -> Tensor:
        seed = super().next(ordered)
        if replica_count() == 1:
            return seed
        stride = tf.constant([REPLICA_STRIDE, 0], seed.dtype)
        return seed + tf.cast(replica_id(), seed.dtype) * stride


SCANS_EPOCHS = False
"""Whether several steps, or networks, can be trained in one compiled call."""


def save_functions(
    path: str, functions: Mapping[str, tuple[Function, Mapping[str, Any]]], tables: Sequence[Any]
) -> None:
    """Write a SavedModel of functions by signature, each with (shape, dtype) of its inputs."""
    signatures = {}
    for name, (function, specs) in functions.items():
        tensors = {key: tf.TensorSpec(*spec, key) for key, spec in specs.items()}
        compiled = tf.function(function, autograph=False)
        signatures[name] = compiled.get_concrete_function(**tensors)
    first = next(iter(signatures.values()))
    signatures[tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY] = first
    module = tf.Module()
    # What the functions read; the optimizer and the metrics stay behind.
    read = [v for function in signatures.values() for v in function.graph.variables]
    module.read = list({v.ref(): v for v in read}.values())
    module.tables = tables
    tf.saved_model.save(module, path, signatures=signatures)
