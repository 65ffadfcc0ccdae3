"""Operations that the converter to ONNX lacks: by formulas, to the precision of float32."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfp_ibnn as ibnn
from tests.monte_carlo_tools import JAX, averaged
from tfp_ibnn.export.reading import open_exported

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(JAX, reason="TensorFlow writes ONNX files"),
]

ACTIVATIONS = ("tanh", "sigmoid", "relu", "softplus", "elu")


class Functions(layers.Layer):
    """log(1 + x), the exact GELU, and the slopes of activations, side by side."""

    def call(self, x):
        import tensorflow as tf

        values = [ops.log1p(x), ops.gelu(x, approximate=False)]
        for name in ACTIVATIONS:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = keras.activations.get(name)(x)
            values.append(tape.gradient(y, x))
        return ops.concatenate(values, axis=-1)


def test_functions_and_slopes(tmp_path):
    """Those that a model computes, of numbers near 0 too."""
    model = keras.Sequential([keras.Input((1,), name="features"), Functions()])
    mc = averaged(model, 1, head="point", seed=0)
    path = ibnn.export(mc, tmp_path / "m.onnx", format="onnx")
    x = np.array([-0.9, -1e-3, -1e-7, 0, 1e-9, 1e-6, 0.3, 0.9999999, 1, 2.5, 1e6], "float32")
    found = open_exported(path).predict(x[:, None], 20)["mean"]
    expected = np.asarray(mc(x[:, None])["mean"])
    np.testing.assert_allclose(found[:, 0], expected[:, 0], rtol=1e-6)
    np.testing.assert_allclose(found[:, 1:], expected[:, 1:], rtol=1e-5, atol=1e-6)
    assert np.ptp(expected, axis=0).min() > 0.2
