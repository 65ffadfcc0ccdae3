"""Labels: one output is two classes."""

import numpy as np
import pytest
from scipy.special import ndtr

from tests.calibration.tools import classes
from tfp_ibnn.likelihoods import Labels


def test_one_output_is_two_classes():
    rng = np.random.default_rng(0)
    z = 3 * rng.normal(size=(300, 5, 1)).astype("float32")
    y = (rng.random(300) < ndtr(z.mean(axis=(1, 2)) / 2)).astype(int)
    both = np.concatenate([np.zeros_like(z), z], axis=-1)
    one, two = Labels(True, width=1), classes(2, from_logits=True)
    assert one.fit(z, y) == pytest.approx(two.fit(both, y))
    np.testing.assert_allclose(one.predict(z, 2.0), two.predict(both, 2.0), atol=1e-6)
    p = 1 / (1 + np.exp(-z))
    answer = Labels(False, width=1).predict(p, 2.0)
    np.testing.assert_allclose(answer, one.predict(z, 2.0), atol=1e-4)
