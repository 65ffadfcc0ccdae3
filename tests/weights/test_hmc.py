"""HMC over the last layer, against quadrature."""

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from tests.flows.tools import numpy
from tests.weights.last_layers import PRIOR, X, Y, logistic


@pytest.fixture(scope="module")
def hmc():
    made = ibnn.LastLayerHMC(logistic(2), prior_scale=PRIOR, draws=500, warmup=200)
    return made.fit(X, Y, verbose=0)


def test_hmc_has_the_moments_of_quadrature(hmc, quadrature):
    w, found = hmc.samples(), hmc.diagnostics()
    assert w.shape == (2000, 2)
    assert found["R-hat, largest"] < 1.02
    assert found["effective draws, fewest"] > 500
    assert 0.6 < found["acceptance"] < 0.98
    scale = np.sqrt(np.diag(quadrature.covariance))
    error = scale / found["effective draws, fewest"] ** 0.5
    assert np.all(np.abs(w.mean(axis=0) - quadrature.mean) < 4 * error)
    np.testing.assert_allclose(w.std(axis=0), scale, rtol=0.12)
    skew = np.mean(((w - w.mean(axis=0)) / w.std(axis=0)) ** 3, axis=0)
    assert skew[0] > 0.2  # which no Gaussian has
    np.testing.assert_allclose(numpy(hmc.mean()[0]).ravel(), w[:, 0].mean(), rtol=1e-4)


def test_hmc_draws_all_sets_in_a_mixed_order(hmc):
    drawn, stored = numpy(hmc.draw(None, np.arange(2000))), hmc.samples()
    np.testing.assert_array_equal(np.sort(drawn[:, 0]), np.sort(stored[:, 0]))
    place = {tuple(row): number for number, row in enumerate(stored)}
    first = np.array([place[tuple(row)] for row in drawn[:100]])
    assert np.histogram(first, bins=10, range=(0, 2000))[0].min() >= 8
    assert set(first % 4) == {0, 1, 2, 3}  # all chains


def test_the_report_is_a_table_and_the_file_holds_it(hmc, tmp_path):
    text = hmc.report()
    assert text.startswith("4 chains of 500 draws, 2 weights\nacceptance")
    assert len(text.splitlines()) == 5
    mc = ibnn.MonteCarlo(hmc, samples=16)
    mc.save(tmp_path / "hmc.keras")
    loaded = keras.models.load_model(tmp_path / "hmc.keras")
    np.testing.assert_array_equal(numpy(loaded(X)["mean"]), numpy(mc(X)["mean"]))
    assert loaded.inner.report() == text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The chains do not agree")
def test_a_seed_reproduces_the_chains():
    def draws(seed):
        made = ibnn.LastLayerHMC(logistic(2), chains=2, draws=8, warmup=8)
        return made.fit(X, Y, seed=seed, verbose=0).samples()

    first, again, other = draws(1), draws(1), draws(2)
    np.testing.assert_array_equal(first, again)
    assert np.all(first != other)


@pytest.mark.once
def test_chains_that_do_not_agree_are_told():
    made = ibnn.LastLayerHMC(logistic(2), draws=50, warmup=10)
    rng = np.random.default_rng(0)
    made._sets.assign(rng.normal(size=(50, 4, 2)) + np.array([0, 0, 0, 3.0])[:, None])
    assert made.diagnostics()["R-hat, largest"] > 1.5
