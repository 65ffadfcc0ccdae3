"""Networks that tests of several files average."""

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from tests.monte_carlo_tools import dense
from tfp_ibnn.layers import GaussianHead


@pytest.fixture(scope="module")
def known_gaussian():
    """Regression with the mean z * x, z from N(1, 0.5^2), and the standard deviation 0.7."""
    wide = ibnn.NormalAffine(initial_scale=0.5)
    model = keras.Sequential([keras.Input((1,)), dense(2, posterior=wide), GaussianHead()])
    layer = model.layers[0]
    layer.layer.kernel.assign([[1.0, 0.0]])
    layer.layer.bias.assign([0.0, np.log(np.expm1(0.699))])
    return model
