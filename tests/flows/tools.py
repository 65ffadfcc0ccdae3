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
    def call(x):
        return getattr(flow.bijector(), name)(x, **kwargs)

    # Inverses hold loops.
    return autodiff.quick(call, flow.weights) if name.startswith("inverse") else call


def forward(flow, x):
    return ops.convert_to_numpy(_method(flow, "forward")(ops.convert_to_tensor(x)))


def inverse(flow, y):
    return ops.convert_to_numpy(_method(flow, "inverse")(ops.convert_to_tensor(y)))


def log_det(flow, x, direction="forward"):
    function = _method(flow, f"{direction}_log_det_jacobian", event_ndims=1)
    value = ops.convert_to_numpy(function(ops.convert_to_tensor(x)))
    return np.broadcast_to(value, x.shape[:-1])  # a constant one comes as a scalar


def jacobian(flow, x, direction="forward"):
    return autodiff.jacobian(lambda v: getattr(flow.bijector(), direction)(v), x)


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
