"""What the tests need and Keras does not offer: derivatives and compilation, on both backends."""

import functools

import keras
import numpy as np
from keras import ops

__all__ = [
    "enable_float64",
    "end_datasets_at_once",
    "gradient",
    "gradients_by_call",
    "jacobian",
    "jit",
    "keep_contexts",
    "keep_kernels",
    "optimise_no_graphs",
    "quick",
    "run_eagerly",
    "weight_gradients",
    "whole_jacobian",
]

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf
    from tensorflow.python import pywrap_tfe

    def enable_float64():
        """Let float64 arrays be float64: TensorFlow always does."""

    def end_datasets_at_once():
        """Let no dataset tune itself: its end waits for that, the longer the more it has run."""
        options, iterate = tf.data.Options(), tf.data.Dataset.__iter__
        options.autotune.enabled = False
        tf.data.Dataset.__iter__ = lambda self: iterate(self.with_options(options))

    def keep_contexts():
        """Leave all as it is: TensorFlow writes its programs without MLIR."""

    def keep_kernels():
        """Let a new seed delete no kernels, which would be made anew in each test.

        Only what `tf.random` draws outside of functions is then not repeated by a seed. Nothing
        here does so: Keras and the package draw by stateless operations.
        """
        pywrap_tfe.TFE_ContextClearCaches = lambda context: None

    def optimise_no_graphs():
        """Run graphs as they are traced, on a CPU: most are run a few times, on a few numbers."""
        if not tf.config.list_physical_devices("GPU"):
            tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})

    def run_eagerly(on):
        """Switch whether TensorFlow runs its functions step by step and compiles none."""
        tf.config.run_functions_eagerly(on)

    def jit(function, variables=()):
        """Compile a function of arrays; the values of `variables` are read at each call."""
        del variables
        return tf.function(function, jit_compile=True)

    def quick(function, variables=()):
        """Make a function quick to test with: TensorFlow compiles slower than it runs."""
        del variables
        return function

    def gradient(function, x):
        """Gradient of a scalar function with respect to an array."""
        x = ops.convert_to_tensor(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = function(x)
        return _numpy(tape.gradient(value, x, unconnected_gradients="zero"))

    def weight_gradients(function, variables):
        """Gradients of a scalar function of no arguments with respect to Keras variables."""
        with tf.GradientTape() as tape:
            value = function()
        found = tape.gradient(value, [v.value for v in variables], unconnected_gradients="zero")
        return [_numpy(g) for g in found]

    def gradients_by_call(function, variables):
        """Return what gives `weight_gradients` at the values that the variables then have."""
        return functools.partial(weight_gradients, function, variables)

    def jacobian(function, x):
        """Jacobians (..., outputs, inputs) of a function of the last axis of x (..., inputs).

        All points are differentiated together, one output at a time: the function must treat
        them independently of one another.
        """
        x = ops.convert_to_tensor(x)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            columns = [ops.sum(column) for column in ops.unstack(function(x), axis=-1)]
        rows = [tape.gradient(y, x, unconnected_gradients="zero") for y in columns]
        return np.stack([_numpy(row) for row in rows], axis=-2)

    def whole_jacobian(function, x):
        """The derivatives of all outputs by all of x, with the axes of both."""
        x = ops.convert_to_tensor(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = function(x)
        return _numpy(tape.jacobian(value, x, unconnected_gradients="zero"))

else:
    import jax
    from jax._src.interpreters import mlir

    def enable_float64():
        """Let float64 arrays be float64; float32 arrays stay as they are."""
        jax.config.update("jax_enable_x64", True)

    def end_datasets_at_once():
        """Leave all as it is: JAX has no datasets of its own."""

    def keep_contexts():
        """Let all programs share one context of MLIR, which takes longer to make than most do."""
        mlir.make_ir_context = functools.cache(mlir.make_ir_context)

    def keep_kernels():
        """Leave all as it is: a seed deletes nothing of JAX's."""

    def optimise_no_graphs():
        """Leave all as it is: the Makefile sets that for XLA."""

    def run_eagerly(on):
        """Leave all as it is: JAX is quicker when it compiles."""

    def jit(function, variables=()):
        """Compile a function of arrays; the values of `variables` are read at each call."""

        @jax.jit
        def compiled(values, *arrays):
            with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
                return function(*arrays)

        return lambda *arrays: compiled([v.value for v in variables], *arrays)

    quick = jit  # one operation after another, JAX compiles each alone, and each loop anew

    def gradient(function, x):
        """Gradient of a scalar function with respect to an array; what it assigns is dropped."""

        def scalar(v):
            with keras.StatelessScope():
                return function(v)

        return _numpy(jax.jit(jax.grad(scalar))(ops.convert_to_tensor(x)))

    def weight_gradients(function, variables):
        """Gradients of a scalar function of no arguments with respect to Keras variables."""
        return gradients_by_call(function, variables)()

    def gradients_by_call(function, variables):
        """Return what gives `weight_gradients` at the values that the variables then have."""

        def scalar(values):
            with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
                return function()

        compiled = jax.jit(jax.grad(scalar))
        return lambda: [_numpy(g) for g in compiled([v.value for v in variables])]

    def jacobian(function, x):
        """Jacobians (..., outputs, inputs) of a function of the last axis of x (..., inputs).

        All points are differentiated together, one output at a time: the function must treat
        them independently of one another.
        """

        @jax.jit
        def rows(v):
            y, pull = jax.vjp(function, v)
            return jax.vmap(lambda row: pull(row + 0 * y)[0])(ops.eye(y.shape[-1], dtype=y.dtype))

        return np.moveaxis(_numpy(rows(ops.convert_to_tensor(x))), 0, -2)

    def whole_jacobian(function, x):
        """The derivatives of all outputs by all of x, with the axes of both."""
        return _numpy(jax.jit(jax.jacrev(function))(ops.convert_to_tensor(x)))


def _numpy(x):
    return ops.convert_to_numpy(x)
