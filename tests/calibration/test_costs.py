"""What a prediction takes, against counts by hand."""

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests.calibration.tools import mlp
from tfp_ibnn.calibration import costs
from tfp_ibnn.calibration.engine import Engine

MLP = 2 * 5 + 5 * 3
"""Multiply-adds of the small network for an example."""
LAST = 5 * 3


@pytest.fixture(scope="module")
def network():
    return mlp(5, 3, features=2, dropout=0.5)


def passes(made, unit=None, samples=8, **options):
    return costs.passes(Engine(lambda: made, samples, **options), unit)


def test_draws_repeat_only_what_is_behind_the_first_noise(network):
    assert passes(network, samples=1) == 1
    assert passes(network, dropout=True) == pytest.approx((2 * 5 + 8 * LAST) / MLP)
    stochastic = ibnn.to_stochastic(network, ibnn.NormalAffine(), train_size=10)
    assert passes(stochastic, network) == 8


def test_posteriors_over_weights(network):
    x = np.random.default_rng(0).normal(size=(20, 2)).astype("float32")
    y = np.arange(20) % 3
    options = {"head": "softmax", "from_logits": True}

    def laplace(*args, **others):
        return ibnn.Laplace(network, *args, **options, **others).fit(x, y, verbose=0)

    once = MLP - LAST
    assert passes(laplace(), network) == pytest.approx((once + 8 * LAST) / MLP)
    assert passes(laplace(link_approx="probit"), network) == 1
    assert passes(laplace("all"), network) == 2 * 8
    assert passes(laplace("all", pred_type="nn"), network) == 8
    assert passes(laplace("all", link_approx="probit"), network) == 1 + 3
    ensemble = ibnn.DeepEnsemble([network, mlp(5, 3, features=2, dropout=0.5)])
    assert passes(ensemble, network) == 2
    wide = mlp(10, 3, features=2)
    mixture = ibnn.WeightMixture([ensemble, wide])
    # Each member runs as often: the two networks of the first, and the other one twice.
    expected = 2 * MLP + 2 * (2 * 10 + 10 * 3)
    engine = Engine(lambda: mixture, 4)
    assert costs.passes(engine, network) == pytest.approx(expected / MLP)


def test_multiply_adds_of_layers():
    image = keras.Input((8, 6, 2))
    x = layers.Conv2D(4, 3, strides=2)(image)  # (3, 2, 4)
    x = layers.Conv2DTranspose(3, 2, strides=2)(x)  # from 6 positions
    x = layers.DepthwiseConv2D(3, padding="same")(x)  # (6, 4, 3)
    x = layers.BatchNormalization()(x)
    x = layers.Reshape((24, 3))(x)
    x = layers.LSTM(5)(x)
    outputs = layers.Dense(1)(x)
    network = keras.Model(image, outputs)
    convolutions = 3 * 2 * (3 * 3 * 2 * 4) + 3 * 2 * (2 * 2 * 3 * 4) + 6 * 4 * (3 * 3 * 3)
    expected = convolutions + 24 * (3 + 5) * 4 * 5 + 5
    assert passes(network, mlp(5, 1, features=1), samples=1) == pytest.approx(expected / 10)
    tokens = keras.Input((7,), dtype="int32")
    x = layers.Embedding(11, 3)(tokens)
    outputs = layers.TimeDistributed(layers.Dense(2))(x)
    network = keras.Model(tokens, outputs)
    assert passes(network, mlp(5, 1, features=1), samples=1) == pytest.approx(7 * 3 * 2 / 10)


def test_draws_count_where_layers_cannot_be_seen(network):
    class Opaque(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)

        def call(self, x):
            return self.dense(x)

    model = Opaque()
    model.build((None, 2))
    assert passes(model, samples=1) == 1


def test_megabytes_are_of_weights_and_posterior_but_not_of_an_optimizer(network):
    count = 2 * 5 + 5 + 5 * 3 + 3
    engine = Engine(lambda: network, training={"optimizer": "adam", "loss": "mse"})
    engine.train(engine.read(), lambda x: x.fit(np.zeros((4, 2)), np.zeros((4, 3)), verbose=0))
    assert costs.megabytes(engine.network) == pytest.approx(4 * count / 1e6)
    ensemble = ibnn.DeepEnsemble(3 * [network])  # it holds the network too
    assert costs.megabytes(ensemble) == pytest.approx(4 * 4 * count / 1e6)
    half = keras.Sequential([keras.Input((2,)), layers.Dense(3, dtype="bfloat16")])
    assert costs.megabytes(half) == pytest.approx(2 * 9 / 1e6)
