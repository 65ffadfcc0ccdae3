"""The number of modes of densities that have a known one."""

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.spatial.distance import cdist
from scipy.special import logsumexp

import tfp_ibnn as ibnn
from tfp_ibnn.diagnostics import modes

once = pytest.mark.once  # what is not of the library's densities shows nothing of a backend


def circle(count, size, radius=None):
    """Centers on a circle, six apart, in the first two of so many dimensions."""
    angle = 2 * np.pi * np.arange(count) / count
    radius = radius or 3 / np.sin(np.pi / max(count, 2))
    return radius * np.stack([np.cos(angle), np.sin(angle)] + [0 * angle] * (size - 2), axis=1)


class Surface:
    """A density of two numbers, with slopes by differences if none are given."""

    size = 2

    def __init__(self, log_prob, slope=None):
        self.values = log_prob
        self.gradients = slope or self._differences

    def _differences(self, w):
        ways = 1e-5 * np.eye(2)
        return np.stack([(self.values(w + d) - self.values(w - d)) / 2e-5 for d in ways], axis=1)


def mixture(loc, scale=1.0, weights=1.0):
    """A mixture of Gaussians, up to a constant, and 200 draws of it."""
    count, size = np.shape(loc)
    loc, scale, weights = np.asarray(loc), np.broadcast_to(scale, count), np.ones(count) * weights
    weights = weights / weights.sum()

    def each(w):
        return np.log(weights) - size * np.log(scale) - cdist(w, loc, "sqeuclidean") / 2 / scale**2

    def log_prob(w):
        return logsumexp(each(w), axis=1)

    def slope(w):
        pull = np.exp(each(w) - log_prob(w)[:, None]) / scale**2
        return pull @ loc - w * pull.sum(axis=1, keepdims=True)

    surface = Surface(log_prob, slope)
    surface.size, rng = size, np.random.default_rng(0)
    chosen = rng.choice(count, 200, p=weights)
    starts = loc[chosen] + scale[chosen, None] * rng.normal(size=(200, size))
    surface.masses = np.bincount(chosen) / 200
    return surface, {"starts": starts}


def banana(scale):
    rng = np.random.default_rng(0)
    x = rng.normal(size=200)
    starts = {"starts": np.stack([x, x**2 + scale * rng.normal(size=200)], axis=1)}
    return Surface(lambda w: -(w[:, 0] ** 2 + ((w[:, 1] - w[:, 0] ** 2) / scale) ** 2) / 2), starts


def ring(height, count):
    """A ring of radius 2 with so many hills: the way along it falls by twice the height."""
    rng = np.random.default_rng(0)
    angle, radius = rng.uniform(0, 2 * np.pi, 200), 2 + 0.1 * rng.normal(size=200)

    def log_prob(w):
        hills = height * np.cos(count * np.arctan2(w[:, 1], w[:, 0]))
        return hills - ((np.hypot(*w.T) - 2) / 0.1) ** 2 / 2

    starts = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return Surface(log_prob), {"starts": starts}


@once
@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [2, 10, 50])
def test_the_modes_of_a_mixture_are_counted(count, size):
    surface, starts = mixture(circle(count, size))
    found = modes(surface, **starts)
    assert len(found.masses) == count
    assert found.unseen == 0
    near = cdist(found.locations, circle(count, size))
    order = np.argmin(near, axis=1)
    assert sorted(order) == list(range(count))
    np.testing.assert_allclose(found.masses, surface.masses[order], atol=0.02)
    assert np.min(near, axis=1).max() < 0.05
    np.testing.assert_allclose(found.log_probs, -np.log(count), atol=0.01)


@once
def test_modes_of_other_widths_and_masses_are_found():
    loc = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, -6.0]])
    surface, starts = mixture(loc, [1.0, 0.02, 0.5], [0.8, 0.1, 0.1])
    found = modes(surface, **starts)
    np.testing.assert_allclose(found.locations, loc[[1, 0, 2]], atol=0.02)
    np.testing.assert_allclose(found.masses, surface.masses[[1, 0, 2]], atol=0.02)


