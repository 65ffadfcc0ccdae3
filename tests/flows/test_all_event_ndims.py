"""Flows whose events have more than one axis; float64."""

import numpy as np
import pytest
from keras import ops

import tfp_ibnn as ibnn
from tests.flows.tools import close, draws, forward, inverse, jacobian, log_det
from tests.registry import FLOWS, VARIANTS, make_flow, perturb, tolerance
from tfp_ibnn import flows
from tfp_ibnn._core.backend import tanh

KINDS = [name for name in FLOWS if name not in VARIANTS]
# The largest, whose parameters take the condition as those of the others do.
LARGE = ("coupling-spline", "glow-identity", "sylvester-3")


class RowsBijector(flows.FlowBijector):
    """Scale and shift the rows of a matrix (height, width) by what stands in the rows above."""

    parameter_ndims = {"weight": 2}  # noqa: RUF012
    event_ndims = 2

    def _log_scale(self, x):
        above = ops.concatenate([ops.zeros_like(x[..., :1, :]), x[..., :-1, :]], axis=-2)
        return tanh(ops.sum(self.weight * above, axis=-1, keepdims=True))

    def _forward(self, x):
        log_scale = self._log_scale(x)
        return x * ops.exp(log_scale) + log_scale

    def _inverse(self, y):
        x = ops.zeros_like(y)
        for _ in range(y.shape[-2]):
            log_scale = self._log_scale(x)
            x = (y - log_scale) * ops.exp(-log_scale)
        return x

    def _forward_log_det_jacobian(self, x):
        return x.shape[-1] * ops.sum(self._log_scale(x), axis=(-2, -1))


class Rows(flows.Flow):
    event_ndims = 2

    def build(self, input_shape):
        super().build(input_shape)
        self.weight = self.add_parameter("weight", (input_shape[-2], self.channels), "zeros")

    def bijector(self, condition=None):
        return RowsBijector(weight=self.parameter(self.weight, condition))


def make_rows(**kwargs):
    flow = Rows(**kwargs)
    flow.build((None, 3, 2))
    perturb(flow, seed=2)
    return flow


@pytest.mark.parametrize("lead", [(), (5,), (2, 4)])
def test_events_of_two_axes_have_one_log_det_each(float64, lead):
    flow, x = make_rows(), draws((*lead, 3, 2))
    for direction in ("forward", "inverse"):
        found = log_det(flow, x, direction)
        assert found.shape == lead
        close(found, np.linalg.slogdet(jacobian(flow, x, direction))[1], 1e-9)
    y, found = flow.forward_and_log_det(x)
    close(ops.convert_to_numpy(found), log_det(flow, x), 1e-12)
    close(ops.convert_to_numpy(y), forward(flow, x), 1e-12)
    close(inverse(flow, forward(flow, x)), x, 1e-9)
    assert np.max(np.abs(forward(flow, x) - x)) > 0.1


def test_a_condition_per_event_of_two_axes(float64):
    flow, x, condition = make_rows(condition_size=2), draws((5, 3, 2)), draws((5, 2), seed=7)
    found = log_det(flow, x, condition=condition)
    close(found, np.linalg.slogdet(jacobian(flow, x, condition=condition))[1], 1e-9)
    assert np.all(np.abs(found - log_det(flow, x, condition=-condition)) > 1e-6)


@pytest.mark.parametrize(
    ("name", "condition_shape"),
    [
        pytest.param(name, shape, marks=pytest.mark.slow if shape and name in LARGE else [])
        for name in KINDS
        for shape in (None, (2, 1, 1, 4))
    ],
)
def test_a_flow_of_vectors_on_images_sums_over_the_positions(float64, name, condition_shape):
    kwargs = {} if condition_shape is None else {"condition_size": 4}
    flow, x = make_flow(name, seed=2, **kwargs), draws((2, 2, 3, 3))
    condition = None if condition_shape is None else draws(condition_shape, seed=7)
    each = log_det(flow, x, condition=condition)
    assert each.shape == (2, 2, 3)
    flow.event_ndims = 3
    expected = np.linalg.slogdet(jacobian(flow, x, condition=condition))[1]
    allowed = tolerance(name, 1e-9)
    close(expected, each.sum(axis=(1, 2)), allowed)
    close(log_det(flow, x, condition=condition), expected, allowed)
    _, found = flow.forward_and_log_det(x, condition)
    close(np.broadcast_to(ops.convert_to_numpy(found), (2,)), expected, allowed)


def test_batch_norm_on_images_sums_over_the_positions_in_training_too(float64):
    flow, x = make_flow("batchnorm", seed=2), draws((4, 2, 3, 3))
    _, each = flow.forward_and_log_det(x, training=True)
    flow.event_ndims = 3
    _, found = flow.forward_and_log_det(x, training=True)
    close(ops.convert_to_numpy(found), 6 * ops.convert_to_numpy(each), 1e-12)


def test_an_input_with_too_few_axes_is_refused():
    with pytest.raises(ValueError, match=r"Rows works on the last 2 axes .* shape \(3,\)"):
        Rows().build((3,))


def test_posteriors_refuse_flows_of_larger_events():
    with pytest.raises(
        ValueError, match="`flows` must have .* event_ndims=1; got Rows .* event_ndims=2"
    ):
        ibnn.FlowPosterior([Rows()])
