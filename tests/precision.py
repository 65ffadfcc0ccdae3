"""How closely float32 numbers can agree on the hardware at hand.

NVIDIA's GPUs multiply float32 matrices in TF32 by default, with 10 bits behind the point, and both
backends leave it at that. Tests state how closely numbers agree on a CPU; on a GPU the one floor
below holds for all of them, but for `assert_allclose` of two float64 arrays.
"""

import contextlib
import functools

import keras
import numpy as np
import pytest

from lib.devices import accelerators
from tfp_ibnn._core import backend

__all__ = [
    "NO_GPU",
    "TF32",
    "after_products",
    "at_least",
    "follow_hardware",
    "full_precision",
    "int8_is_right",
]

NO_GPU = f"{backend.NAME} sees no GPU here"

TF32 = 2.0**-9
"""Share of the largest number by which sums of products may differ: four roundings of TF32."""


def follow_hardware():
    """Make what tests compare numbers with as coarse as the products of this machine's GPU."""
    if accelerators():
        np.testing.assert_allclose = _coarser_allclose(np.testing.assert_allclose)
        pytest.approx = _coarser_approx(pytest.approx)


@contextlib.contextmanager
def full_precision():
    """Let a GPU multiply float32 numbers as such, not in TF32."""
    if backend.NAME == "jax":
        import jax

        with jax.default_matmul_precision("float32"):
            yield
        return
    import tensorflow as tf

    config = tf.config.experimental
    before = config.tensor_float_32_execution_enabled()
    config.enable_tensor_float_32_execution(False)
    yield
    config.enable_tensor_float_32_execution(before)


def int8_is_right():
    """Return whether products of int8 numbers are exact sums, as in Keras's quantized layers."""
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-127, 128, shape).astype("int8") for shape in ((6, 5, 6), (6, 8)))
    found = keras.ops.convert_to_numpy(keras.ops.matmul(x, w))
    return np.array_equal(found, x.astype(int) @ w)


def at_least(tolerance):
    """Return a relative tolerance for numbers that are compared by hand."""
    return max(tolerance, TF32) if accelerators() else tolerance


def after_products(tolerance, products, size=1.0):
    """Return a tolerance for numbers that depend on several matrix products, one after another.

    `size` is the largest number on the way: what a difference or a softmax is made of may be larger
    than the result, and the results of float64 sums still have the error of their products.
    """
    return max(tolerance, products * TF32 * size) if accelerators() else tolerance


def _coarser_approx(approx):
    @functools.wraps(approx)
    def compare(expected, rel=None, abs=None, nan_ok=False):
        return approx(expected, rel=max(rel or 0, TF32), abs=abs, nan_ok=nan_ok)

    return compare


def _coarser_allclose(assert_allclose):
    @functools.wraps(assert_allclose)
    def compare(actual, desired, rtol=1e-7, atol=0, **options):
        exact = all(
            isinstance(x, (np.ndarray, np.float64)) and x.dtype == "float64"
            for x in (actual, desired)
        )
        if not exact:
            sizes = np.abs(np.asarray(desired, "float64"))
            largest = np.max(sizes[np.isfinite(sizes)], initial=0)
            rtol, atol = max(rtol, TF32), max(atol, TF32 * largest)
        assert_allclose(actual, desired, rtol=rtol, atol=atol, **options)

    return compare
