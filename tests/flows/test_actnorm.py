import numpy as np
import pytest
from keras import ops

from tests.flows.tools import close, draws, forward, inverse, log_det, numpy
from tests.registry import make_flow
from tfp_ibnn.flows import ActNorm

pytestmark = pytest.mark.once


@pytest.mark.parametrize("lead", [(500,), (20, 5, 5)])
def test_adapt_whitens(float64, lead):
    flow = ActNorm()
    samples = draws((*lead, 3)) * [0.1, 1.0, 9.0] + [5.0, 0.0, -2.0]
    flow.adapt(samples)
    y = forward(flow, samples).reshape(-1, 3)
    close(y.mean(axis=0), 0.0, 1e-10)
    close(y.std(axis=0), 1.0, 1e-10)


def test_adapt_takes_tensors_and_a_built_flow():
    flow, samples = make_flow("actnorm", seed=2), draws((50, 3), dtype="float32") * 4
    flow.adapt(ops.convert_to_tensor(samples))
    close(forward(flow, samples).std(axis=0), 1.0, 1e-4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "samples",
    [
        np.ones((10, 2)),
        np.array([[0.0, 1.0], [1.0, 1.0]]),
        np.ones((1, 2)),
        np.zeros((0, 2)),
        np.array([[0.0, 1.0], [np.nan, 2.0]]),
        np.array([[0.0, 1.0], [np.inf, 2.0]]),
    ],
    ids=["constant", "constant channel", "one draw", "none", "nan", "inf"],
)
def test_adapt_refuses_bad_samples_and_keeps_the_weights(samples):
    flow = make_flow("actnorm", 2, seed=2)
    before = flow.get_weights()
    with pytest.raises(ValueError, match="`samples`"):
        flow.adapt(samples)
    for old, new in zip(before, flow.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("spread", [1e-9, 1e9])
def test_adapt_stays_within_the_bound(float64, spread):
    flow = ActNorm(limit=2.0)
    samples = draws((100, 2)) * spread
    flow.adapt(samples)
    assert np.all(np.abs(np.log(numpy(flow.bijector().scale))) < 2.0)
    close(forward(flow, samples).mean(axis=0), 0.0, 1e-5)


def test_a_call_assigns_nothing():
    flow, x = make_flow("actnorm", seed=2), ops.convert_to_tensor(draws((5, 3), dtype="float32"))
    before = flow.get_weights()
    flow(x)
    flow.forward_and_log_det(x, training=True)
    flow.bijector().inverse(x)
    for old, new in zip(before, flow.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("raw", [-1e6, 1e6])
def test_log_scale_is_bounded(float64, raw):
    flow, x = ActNorm(limit=1.5), draws((5, 2))
    flow.build((None, 2))
    flow.raw_log_scale.assign([raw, raw])
    close(log_det(flow, x), np.sign(raw) * 3.0, 1e-12)
    close(inverse(flow, forward(flow, x)), x, 1e-12)
