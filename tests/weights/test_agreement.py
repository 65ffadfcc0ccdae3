"""What R-hat and the effective draws of known series are."""

import numpy as np
import pytest
from keras import ops

from tfp_ibnn.weights.agreement import agreement


@pytest.mark.once
def test_r_hat_and_effective_draws_of_known_series():
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(2000, 4, 1))
    slow = np.zeros_like(noise)
    for i in range(1, 2000):
        slow[i] = 0.8 * slow[i - 1] + 0.6 * noise[i]
    found = agreement(ops.convert_to_tensor(slow))
    assert 0.6 < found["effective draws, fewest"] / (8000 / 9) < 1.5  # (1 - 0.8) / (1 + 0.8)
    assert found["R-hat, largest"] < 1.02
