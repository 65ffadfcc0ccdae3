import numpy as np
import pytest
from keras import ops

from tests import autodiff
from tests.flows.tools import close, draws, forward, inverse, log_det, numpy
from tests.registry import make_flow

pytestmark = pytest.mark.once


@pytest.mark.parametrize("raw_beta", [-2.0, 0.0, 2.0])
def test_finite_gradients_at_the_center(raw_beta):
    flow = make_flow("radial", 3, seed=2)
    flow.raw_beta.assign(raw_beta)
    center = numpy(flow.center.value)[None]

    def loss(x):
        there, back = flow.bijector(), flow.bijector()
        found = there.forward_log_det_jacobian(x, event_ndims=1)
        return ops.sum(there.forward(x)) + ops.sum(back.inverse(x)) + ops.sum(found)

    assert np.all(np.isfinite(autodiff.gradient(loss, center)))
    weights = flow.trainable_weights
    for gradient in autodiff.weight_gradients(lambda: loss(ops.convert_to_tensor(center)), weights):
        assert np.all(np.isfinite(gradient))


def test_center_stays_where_it_is(float64):
    flow = make_flow("radial", 3, seed=2)
    center = numpy(flow.center.value)
    close(forward(flow, center), center, 1e-14)
    close(inverse(flow, center), center, 1e-14)


def test_log_det_at_the_center(float64):
    flow = make_flow("radial", 3, seed=2)
    bijector = flow.bijector()
    expected = 3 * np.log1p(float(bijector.beta) / float(bijector.alpha))
    close(log_det(flow, numpy(flow.center.value)), expected, 1e-12)


@pytest.mark.parametrize("raw_beta", [-1e3, -20.0, 1e3])
@pytest.mark.parametrize("raw_alpha", [-5.0, 1.0, 50.0])
def test_inverse_at_the_ends_of_the_range(float64, raw_alpha, raw_beta):
    flow, x = make_flow("radial", 3, seed=2), draws((100, 3))
    flow.raw_alpha.assign(raw_alpha)
    flow.raw_beta.assign(raw_beta)
    bijector = flow.bijector()
    assert float(bijector.alpha) > 0
    assert float(bijector.beta) > -float(bijector.alpha)
    close(inverse(flow, forward(flow, x)), x, 1e-8)


def test_pull_moves_draws_inwards_and_push_outwards(float64):
    flow, x = make_flow("radial", 3, seed=2), draws((20, 3))
    center = numpy(flow.center.value)
    before = np.linalg.norm(x - center, axis=-1)
    for raw_beta, sign in ((-1.0, -1), (1.0, 1)):
        flow.raw_beta.assign(raw_beta)
        after = np.linalg.norm(forward(flow, x) - center, axis=-1)
        assert np.all(sign * (after - before) > 0)


def test_alpha_starts_at_the_typical_distance(float64):
    close(numpy(make_flow("radial", 9).bijector().alpha), 3.0, 1e-6)
