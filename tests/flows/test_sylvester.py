import numpy as np
import pytest
from keras import ops

from tests.flows.tools import close, draws, forward, inverse, log_det, numpy
from tests.registry import make_flow, perturb
from tfp_ibnn.flows import PlanarBijector, Sylvester

pytestmark = pytest.mark.once


@pytest.mark.parametrize(("units", "channels"), [(8, 3), (3, 3), (2, 5), (4, 1)])
def test_units_are_at_most_the_channels(float64, units, channels):
    flow, x = Sylvester(units=units), draws((10, channels))
    flow.build((None, channels))
    perturb(flow, 2)
    assert tuple(flow.bijector().q.shape) == (channels, min(units, channels))
    close(inverse(flow, forward(flow, x)), x, 1e-8)


@pytest.mark.parametrize("size", [0.0, 1e-25, 3e-16, 1e-8, 1.0, 1e3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_projection_is_orthonormal_for_any_reflections(dtype, size):
    flow = make_flow("sylvester-3", 5, dtype=dtype)
    perturb(flow, 2, size)
    q = numpy(flow.bijector().q)
    close(q.T @ q, np.eye(3), 1e-5 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize("units", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("rows", [(), (3,)])
def test_projection_is_the_product_of_reflections(float64, units, rows):
    flow = Sylvester(units=units, condition_size=2 if rows else None)
    flow.build((None, 13))
    perturb(flow, 2)
    condition = ops.convert_to_tensor(draws((*rows, 2))) if rows else None
    expected = np.eye(13, units)
    for vector in reversed(np.moveaxis(numpy(flow.parameter(flow.reflections, condition)), -2, 0)):
        v = vector / np.linalg.norm(vector, axis=-1, keepdims=True)
        expected = expected - 2 * v[..., :, None] * (v[..., None, :] @ expected)
    close(numpy(flow.bijector(condition).q), expected, 1e-12)


@pytest.mark.parametrize("size", [1.0, 1e3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_constraint_holds_for_any_weights(dtype, size):
    flow = make_flow("sylvester-3", 5, dtype=dtype)
    for seed in range(10):
        perturb(flow, seed, size)
        bijector = flow.bijector()
        r, s = numpy(bijector.r, bijector.s)
        assert np.all(np.diagonal(r) * np.diagonal(s) > -1)
        assert np.all(np.diagonal(s) > 0)
        assert np.all(np.tril(r, -1) == 0)
        assert np.all(np.tril(s, -1) == 0)


def test_inverse_next_to_the_constraint(float64):
    flow, x = make_flow("sylvester-3", 3, seed=2), draws((50, 3))
    flow.r.assign(np.diag([-30.0, -30.0, 1.0]) + np.triu(numpy(flow.r.value), 1))
    close(forward(flow, inverse(flow, x)), x, 1e-8)


def test_one_unit_is_a_planar_flow(float64):
    flow, x = make_flow("sylvester-1", 3, seed=2), draws((10, 3))
    bijector = flow.bijector()
    q, r, s, b = numpy(bijector.q, bijector.r, bijector.s, bijector.b)
    u, w = (ops.convert_to_tensor(q[:, 0] * factor[0, 0]) for factor in (r, s))
    planar = PlanarBijector(u=u, w=w, b=ops.convert_to_tensor(b[0]), slope=ops.sum(u * w))
    v = ops.convert_to_tensor(x)
    close(forward(flow, x), numpy(planar.forward(v)), 1e-12)
    close(log_det(flow, x), numpy(planar.forward_log_det_jacobian(v, event_ndims=1)), 1e-12)
