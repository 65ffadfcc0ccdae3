"""What TensorFlow Probability asks of its bijectors, of every flow: see its bijector_test_util.

Log-determinants may be constants, scalars for all events; they must count once for each event.
"""

import numpy as np
import pytest
from keras import ops

from tests import autodiff
from tests.flows.tools import close, draws, forward, jacobian, numpy
from tests.registry import FLOWS, IMAGE_FLOWS, make_flow, perturb, tolerance

CHANNELS, SHAPE = 3, (4, 4, 1)


def made(name):
    """A flow at random weights, and the shape of an event."""
    if name in FLOWS:
        return make_flow(name, CHANNELS, seed=2), (CHANNELS,)
    flow = IMAGE_FLOWS[name]()
    flow.build((None, *SHAPE))
    perturb(flow, 2, 0.5)
    return flow, SHAPE


every_flow = pytest.mark.parametrize("name", [*FLOWS, *IMAGE_FLOWS])


@every_flow
def test_it_is_a_bijector_as_probability_defines_it(float64, name):
    flow, event = made(name)
    x, ndims, within = draws((2, 3, *event)), len(event), tolerance(name, 1e-8)
    bijector = flow.bijector()
    y = bijector.forward(ops.convert_to_tensor(x))
    assert bijector.forward_min_event_ndims == bijector.inverse_min_event_ndims == ndims
    assert tuple(bijector.forward_event_shape(x.shape)) == x.shape
    assert tuple(bijector.inverse_event_shape(x.shape)) == x.shape
    # A copy and a new bijector, since TFP remembers what it has mapped.
    again = ops.convert_to_tensor(numpy(y).copy())
    close(numpy(flow.bijector().inverse(again)), x, within)
    forth = np.broadcast_to(numpy(bijector.forward_log_det_jacobian(x, ndims)), (2, 3))
    back = np.broadcast_to(numpy(flow.bijector().inverse_log_det_jacobian(again, ndims)), (2, 3))
    assert np.isfinite(forth).all()
    close(back, -forth, within)


@every_flow
def test_log_dets_of_larger_events_are_sums(float64, name):
    flow, event = made(name)
    x = draws((2, 3, *event))

    def log_dets(way, at):
        def of_all_sizes(v):
            method = f"{way}_log_det_jacobian"
            return [getattr(flow.bijector(), method)(v, len(event) + more) for more in range(3)]

        return autodiff.quick(of_all_sizes, flow.weights)(ops.convert_to_tensor(at))

    forth, back = log_dets("forward", x), log_dets("inverse", forward(flow, x))
    each = np.broadcast_to(numpy(forth[0]), (2, 3))
    for more in range(3):
        expected = each.sum(axis=tuple(range(2 - more, 2)))
        for found, sign in ((numpy(forth[more]), 1), (numpy(back[more]), -1)):
            close(sign * np.broadcast_to(found, expected.shape), expected, tolerance(name, 1e-8))
            assert not found.shape or more < 2


@pytest.mark.parametrize("name", ["affine", "actnorm", "stack", "squeeze", "multi-scale"])
def test_constant_log_dets_are_those_of_the_jacobian(float64, name):
    flow, event = made(name)
    x = draws((4, *event))
    expected = np.linalg.slogdet(jacobian(flow, x))[1]
    y, found = flow.forward_and_log_det(ops.convert_to_tensor(x))
    close(np.broadcast_to(numpy(found), (4,)), expected, 1e-9)
    _, found = flow.inverse_and_log_det(ops.convert_to_tensor(numpy(y).copy()))
    close(np.broadcast_to(numpy(found), (4,)), -expected, 1e-9)