@once
@pytest.mark.parametrize(("barrier", "count"), [(0.7, 1), (1.4, 2)])
def test_modes_are_distinct_beyond_a_barrier_of_a_nat(barrier, count):
    def log_q(x, a):
        return logsumexp([-((x - a) ** 2) / 2, -((x + a) ** 2) / 2], axis=0)

    def fall(a):
        return np.max(log_q(np.linspace(0, 2 * a, 2001), a)) - log_q(0.0, a)

    a = brentq(lambda a: fall(a) - barrier, 1.01, 5)
    surface, starts = mixture([[-a], [a]])
    assert len(modes(surface, **starts).masses) == count


@once
@pytest.mark.parametrize("scale", [0.3, 0.03])
def test_a_banana_has_one_mode(scale):
    surface, starts = banana(scale)
    found = modes(surface, **starts)
    assert found.masses.tolist() == [1]
    np.testing.assert_allclose(found.locations, [[0, 0]], atol=0.02)


@once
@pytest.mark.parametrize(
    ("height", "hills", "count"), [(0.3, 2, 1), (0.8, 2, 2), (0.35, 4, 1), (0.8, 4, 4)]
)
def test_paths_are_bent_where_the_straight_one_falls(height, hills, count):
    surface, starts = ring(height, hills)
    found = modes(surface, **starts)
    assert len(found.masses) == count


@once
def test_the_mass_not_seen_is_that_of_draws_alone_at_their_mode():
    loc = circle(4, 2)
    rng = np.random.default_rng(0)
    starts = loc[[0] * 30 + [1] * 18 + [2, 3]] + 0.3 * rng.normal(size=(50, 2))
    found = modes(mixture(loc)[0], starts=starts)
    assert found.unseen == pytest.approx(2 / 50)
    assert sorted(found.masses) == pytest.approx([0.02, 0.02, 0.36, 0.6])


def test_the_modes_of_a_posterior_over_z_are_counted():
    posterior = ibnn.MixturePosterior(components=2, initial_scale=0.1)
    posterior.build((4,))
    posterior.loc.assign(np.outer([0.5, 1.5], np.ones(4)))
    found = modes(posterior, 50)
    np.testing.assert_allclose(np.sort(found.locations, axis=0), posterior.loc, atol=0.02)


@once
def test_many_dimensions_are_refused():
    q = ibnn.tfd.MultivariateNormalDiag(np.zeros(51, "float32"), np.ones(51, "float32"))
    with pytest.raises(ValueError, match="51 numbers, more than 50.*diagnostics.disagreement"):
        modes(q)
    with pytest.raises(ValueError, match="`draws` must be"):
        modes(ibnn.tfd.Normal(0.0, 1.0), 0)


@once
def test_starts_are_checked():
    surface, _ = mixture(circle(2, 2))
    with pytest.raises(ValueError, match=r"`starts` must have the shape \(N, 2\); got \(4, 3\)"):
        modes(surface, starts=np.zeros((4, 3)))
    with pytest.raises(ValueError, match="`starts`.*finite"):
        modes(surface, starts=np.full((4, 2), np.nan))
    with pytest.raises(ValueError, match="`starts` must be at least one row"):
        modes(surface, starts=np.zeros((0, 2)))
    surface.values = lambda w: np.full(len(w), np.nan)
    with pytest.raises(ValueError, match="log q is not finite"):
        modes(surface, starts=np.zeros((4, 2)))
    with pytest.raises(ValueError, match="`posterior` must be a built model"):
        modes(lambda w: -w.sum(axis=1), starts=np.zeros((4, 2)))
    q = ibnn.tfd.MultivariateNormalDiag(np.zeros(2, "float32"), np.ones(2, "float32"))
    found = modes(q, starts=np.ones((2, 3, 2)))
    np.testing.assert_allclose(found.locations, [[0, 0]], atol=1e-3)
