import keras
import numpy as np
import pytest
from keras import ops

from tfp_ibnn._core.backend import compiled
from tfp_ibnn._core.rows import in_blocks

ROWS = np.random.default_rng(0).normal(size=(11, 3)).astype("float32")


@pytest.mark.parametrize("size", [1, 4, 11, 20])
def test_blocks_are_the_whole(size):
    seen = []

    def function(rows):
        seen.append(rows.shape[0])
        return ops.stack([ops.sum(rows, axis=1), ops.max(rows, axis=1)], axis=1)

    expected = np.stack([ROWS.sum(axis=1), ROWS.max(axis=1)], axis=1)
    found = compiled(lambda rows: in_blocks(function, rows, size), [])(ROWS)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert set(seen) == {min(size, 11)}


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX knows all sizes")
def test_their_number_may_be_unknown():
    import tensorflow as tf

    spec = tf.TensorSpec((None, 3))
    function = tf.function(lambda x: in_blocks(lambda r: ops.sum(r, axis=1), x, 4), [spec])
    for count in (1, 4, 11):
        np.testing.assert_allclose(function(ROWS[:count]), ROWS[:count].sum(axis=1), rtol=1e-5)
