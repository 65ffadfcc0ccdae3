"""The gradients of a noisy convolution of images against those of the plain computation."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.autodiff import gradient
from tfp_ibnn._noisy_convolution import convolves, noisy_convolution
from tfp_ibnn.layers import Stochastic

RNG = np.random.default_rng(0)
LAYERS = {
    "plain": keras.layers.Conv2D(4, 3, dtype="float64"),
    "strides": keras.layers.Conv2D(4, 3, strides=2, padding="same", dtype="float64"),
    "dilated": keras.layers.Conv2D(
        4, 3, dilation_rate=2, use_bias=False, activation="tanh", dtype="float64"
    ),
    "steps": keras.layers.Conv1D(4, 3, padding="same", activation="relu", dtype="float64"),
    "volume": keras.layers.Conv3D(4, 2, activation="softplus", dtype="float64"),
}


@pytest.mark.parametrize("noise", ["channel", "position"])
@pytest.mark.parametrize("name", LAYERS)
def test_value_and_gradients_are_those_of_the_product(name, noise):
    layer = LAYERS[name]
    shape = (2, *(7,) * layer.rank, 3)
    if not layer.built:
        layer.build(shape)
    inputs = RNG.normal(size=shape)
    normal = RNG.normal(size=shape if noise == "position" else (2, *(1,) * layer.rank, 3))
    loc, scale = RNG.normal(1, 0.5, 3), RNG.uniform(0.1, 1, 3)
    kernel = RNG.normal(size=layer.kernel.shape)
    bias = RNG.normal(size=4)
    weight = RNG.normal(size=layer.compute_output_shape(shape))

    def total(method):
        def function(inputs, loc, scale, kernel, bias):
            values = [(layer._kernel, kernel)]
            if layer.use_bias:
                values.append((layer.bias, bias))
            with keras.StatelessScope(state_mapping=values):
                return ops.sum(weight * method(inputs, loc, scale) + 0 * ops.sum(bias))

        return function

    def plain(inputs, loc, scale):
        return layer(inputs * (loc + scale * normal))

    def fast(inputs, loc, scale):
        z = ops.stop_gradient(loc + scale * normal)
        return noisy_convolution(layer, inputs, z, ops.convert_to_tensor(normal), loc, scale)

    points = (inputs, loc, scale, kernel, bias)
    flat = np.concatenate([point.ravel() for point in points])

    def of_one_vector(function):
        def unpacked(vector):
            parts = ops.split(vector, np.cumsum([point.size for point in points])[:-1].tolist())
            return function(*map(ops.reshape, parts, [point.shape for point in points]))

        return unpacked

    found, expected = (of_one_vector(total(method)) for method in (fast, plain))
    np.testing.assert_allclose(
        found(ops.convert_to_tensor(flat)), expected(ops.convert_to_tensor(flat)), rtol=1e-12
    )
    np.testing.assert_allclose(
        gradient(found, flat), gradient(expected, flat), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize(
    "layer",
    [
        keras.layers.Conv2D(2, 3, groups=2),
        keras.layers.Conv2D(2, 3, activity_regularizer="l2"),
        keras.layers.Conv1D(2, 3, padding="causal"),
        keras.layers.DepthwiseConv2D(3),
        keras.layers.Conv2DTranspose(2, 3),
        keras.layers.Dense(2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_other_layers_are_left_alone(layer):
    assert not convolves(layer)


def test_training_and_inference_compute_the_same():
    layer = Stochastic(keras.layers.Conv2D(4, 3, activation="relu"), train_size=10)
    x = RNG.normal(size=(2, 6, 6, 3)).astype("float32")
    layer.build(x.shape)
    layer.noise_switch.assign(0.0)
    layer.posterior.affine.shift.assign([0.5, 1.0, 2.0])
    np.testing.assert_allclose(layer(x, training=True), layer(x, training=False), atol=1e-5)
