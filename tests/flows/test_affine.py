import numpy as np
import pytest

from tests.flows.tools import close, draws, forward, inverse, log_det, numpy
from tests.registry import make_flow
from tfp_ibnn.flows import Affine

pytestmark = pytest.mark.once


@pytest.mark.parametrize(("shift", "scale"), [(0.0, 1.0), (1.0, 0.5), (-3, 20), (0.0, 1e-3)])
def test_starts_where_it_is_told(float64, shift, scale):
    flow, x = Affine(initial_shift=shift, initial_scale=scale), draws((5, 3))
    flow.build((None, 3))
    close(forward(flow, x), shift + scale * x, 1e-6)
    close(log_det(flow, x), 3 * np.log(scale), 1e-6)


@pytest.mark.parametrize("raw", [-1e6, 1e6])
def test_scale_stays_positive(raw):
    flow, y = make_flow("affine"), draws((5, 3), dtype="float32")
    flow.raw_scale.assign(np.full(3, raw, "float32"))
    assert np.all(numpy(flow.bijector().scale) > 0)
    assert np.all(np.isfinite(inverse(flow, y)))
    assert np.all(np.isfinite(log_det(flow, y)))
