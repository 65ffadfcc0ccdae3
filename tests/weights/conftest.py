"""Posteriors that tests of several files need, each once for a file."""

import keras
import pytest

import tfp_ibnn as ibnn
from tests.weights.last_layers import Quadrature
from tests.weights.members import LOSS, small
from tests.weights.swag import trained


@pytest.fixture(scope="module")
def quadrature():
    return Quadrature(2)


@pytest.fixture(scope="module")
def plain():
    return trained(norm=False)


@pytest.fixture(scope="module")
def mixture(plain):
    """SWAG, with a stochastic network of another architecture as its second member."""
    layers = [keras.Input((3,)), keras.layers.Dense(2)]
    noise = ibnn.NormalAffine(initial_scale=0.3)
    other = ibnn.to_stochastic(keras.Sequential(layers), noise, train_size=40)
    return ibnn.WeightMixture([plain[0].posterior(), other])


@pytest.fixture(scope="module")
def stochastic_models():
    models = []
    for seed in range(2):
        keras.utils.set_random_seed(seed)
        posterior = ibnn.NormalAffine(initial_scale=0.3)
        models.append(ibnn.to_stochastic(small(seed), posterior, train_size=20))
        models[-1].compile("sgd", LOSS)
    return models
