"""The scale that suits the errors of a regression, and its scores."""

import math

import keras
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import ndtr

import tfp_ibnn as ibnn
from tests.calibration.tools import classes
from tfp_ibnn.likelihoods import Gaussian, Point


def gaussian_raw(rng, draws=1):
    return rng.normal(size=(400, draws, 2)).astype("float32"), rng.normal(size=(400, 2))


def test_scale_of_a_point_prediction_is_the_root_mean_squared_error():
    raw, y = gaussian_raw(np.random.default_rng(0))
    expected = np.sqrt(np.mean((y - raw[:, 0]) ** 2, axis=0))
    np.testing.assert_allclose(Point(2).fit(raw, y), expected, rtol=1e-4)


def test_factor_of_predicted_scales_is_the_root_mean_squared_z():
    rng = np.random.default_rng(0)
    loc, y = gaussian_raw(rng)
    scale = np.exp(0.3 * rng.normal(size=loc.shape)).astype("float32")
    expected = np.sqrt(np.mean(((y - loc[:, 0]) / scale[:, 0]) ** 2))
    found = Gaussian(4).fit(np.concatenate([loc, scale], axis=-1), y)
    assert found == pytest.approx(expected, rel=1e-4)


def test_scale_leaves_the_spread_of_the_draws_out():
    rng = np.random.default_rng(0)
    raw = rng.normal(size=(4000, 50, 1)).astype("float32")
    y = math.sqrt(1 + 2.0**2) * rng.normal(size=(4000, 1))
    assert Point(1).fit(raw, y)[0] == pytest.approx(2.0, rel=0.05)


def test_scores_of_a_regression():
    rng = np.random.default_rng(0)
    output = Point(1)
    loc, scale, y = 0.3, 1.7, -0.9
    prediction = np.array([[[loc], [scale**2]]])
    scores = output.evidence(prediction, np.array([[y]]), 0)
    below = quad(lambda t: ndtr((t - loc) / scale) ** 2, -40, y)[0]
    above = quad(lambda t: (1 - ndtr((t - loc) / scale)) ** 2, y, 40)[0]
    assert scores["CRPS"] == pytest.approx(below + above, rel=1e-6)
    assert scores["RMSE"] == pytest.approx(1.2)
    nll = 0.5 * ((y - loc) / scale) ** 2 + math.log(scale * math.sqrt(2 * math.pi))
    assert scores["NLL"] == pytest.approx(nll)
    y = loc + scale * rng.normal(size=(20000, 1))
    covered = output.evidence(np.tile(prediction, (20000, 1, 1)), y, 0)["90 % coverage"]
    assert covered == pytest.approx(0.9, abs=0.01)


def test_kl_counts_against_the_likelihood_not_the_squared_error():
    # MSE = 2 sigma^2 / D * (NLL - constant), so the KL is multiplied by that, too.
    output, rng = Point(2), np.random.default_rng(0)
    y, loc, scale = rng.normal(size=(50, 2)), rng.normal(size=(50, 2)), 0.7
    nll = [output.nll(np.stack([x, np.full_like(x, scale**2)], axis=1), y).mean() for x in (loc, y)]
    mse = np.mean((y - loc) ** 2)
    det = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    sto = ibnn.to_stochastic(det, ibnn.NormalAffine(), train_size=50)
    sto.compile("sgd", "mse", noise_scale=output.noise_scale(np.full(2, scale)))
    assert sto.get_compile_config()["kl_scale"] * (nll[0] - nll[1]) == pytest.approx(mse)
    assert classes(3, from_logits=True).noise_scale(2.0) is None
