"""A nested model, the names of its noisy layers, and what outputs must agree in."""

import keras
import numpy as np
from keras import layers

import tfp_ibnn as ibnn
from tests.layer_checklist import numpy

N = 50


def data(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def names(model):
    return [layer.name for layer in ibnn.stochastic_layers(model)]


def close(found, expected, atol=1e-5):
    keras.tree.assert_same_structure(found, expected)
    for a, b in zip(keras.tree.flatten(found), keras.tree.flatten(expected), strict=True):
        np.testing.assert_allclose(numpy(a), numpy(b), rtol=atol, atol=atol)


def nested():
    a = keras.Input((4,))
    inner = keras.Model(
        a, layers.Dense(4, name="same")(layers.Dense(5, name="in")(a)), name="inner"
    )
    b = keras.Input((4,))
    middle = keras.Model(b, layers.Dense(4, name="same")(inner(b)), name="middle")
    tail = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(2)], name="tail")
    c = keras.Input((4,))
    return keras.Model(c, tail(middle(c))), data(3, 4), 5


@keras.saving.register_keras_serializable(package="tests")
class Scale(layers.Layer):
    def build(self, input_shape):
        self.scale = self.add_weight(shape=(input_shape[-1],), initializer="ones", name="scale")

    def call(self, inputs):
        return inputs * self.scale
