import keras
import numpy as np
import pytest
from keras import ops

from tests import autodiff
from tfp_ibnn._core import constraints

WIDE = np.array([-1e30, -1e3, -20.0, -1.0, -1e-4, 0.0, 1e-4, 1.0, 20.0, 1e3, 1e30])
MAPS = {
    "bounded": lambda x: constraints.bounded(x, 3.0),
    "scale": constraints.scale,
    "above_minus_one": constraints.above_minus_one,
}


def apply(function, x):
    return ops.convert_to_numpy(function(ops.convert_to_tensor(x)))


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_and_gradients_are_finite_and_keep_the_dtype(name, dtype):
    x = WIDE.astype(dtype)
    y = apply(MAPS[name], x)
    assert y.dtype == dtype
    assert np.all(np.isfinite(y))
    slopes = autodiff.gradient(lambda v: ops.sum(MAPS[name](v)), x)
    assert np.all(np.isfinite(slopes))
    assert np.all(slopes >= 0)


@pytest.mark.parametrize("name", MAPS)
def test_maps_increase(name):
    y = apply(MAPS[name], np.linspace(-10, 10, 200))
    assert np.all(np.diff(y) > 0)


@pytest.mark.parametrize("limit", [0.5, 3.0])
def test_bounded_is_the_identity_at_zero_and_keeps_its_limit(limit):
    small = np.linspace(-1e-4, 1e-4, 5)
    np.testing.assert_allclose(apply(lambda x: constraints.bounded(x, limit), small), small, 1e-6)
    y = apply(lambda x: constraints.bounded(x, limit), WIDE)
    np.testing.assert_allclose(y, -y[::-1])
    assert np.max(np.abs(y)) <= limit
    np.testing.assert_allclose(y[-1], limit)


def test_scale_is_a_softplus_above_its_floor():
    x = np.linspace(-5, 5, 11)
    expected = constraints.MIN_SCALE + np.log1p(np.exp(x))
    np.testing.assert_allclose(apply(constraints.scale, x), expected, rtol=1e-12)
    assert np.all(apply(constraints.scale, WIDE.astype("float32")) >= np.float32(1e-6))


@pytest.mark.parametrize("value", [1.1e-6, 1e-5, 1e-3, 0.5, 1.0, 30.0, 1e4])
def test_inverse_scale_undoes_scale(value):
    raw = np.float64(constraints.inverse_scale(value))
    np.testing.assert_allclose(apply(constraints.scale, raw), value, rtol=1e-10)


@pytest.mark.parametrize("value", [1e-6, 0.0, -1.0])
def test_inverse_scale_refuses_what_scale_cannot_reach(value):
    with pytest.raises(ValueError, match=str(value)):
        constraints.inverse_scale(value)


def test_above_minus_one_is_the_identity_above_zero():
    x = np.array([0.0, 1e-9, 0.3, 7.0, 1e3])
    np.testing.assert_array_equal(apply(constraints.above_minus_one, x), x)


def test_above_minus_one_stays_above_minus_one():
    for dtype in ("float32", "float64"):
        y = apply(constraints.above_minus_one, WIDE.astype(dtype))
        assert np.min(y) >= -0.9991
        assert np.min(y) < -0.99


def test_above_minus_one_joins_smoothly():
    around = np.array([-1e-7, 0.0, 1e-7])
    np.testing.assert_allclose(apply(constraints.above_minus_one, around), around, atol=1e-12)
    slopes = autodiff.gradient(lambda v: ops.sum(constraints.above_minus_one(v)), around)
    np.testing.assert_allclose(slopes, 1.0, atol=1e-6)


def test_maps_take_keras_variables():
    weight = keras.Variable(np.zeros(2, "float32"))
    assert apply(constraints.scale, weight).dtype == np.float32
