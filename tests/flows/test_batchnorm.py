import numpy as np
import pytest
from keras import ops

from tests import autodiff
from tests.flows.tools import close, draws, forward, log_det, numpy
from tests.registry import make_flow
from tfp_ibnn.flows import BatchNorm

pytestmark = pytest.mark.once


def run(flow, x, training=True):
    y, found = numpy(*flow.forward_and_log_det(ops.convert_to_tensor(x), training=training))
    return y, np.broadcast_to(found, x.shape[:-1])


def running(flow):
    return numpy(flow.mean.value).copy(), numpy(flow.variance.value).copy()


@pytest.mark.parametrize("lead", [(50,), (5, 2, 5)])
def test_training_uses_the_statistics_of_the_draws(float64, lead):
    flow, x = make_flow("batchnorm", seed=2), 3 * draws((*lead, 3)) + 7
    rows = x.reshape(-1, 3)
    log_scale = 3 * np.tanh(numpy(flow.raw_log_scale.value) / 3)
    y, found = run(flow, x)
    y = y.reshape(-1, 3)
    close(y.mean(axis=0), numpy(flow.shift.value), 1e-10)
    close(y.std(axis=0), np.exp(log_scale), 1e-10)
    close(found, np.sum(log_scale - np.log(rows.std(axis=0))), 1e-10)


def test_running_statistics_move_in_training_only(float64):
    flow, x = BatchNorm(momentum=0.8), 3 * draws((50, 3)) + 7
    flow.build((None, 3))
    run(flow, x, training=False)
    flow(ops.convert_to_tensor(x))
    close(running(flow), [np.zeros(3), np.ones(3)], 1e-14)
    run(flow, x)
    close(running(flow), [0.2 * x.mean(axis=0), 0.8 + 0.2 * x.var(axis=0)], 1e-10)
    for _ in range(100):
        run(flow, x)
    close(running(flow), [x.mean(axis=0), x.var(axis=0)], 1e-6)


@pytest.mark.parametrize("lead", [(), (1,), (1, 1)])
def test_a_single_draw_uses_the_running_statistics(float64, lead):
    flow, x = make_flow("batchnorm", seed=2), draws((*lead, 3))
    before = running(flow)
    y, found = run(flow, x)
    close(y, forward(flow, x), 1e-12)
    close(found, log_det(flow, x), 1e-12)
    close(running(flow), before, 1e-12)


def test_inference_uses_the_running_statistics(float64):
    flow, x = make_flow("batchnorm", seed=2), draws((20, 3))
    y, _ = run(flow, x, training=False)
    log_scale = 3 * np.tanh(numpy(flow.raw_log_scale.value) / 3)
    mean, variance = running(flow)
    expected = numpy(flow.shift.value) + np.exp(log_scale) * (x - mean) / np.sqrt(variance)
    close(y, expected, 1e-12)


def test_equal_draws_stay_finite():
    flow, x = make_flow("batchnorm", seed=2), np.ones((4, 3), "float32")
    for _ in range(3):
        y, found = run(flow, x)
        assert np.all(np.isfinite(y))
        assert np.all(np.isfinite(found))
    assert np.all(np.isfinite(running(flow)))


def test_training_step_has_gradients(float64):
    flow, x, out = make_flow("batchnorm", seed=2), draws((20, 3)), draws((20, 3), seed=3)

    def loss(v):
        y, found = flow.forward_and_log_det(v, training=True)
        return ops.sum(y * out) + ops.sum(found)

    inputs = autodiff.gradient(loss, x)
    assert np.all(np.isfinite(inputs))
    weights = flow.trainable_weights
    for gradient in autodiff.weight_gradients(lambda: loss(ops.convert_to_tensor(x)), weights):
        assert np.all(gradient != 0)
        assert np.all(np.isfinite(gradient))


def test_compiled_training_step(float64):
    flow, x = make_flow("batchnorm", seed=2), draws((20, 3))
    compiled = autodiff.jit(lambda v: flow.forward_and_log_det(v, training=True), flow.weights)
    y, found = numpy(*compiled(ops.convert_to_tensor(x)))
    expected = run(flow, x)
    close(y, expected[0], 1e-12)
    close(np.broadcast_to(found, (20,)), expected[1], 1e-12)


@pytest.mark.parametrize("training", [False, True])
def test_push_builds_the_flow(training):
    y, _ = BatchNorm().forward_and_log_det(ops.ones((4, 2)), training=training)
    assert tuple(y.shape) == (4, 2)
