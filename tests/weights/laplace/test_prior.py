"""The prior precision of the most evidence, and that of the least loss."""

import numpy as np
import pytest

import tfp_ibnn as ibnn
from tests.weights.laplace.tools import LABELS, POINTS, fitted

pytestmark = [
    pytest.mark.filterwarnings("ignore:The scale and shift"),
    pytest.mark.filterwarnings("ignore:The network does not seem to be trained"),
]


@pytest.mark.once
@pytest.mark.slow
def test_the_prior_precision(model, monkeypatch):
    la = fitted(model)
    best = la.log_marginal_likelihood()
    for factor in (0.8, 1.25):
        assert la.log_marginal_likelihood(factor * float(la.prior_precision)) < best
    grid = np.array([0.01, 0.1, 10.0])
    monkeypatch.setattr("tfp_ibnn.weights.laplace.prior.GRID", grid)
    chosen = ibnn.Laplace(model, prior_precision="validation", link_approx="probit")
    data = POINTS, LABELS
    chosen.fit(*data, validation_data=data, verbose=0)
    found, mc, losses = float(chosen.prior_precision), ibnn.MonteCarlo(chosen), []
    for prior in grid:
        chosen.prior_precision.assign(prior)
        losses.append(mc.evaluate(*data, verbose=0, return_dict=True)["loss"])
    assert found == pytest.approx(grid[np.argmin(losses)])
    with pytest.raises(ValueError, match="needs `validation_data`"):
        chosen.fit(*data, verbose=0)
