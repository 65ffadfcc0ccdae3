import numpy as np
import pytest
from keras import ops

from tests import autodiff
from tests.flows.tools import close, draws, forward, jacobian, log_det, slope_by_differences
from tests.registry import FLOWS, make_flow, min_channels

pytestmark = pytest.mark.once

needs_two = [name for name in FLOWS if min_channels(name) == 2]


def test_some_flows_need_two_channels():
    assert {name.split("-")[0] for name in needs_two} == {"coupling", "glow"}


@pytest.mark.parametrize("name", needs_two)
def test_one_channel_is_refused_with_a_remedy(name):
    flow = FLOWS[name]()
    with pytest.raises(ValueError, match="at least 2 channels.*got 1.*Planar") as caught:
        flow.build((None, 1))
    assert type(flow).__name__ in str(caught.value)


@pytest.mark.parametrize("channels", [2, 3, 6, 7])
@pytest.mark.parametrize("name", ["coupling", "coupling-swap"])
def test_one_part_is_kept_and_steers_the_other(float64, name, channels):
    flow, x = make_flow(name, channels, seed=2), draws((5, channels))
    first, last = np.split(np.arange(channels), [channels // 2])
    kept, moved = (last, first) if name == "coupling-swap" else (first, last)
    y = forward(flow, x)
    np.testing.assert_array_equal(y[:, kept], x[:, kept])
    assert np.all(y[:, moved] != x[:, moved])
    found = jacobian(flow, x)
    among = found[:, moved][:, :, moved]
    close(among, among * np.eye(len(moved)), 1e-14)
    assert np.all(found[:, moved][:, :, kept].any(axis=0))


@pytest.mark.parametrize("sign", [-1, 1])
def test_log_scale_is_bounded(float64, sign):
    flow, x = make_flow("coupling", 4, seed=2), draws((5, 4))
    flow.network.output_bias.assign(np.full((2, 2), sign * 1e6))
    close(log_det(flow, x), sign * 2 * flow.limit, 1e-10)


def test_gradients_against_finite_differences(float64):
    flow, x = make_flow("coupling", 3, seed=2), draws((6, 3))

    def loss():
        v = ops.convert_to_tensor(x)
        y, found = flow.forward_and_log_det(v)
        back = flow.bijector().inverse(v)
        return ops.sum(ops.square(y)) + ops.sum(ops.exp(found)) + ops.sum(ops.square(back))

    weights = flow.trainable_weights
    value = autodiff.quick(loss, weights)
    for weight, gradient in zip(weights, autodiff.weight_gradients(loss, weights), strict=True):
        close(gradient, slope_by_differences(value, weight), 1e-6)
