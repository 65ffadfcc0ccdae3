"""Dropout as a source of draws, against Keras's own layers in training."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests.monte_carlo_tools import data, numpy, set_weights, statistics
from tfp_ibnn import noise
from tfp_ibnn.prediction.dropout import drop

pytestmark = pytest.mark.once

COUNT = 4000
IMAGE = (3, 2, 4)

# Name -> (a function that makes a layer, shape of one example, shape of what a mask decides by
# itself: the axes of size 1 share a decision).
LAYERS = {
    "dropout": (lambda: layers.Dropout(0.3), (6,), (6,)),
    "noise-shape": (lambda: layers.Dropout(0.3, noise_shape=(None, 1, 4)), (3, 4), (1, 4)),
    "gaussian": (lambda: layers.GaussianDropout(0.3), (6,), (6,)),
    "spatial-1d": (lambda: layers.SpatialDropout1D(0.3), (3, 4), (1, 4)),
    "spatial-2d": (lambda: layers.SpatialDropout2D(0.3), IMAGE, (1, 1, 4)),
    "spatial-2d-first": (
        lambda: layers.SpatialDropout2D(0.3, data_format="channels_first"),
        IMAGE,
        (3, 1, 1),
    ),
    "spatial-3d": (lambda: layers.SpatialDropout3D(0.3), (2, *IMAGE), (1, 1, 1, 4)),
}


def dropped(layer, x, **options):
    options.setdefault("seed", 1)
    return numpy(drop(layer, keras.ops.convert_to_tensor(x), noise.Pass(**options)))


@pytest.mark.once
@pytest.mark.parametrize("name", LAYERS)
def test_moments_are_those_of_keras_in_training(name):
    make, shape, _ = LAYERS[name]
    layer = make()
    one = 1 + np.abs(data(*shape))
    x = np.broadcast_to(one, (COUNT, *shape)).astype("float32")
    ours, keras_own = dropped(layer, x), numpy(layer(x, training=True))
    assert ours.dtype == keras_own.dtype
    spread = keras_own.std(axis=0)
    # Five standard errors of a difference of two means, and of two standard deviations.
    error = 5 * spread * (2 / COUNT) ** 0.5
    assert np.all(np.abs(ours.mean(axis=0) - keras_own.mean(axis=0)) < error)
    assert np.all(np.abs(ours.std(axis=0) - spread) < 1.5 * error)
    if "gaussian" not in name:
        values = [np.unique(np.round(y.reshape(COUNT, -1)[:, 0], 4)) for y in (ours, keras_own)]
        assert len(values[0]) == 2
        np.testing.assert_allclose(*values, atol=2e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_masks_share_the_axes_that_keras_shares(name):
    make, shape, decided = LAYERS[name]
    x = np.ones((200, *shape), "float32")
    y = dropped(make(), x)
    shared = tuple(1 + axis for axis, size in enumerate(decided) if size == 1)
    np.testing.assert_array_equal(y, np.broadcast_to(y.min(axis=shared, keepdims=True), y.shape))
    apart = y.min(axis=shared, keepdims=True).reshape(200, -1)
    assert np.abs(np.corrcoef(apart.T) - np.eye(apart.shape[1])).max() < 0.4
    assert np.all(apart.std(axis=0) > 0)


def test_a_block_of_examples_shares_a_mask():
    y = dropped(layers.Dropout(0.5), np.ones((12, 40), "float32"), groups=3)
    blocks = y.reshape(3, 4, 40)
    np.testing.assert_array_equal(blocks, np.broadcast_to(blocks[:, :1], blocks.shape))
    assert len(np.unique(blocks[:, 0], axis=0)) == 3


def test_a_rate_of_zero_leaves_the_input_as_it_is():
    x = data(5, 3)
    for kind in (layers.Dropout, layers.GaussianDropout):
        np.testing.assert_array_equal(dropped(kind(0.0), x), x)


def test_half_precision_keeps_the_rate():
    y = dropped(layers.Dropout(0.1), np.ones((2000, 4), "float16"))
    assert y.dtype == "float16"
    assert abs(np.mean(y == 0) - 0.1) < 0.02
    np.testing.assert_allclose(y.max(), 1 / 0.9, rtol=1e-3)


@pytest.mark.parametrize("sampling", ["iid", "antithetic", "qmc"])
def test_masks_are_independent_in_every_sampling(sampling):
    y = dropped(layers.Dropout(0.5), np.ones((1000, 3), "float32"), groups=1000, sampling=sampling)
    assert abs(np.mean(y > 0) - 0.5) < 0.05
    assert np.abs(np.corrcoef(y[::2].T, y[1::2].T) - np.eye(6)).max() < 0.2


# ------------------------------------------------------------------------------ through MonteCarlo


def network(rate=0.4):
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(6, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(rate),
            layers.Dense(2),
        ]
    )
    set_weights(model)
    rng = np.random.default_rng(1)
    norm = model.layers[1]
    norm.moving_mean.assign(rng.normal(size=6).astype("float32"))
    norm.moving_variance.assign(rng.uniform(0.5, 2, size=6).astype("float32"))
    return model


def test_batch_normalization_stays_as_in_inference():
    model = network(rate=0.0)
    x = data(7, 4)
    before = [numpy(weight.value).copy() for weight in model.weights]
    result = ibnn.MonteCarlo(model, 3, dropout=True, head="point").predict(x, verbose=0)
    np.testing.assert_allclose(result["mean"], numpy(model(x)), atol=1e-6)
    after = [numpy(weight.value) for weight in model.weights]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


def test_moments_of_a_network_with_dropout_are_known():
    """Behind the dropout the network is linear."""
    model = network()
    x = data(3, 4)
    options = {"dropout": True, "head": "point", "seed": 0}
    result = statistics(ibnn.MonteCarlo(model, COUNT, **options), x)
    hidden = numpy(keras.Model(model.inputs[0], model.layers[1].output)(x))
    kernel = numpy(model.layers[-1].kernel.value)
    variance = hidden**2 @ kernel**2 * 0.4 / 0.6
    error = 5 * np.sqrt(variance / COUNT)
    assert np.all(np.abs(result["mean"] - numpy(model(x))) < error)
    np.testing.assert_allclose(result["epistemic"], variance, rtol=0.15)
    assert np.all(variance > 1e-3)


def test_a_draw_is_one_network_for_all_examples():
    """Behind the dropout the network is affine: so is each draw, if all examples share masks."""
    model = keras.Sequential([keras.Input((4,)), layers.Dropout(0.5), layers.Dense(2)])
    x = np.concatenate([np.zeros((1, 4)), np.eye(4), data(6, 4)]).astype("float32")
    mc = ibnn.MonteCarlo(
        model, 5, dropout=True, head="point", seed=1, return_samples=True, chunk_size=2
    )
    samples = mc.predict(x, batch_size=4, verbose=0)["samples"]
    bias, rows = samples[:1], samples[1:5] - samples[:1]
    np.testing.assert_allclose(samples, bias + np.einsum("ni,isk->nsk", x, rows), atol=1e-5)
    assert len(np.unique(rows.reshape(4, 5, 2)[:, :, 0] != 0, axis=1).T) > 1


def test_independent_masks_differ_from_example_to_example():
    model = keras.Sequential([keras.Input((4,)), layers.Dropout(0.5), layers.Dense(2)])
    options = {"dropout": True, "head": "point", "seed": 1, "return_samples": True}
    x = np.ones((6, 4), "float32")
    for independent, distinct in ((True, 6), (False, 1)):
        samples = statistics(ibnn.MonteCarlo(model, 8, independent=independent, **options), x)
        assert len(np.unique(samples["samples"].round(4), axis=0)) == distinct


def test_dropout_joins_stochastic_layers():
    inputs = keras.Input((4,))
    hidden = layers.Dropout(0.5)(ibnn.StochasticDense(8, train_size=10)(inputs))
    model = set_weights(keras.Model(inputs, layers.Dense(1)(hidden)))
    x = np.ones((2, 4), "float32")
    spread = [
        statistics(ibnn.MonteCarlo(model, 256, head="point", seed=0, dropout=dropout), x)
        for dropout in (False, True)
    ]
    assert np.all(spread[1]["epistemic"] > 1.1 * spread[0]["epistemic"])
    assert np.all(spread[0]["epistemic"] > 1e-4)


def test_dropout_stays_off_unless_asked_for():
    model = network()
    x = data(3, 4)
    with pytest.warns(UserWarning, match="no stochastic layer"):
        mc = ibnn.MonteCarlo(model, 16, head="point")
    result = statistics(mc, x)
    np.testing.assert_allclose(result["mean"], numpy(model(x)), atol=1e-6)
    np.testing.assert_array_equal(result["epistemic"], 0)


class Block(layers.Layer):
    """A layer with a dropout layer inside."""

    def __init__(self):
        super().__init__()
        self.inside = layers.Dropout(0.5)

    def call(self, inputs, training=None):
        return self.inside(inputs, training=training)


def hidden_in_a_layer():
    return keras.Sequential([keras.Input((4,)), Block(), layers.Dense(2)])


def hidden_in_a_wrapper():
    inner = layers.TimeDistributed(layers.Dropout(0.5))
    return keras.Sequential([keras.Input((4,)), layers.Reshape((2, 2)), inner, layers.Flatten()])


def hidden_in_a_nested_call():
    nested = keras.Sequential([keras.Input((4,)), layers.Dropout(0.5), layers.Dense(2)])
    inputs = keras.Input((4,))
    return keras.Model(inputs, nested(inputs, training=False))


@pytest.mark.parametrize("make", [hidden_in_a_layer, hidden_in_a_wrapper, hidden_in_a_nested_call])
def test_dropout_that_cannot_be_left_on_is_not_silently_off(make):
    """It draws, or there is an error or a warning that says so."""
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            mc = ibnn.MonteCarlo(make(), 16, head="point", dropout=True, seed=0)
        except ValueError as error:
            said.append(str(error))
    said += [str(warning.message) for warning in caught]
    if not any("ropout" in message for message in said):
        assert np.all(statistics(mc, np.ones((2, 4), "float32"))["epistemic"] > 1e-4)


def test_dropout_inside_of_recurrent_layers_is_announced_to_stay_off():
    model = keras.Sequential(
        [keras.Input((3, 4)), layers.LSTM(2, dropout=0.5), layers.Dropout(0.1)]
    )
    with pytest.warns(
        UserWarning, match=r"lstm.*stays off.*keras\.layers\.Dropout before and after"
    ):
        ibnn.MonteCarlo(model, 2, head="point", dropout=True)
    model = keras.Sequential([keras.Input((4,)), layers.AlphaDropout(0.1), layers.Dropout(0.1)])
    with pytest.warns(UserWarning, match="alpha_dropout.*stays off.*not AlphaDropout"):
        ibnn.MonteCarlo(model, 2, head="point", dropout=True)


def test_dropout_needs_a_graph():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.drop, self.top = layers.Dropout(0.5), layers.Dense(2)

        def call(self, inputs):
            return self.top(self.drop(inputs))

    model = Own()
    model(data(2, 4))
    with pytest.raises(ValueError, match="Functional and Sequential.*Own"):
        ibnn.MonteCarlo(model, 2, head="point", dropout=True)


def test_a_seed_gives_the_same_masks_for_ever():
    y = dropped(layers.Dropout(0.5), np.ones((2, 12), "float32"), seed=7)
    expected = ["110001101001", "100011000001"]
    assert ["".join("01"[int(v > 0)] for v in row) for row in y] == expected
