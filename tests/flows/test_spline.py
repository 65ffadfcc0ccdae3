"""Splines in float32, against another formula in float64, where bins differ most."""

import numpy as np
import pytest

import tfp_ibnn as ibnn
from tests.flows.tools import numpy
from tfp_ibnn.flows.spline import SplineBijector

INTERVAL, BINS = 5.0, 8
ROUNDING = 8 * INTERVAL * float(np.finfo("float32").eps)


def spline(x, knots):
    """Return one spline at x (n,) and the logarithms of its slopes, as Durkan et al. write it."""
    sizes = np.exp(knots[: 2 * BINS].reshape(2, BINS))
    sizes *= 2 * INTERVAL / sizes.sum(axis=1, keepdims=True)
    ends_x, ends_y = np.pad(np.cumsum(sizes, axis=1), ((0, 0), (1, 0))) - INTERVAL
    slopes = np.concatenate([[1], np.exp(knots[2 * BINS :]), [1]])
    place = np.clip(np.searchsorted(ends_x, x, side="right") - 1, 0, BINS - 1)
    width, height = sizes[:, place]
    slope, before, behind = height / width, slopes[place], slopes[place + 1]
    t = np.clip((x - ends_x[place]) / width, 0, 1)
    below = slope + (before + behind - 2 * slope) * t * (1 - t)
    y = ends_y[place] + height * (slope * t**2 + before * t * (1 - t)) / below
    rise = behind * t**2 + 2 * slope * t * (1 - t) + before * (1 - t) ** 2
    inside = np.abs(x) < INTERVAL
    return np.where(inside, y, x), np.where(inside, np.log(slope**2 * rise / below**2), 0)


@pytest.mark.parametrize("at_the_bound", [True, False])
@pytest.mark.parametrize("limit", [2, 4, 6, 8, 20])
def test_float32_is_as_accurate_as_its_inputs(limit, at_the_bound):
    """What float32 gives lies between the right values for inputs a few roundings away."""
    raw = np.random.default_rng(limit).normal(size=(3 * BINS - 1, 24))
    knots = limit * (np.sign(raw) if at_the_bound else np.tanh(2 * raw)).astype("float32")
    grid = np.linspace(-INTERVAL, INTERVAL, 1001, dtype="float32")
    bijector = SplineBijector(knots=knots, interval=INTERVAL)
    given = np.repeat(grid[:, None], 24, axis=1)
    found = {
        "forward": (given, *map(numpy, bijector.forward_and_log_det(given))),
        "inverse": (*map(numpy, bijector.inverse_and_log_det(given)), given),
    }
    assert all(np.isfinite(part).all() for parts in found.values() for part in parts)
    x, y = found["forward"][0], found["forward"][1]
    back, _, at = found["inverse"]
    for column, own in enumerate(knots.T.astype("float64")):
        for inputs, outputs in ((x, y), (back, at)):
            inputs, outputs = (part[:, column].astype("float64") for part in (inputs, outputs))
            assert np.all(spline(inputs - ROUNDING, own)[0] - ROUNDING <= outputs)
            assert np.all(spline(inputs + ROUNDING, own)[0] + ROUNDING >= outputs)


@pytest.mark.parametrize("limit", [2, 6])
def test_log_determinants_in_float32(limit):
    knots = limit * np.tanh(np.random.default_rng(0).normal(size=(3 * BINS - 1, 1)))
    knots = knots.astype("float32")
    own = knots[:, 0].astype("float64")
    x = np.linspace(-INTERVAL, INTERVAL, 2001)[1:-1]
    y, log_slope = spline(x, own)
    near = [spline(x + ROUNDING * step, own)[1] for step in (-1, 1)]
    smooth = np.ptp([log_slope, *near], axis=0) < 1e-3
    bijector = SplineBijector(knots=knots, interval=INTERVAL)
    _, forward = bijector.forward_and_log_det(x[:, None].astype("float32"))
    np.testing.assert_allclose(numpy(forward)[smooth], log_slope[smooth], atol=2e-3)
    _, inverse = bijector.inverse_and_log_det(y[:, None].astype("float32"))
    smooth &= log_slope > -2  # elsewhere the rounding of y moves x by more than that of x
    assert np.sum(smooth) > 100
    np.testing.assert_allclose(numpy(inverse)[smooth], -log_slope[smooth], atol=5e-3)


def test_a_limit_beyond_float32_is_refused():
    with pytest.raises(ValueError, match=r"`limit` must be at most 20.*got 30"):
        ibnn.flows.Spline(limit=30)
