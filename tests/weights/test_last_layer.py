"""What posteriors over the last layer refuse."""

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests.weights.last_layers import LOGITS, X, Y, logistic


@pytest.mark.once
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: ibnn.GaussianVI(m, covariance="kron"), "`covariance` must be one of"),
        (lambda m: ibnn.GaussianVI(m, prior_scale=0.0), "`prior_scale` must be above 0"),
        (lambda m: ibnn.GaussianVI(m, rank=0), "`rank`"),
        (lambda m: ibnn.GaussianVI(wide()), "20002 weights need 3.2 GB"),
        (lambda m: ibnn.GaussianVI(m).fit(X, Y[:3]), "as many examples"),
        (lambda m: ibnn.GaussianVI(m).fit(X, Y + 0.5), "0 or 1"),
        (lambda m: ibnn.GaussianVI(m).fit(X * np.nan, Y), "NaN or infinity"),
        (lambda m: ibnn.LastLayerHMC(m).fit(X[:0], Y[:0]), "no examples"),
        (lambda m: ibnn.GaussianVI(m, noise_scale=1.0).fit(X, Y), "`noise_scale` is for plain"),
        (lambda m: ibnn.LastLayerHMC(m, chains=1), "`chains` must be a whole number of at least 2"),
        (lambda m: ibnn.LastLayerHMC(m, draws=0), "`draws`"),
        (lambda m: ibnn.LastLayerHMC(wide()), "1000 draws of 20002 weights are too many"),
        (lambda m: ibnn.MonteCarlo(ibnn.GaussianVI(m), sampling="qmc"), "`sampling` must be"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(ValueError, match=words):
        make(logistic(2))


def wide():
    model = keras.Sequential([keras.Input((10_000,)), layers.Dense(2)])
    model.compile("sgd", LOGITS)
    return model
