"""Short ways to run a flow on NumPy arrays.

Each takes a new bijector and makes a new tensor, so that nothing comes out of TFP's cache.
"""

import functools

import numpy as np
from keras import ops

from tests import autodiff


def draws(shape, seed=1, dtype="float64"):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@functools.cache
def _method(flow, name, **kwargs):
    def call(x, *condition):
        return getattr(flow.bijector(*condition), name)(x, **kwargs)

    # Inverses hold loops.
    return autodiff.quick(call, flow.weights) if name.startswith("inverse") else call


def _run(flow, name, x, condition, **kwargs):
    arrays = [x] if condition is None else [x, condition]
    function = _method(flow, name, **kwargs)
    return ops.convert_to_numpy(function(*map(ops.convert_to_tensor, arrays)))


def forward(flow, x, condition=None):
    return _run(flow, "forward", x, condition)


def inverse(flow, y, condition=None):
    return _run(flow, "inverse", y, condition)


def log_det(flow, x, direction="forward", condition=None):
    """Log-determinants; a constant one comes as a scalar, and is broadcast."""
    name, events = f"{direction}_log_det_jacobian", flow.event_ndims
    value = _run(flow, name, x, condition, event_ndims=events)
    return np.broadcast_to(value, np.broadcast_shapes(value.shape, x.shape[: x.ndim - events]))


def jacobian(flow, x, direction="forward", condition=None):
    """Jacobians (..., n, n), where n is the size of an event."""
    lead, event = x.shape[: x.ndim - flow.event_ndims], x.shape[x.ndim - flow.event_ndims :]

    def of_flat(v):
        bijector = flow.bijector() if condition is None else flow.bijector(condition)
        return ops.reshape(getattr(bijector, direction)(ops.reshape(v, (*lead, *event))), flat)

    flat = (*lead, int(np.prod(event)))
    return autodiff.jacobian(of_flat, x.reshape(flat))


def close(actual, desired, tolerance):
    np.testing.assert_allclose(actual, desired, rtol=tolerance, atol=tolerance)


def numpy(*tensors):
    found = tuple(ops.convert_to_numpy(tensor) for tensor in tensors)
    return found if len(found) > 1 else found[0]


def slope_by_differences(function, variable, step=1e-6):
    """Gradient of a scalar function of no arguments with respect to a variable, in steps."""
    start = ops.convert_to_numpy(variable.value).copy()
    gradient = np.zeros_like(start)
    for index in np.ndindex(start.shape):
        ends = []
        for sign in (1, -1):
            moved = start.copy()
            moved[index] += sign * step
            variable.assign(moved)
            ends.append(float(function()))
        gradient[index] = (ends[0] - ends[1]) / (2 * step)
    variable.assign(start)
    return gradient
