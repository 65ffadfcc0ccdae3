"""Convolutions of noisy inputs against the plain way: multiply, then call the layer."""

import keras
import numpy as np
import pytest
from keras import ops

import tfp_ibnn as ibnn
from tests.autodiff import gradient
from tfp_ibnn.layers import multiplicative
from tfp_ibnn.layers.convolution import convolves, noisy_convolution, separate_channels

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
        return noisy_convolution(layer, inputs, ops.convert_to_tensor(normal), loc, scale)

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
    layer = ibnn.Stochastic(keras.layers.Conv2D(4, 3, activation="relu"), train_size=10)
    x = RNG.normal(size=(2, 6, 6, 3)).astype("float32")
    layer.build(x.shape)
    layer.noise_switch.assign(0.0)
    layer.posterior.affine.shift.assign([0.5, 1.0, 2.0])
    np.testing.assert_allclose(layer(x, training=True), layer(x, training=False), atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_many_z_share_the_convolutions(name):
    layer = LAYERS[name]
    shape = (2, *(7,) * layer.rank, 3)
    if not layer.built:
        layer.build(shape)
    inputs, z = ops.convert_to_tensor(RNG.normal(size=shape)), RNG.normal(size=(4, 3))
    expected = [ops.convert_to_numpy(layer(inputs * row)) for row in z]
    joined = separate_channels(layer, inputs)(ops.convert_to_tensor(z))
    np.testing.assert_allclose(joined, np.concatenate(expected), atol=1e-12)


def small(posterior, **options):
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Rescaling(0.5)(inputs)
    x = keras.layers.Conv2D(4, 3, activation="relu")(x)
    x = keras.layers.Conv2D(4, 3, strides=2)(x)
    outputs = keras.layers.Dense(3)(keras.layers.Flatten()(x))
    return ibnn.to_stochastic(keras.Model(inputs, outputs), posterior, 10, **options)


@pytest.mark.parametrize("chunk_size", [3, pytest.param(None, marks=pytest.mark.once)])
@pytest.mark.parametrize("recipe", [ibnn.NormalAffine, ibnn.NormalPlanar1d])
def test_predictions_are_those_of_the_plain_way(eagerly, recipe, chunk_size, monkeypatch):
    model = small(recipe(initial_scale=0.7))
    x = RNG.normal(size=(5, 8, 8, 3)).astype("float32")

    def predict():
        options = {"from_logits": True, "seed": 1, "chunk_size": chunk_size}
        return ibnn.MonteCarlo(model, 7, **options).predict(x, verbose=0)

    fast = predict()
    monkeypatch.setattr(multiplicative, "convolves", lambda layer: False)
    plain = predict()
    assert np.ptp(plain["epistemic"]) > 0
    for key, value in plain.items():
        np.testing.assert_allclose(fast[key], value, atol=2e-5)


def test_only_the_first_layer_is_shared_and_only_if_it_is_called_once():
    inputs = keras.Input((8, 8, 3))
    shared = keras.layers.Conv2D(3, 3, padding="same")
    once = keras.layers.Conv2D(3, 3)
    plain = keras.Model(inputs, keras.layers.Flatten()(once(shared(shared(inputs)))))
    twice = ibnn.to_stochastic(plain, ibnn.NormalAffine(), 10)
    assert not ibnn.MonteCarlo(twice, 2, head="point")._sampler._first
    model = small(ibnn.NormalAffine())
    first, *_ = ibnn.stochastic_layers(model)
    assert list(ibnn.MonteCarlo(model, 2, from_logits=True)._sampler._first) == [first]
    at_each_pixel = small(ibnn.NormalAffine(), noise="position")
    assert not ibnn.MonteCarlo(at_each_pixel, 2, from_logits=True)._sampler._first


def test_a_subclass_with_a_product_of_its_own_shares_no_work():
    class Doubled(ibnn.Stochastic):
        def apply(self, inputs, latent, groups=None, mask=None, training=False):
            return 2 * super().apply(inputs, latent, groups, mask, training)

    inputs = keras.Input((8, 8, 3))
    for kind in (ibnn.Stochastic, Doubled):
        layer = kind(keras.layers.Conv2D(4, 3), ibnn.NormalAffine(), 10)
        layer.build(inputs.shape)
        assert layer.shares_work(inputs) == (kind is ibnn.Stochastic)


@pytest.mark.slow
@pytest.mark.once
def test_an_activation_with_weights_is_trained_under_xla():
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(4, 3, activation=keras.layers.PReLU())(inputs)
    plain = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(x)))
    model = ibnn.to_stochastic(plain, ibnn.NormalAffine(), 10)
    x, y = RNG.normal(size=(8, 8, 8, 3)).astype("float32"), RNG.normal(size=(8, 2))
    model(x)
    model.compile("sgd", "mse", jit_compile=True)
    model.fit(x, y, verbose=0)
    (slopes,) = model.layers[1].layer.activation.weights
    assert np.any(ops.convert_to_numpy(slopes))
