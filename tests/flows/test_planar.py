import numpy as np
import pytest
import scipy.optimize
from keras import ops

from tests import autodiff
from tests.flows.tools import close, draws, forward, inverse, log_det, numpy, slope_by_differences
from tests.registry import make_flow, perturb
from tfp_ibnn.flows.planar import solve_monotone

pytestmark = pytest.mark.once


def assign(flow, **values):
    for name, value in values.items():
        weight = getattr(flow, name)
        weight.assign(np.broadcast_to(value, weight.shape).astype(weight.dtype))


@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 10.0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_constraint_holds_for_any_weights(dtype, size):
    flow = make_flow("planar", 3, dtype=dtype)
    for seed in range(10):
        perturb(flow, seed, size)
        u, w, _ = numpy(*(getattr(flow.bijector(), name) for name in "uwb"))
        assert np.sum(u.astype("float64") * w.astype("float64")) > -1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_constraint_holds_for_huge_opposite_vectors(dtype):
    flow = make_flow("planar", 3, dtype=dtype)
    assign(flow, u=[1e3, -1e3, 7e2], w=[-900.0, 1e3, -333.0], b=0.0)
    x = np.concatenate([np.zeros((1, 3)), draws((50, 3), seed=0) * 1e-4]).astype(dtype)
    assert np.all(np.isfinite(log_det(flow, x)))
    assert np.all(np.isfinite(log_det(flow, x, "inverse")))


def test_correction_leaves_positive_products_alone(float64):
    flow = make_flow("planar", 3)
    assign(flow, u=[1.0, 2.0, 0.5], w=[0.5, 0.25, 1.0], b=0.3)
    close(numpy(flow.bijector().u), [1.0, 2.0, 0.5], 1e-14)


def test_correction_is_along_w(float64):
    flow = make_flow("planar", 3)
    u, w = np.array([-1.0, -2.0, 0.5]), np.array([1.5, 1.25, 1.0])
    assign(flow, u=u, w=w)
    moved = numpy(flow.bijector().u) - u
    assert np.linalg.norm(moved) > 0.1
    close(np.cross(moved, w), 0.0, 1e-12)


def test_zero_u_is_the_identity_whatever_w(float64):
    flow, x = make_flow("planar", 3, seed=2), draws((5, 3))
    assign(flow, u=0.0)
    close(forward(flow, x), x, 1e-14)
    close(log_det(flow, x), 0.0, 1e-14)


@pytest.mark.parametrize("w", [0.0, 1e-30, 1e-16])
def test_vanishing_w_gives_finite_values_and_gradients(w):
    flow, x = make_flow("planar", 3, seed=2), draws((5, 3), dtype="float32")
    assign(flow, w=w)

    def loss():
        bijector = flow.bijector()
        found = bijector.forward_log_det_jacobian(ops.convert_to_tensor(x), event_ndims=1)
        y, back = bijector.forward(x), flow.bijector().inverse(ops.convert_to_tensor(x))
        return ops.sum(y) + ops.sum(back) + ops.sum(found)

    assert np.isfinite(float(loss()))
    for gradient in autodiff.weight_gradients(loss, flow.trainable_weights):
        assert np.all(np.isfinite(gradient))


def test_inverse_next_to_the_constraint(float64):
    flow, x = make_flow("planar", 2), draws((200, 2))
    assign(flow, u=[-30.0, 0.0], w=[1.0, 0.0], b=0.0)
    product = float(ops.sum(flow.bijector().u * flow.bijector().w))
    assert -1 < product < -0.99
    close(inverse(flow, forward(flow, x)), x, 1e-8)


@pytest.mark.parametrize("slope", [-0.999, -0.5, 0.0, 0.7, 3.0, 200.0])
def test_solver_against_brentq(float64, slope):
    rng = np.random.default_rng(0)
    offset, target = rng.normal(size=30) * 5, rng.normal(size=30) * 20
    found = numpy(solve_monotone(np.float64(slope), offset, target))
    for a, b, t in zip(found, offset, target, strict=True):
        expected = scipy.optimize.brentq(
            lambda v, b=b, t=t: v + slope * np.tanh(v + b) - t,
            t - abs(slope) - 1,
            t + abs(slope) + 1,
            xtol=1e-14,
        )
        close(a, expected, 1e-11)


def test_gradients_against_finite_differences(float64):
    flow, x = make_flow("planar", 3, seed=2), draws((6, 3))

    def loss():
        v = ops.convert_to_tensor(x)
        y, found = flow.forward_and_log_det(v)
        back = flow.bijector().inverse(v)
        return ops.sum(ops.square(y)) + ops.sum(ops.exp(found)) + ops.sum(ops.square(back))

    weights = flow.trainable_weights
    value = autodiff.quick(loss, weights)
    for weight, gradient in zip(weights, autodiff.weight_gradients(loss, weights), strict=True):
        close(gradient, slope_by_differences(value, weight), 1e-6)
