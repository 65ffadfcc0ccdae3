"""A Gaussian head that is named, and outputs that cannot be one."""

import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests.likelihoods.tools import ends_in
from tests.monte_carlo_tools import data, set_weights

pytestmark = pytest.mark.once


def test_a_gaussian_head_that_is_said_needs_pairs():
    with pytest.raises(ValueError, match=r"gaussian.*3|3.*gaussian"):
        ibnn.MonteCarlo(set_weights(ends_in()), 2, head="gaussian")


def test_standard_deviations_below_zero_are_refused():
    """Squared, they would pass for variances."""
    mc = ibnn.MonteCarlo(ends_in(layers.Activation("tanh"), units=2), 8, head="gaussian", seed=0)
    with pytest.raises(ValueError, match="(?i)standard deviation|scale|negative"):
        mc.predict(data(20, 4), verbose=0)
