import keras
import matplotlib.pyplot as plt
import numpy as np
import pytest
from scipy.stats import norm

import tfp_ibnn as ibnn
from tfp_ibnn import plots
from tfp_ibnn.plots.posterior import _distance_from_gaussian, _draw

pytestmark = pytest.mark.once


class Bent(ibnn.Posterior):
    """Channel c is sinh(rate[c] * noise) / rate[c]: a larger rate is farther from normal."""

    rates = (0.01, 1.0, 0.5, 0.02, 2.0)

    def transform(self, noise, component=None, training=False):
        rate = keras.ops.convert_to_tensor(self.rates, dtype=self.dtype)
        z = keras.ops.sinh(rate * noise) / rate
        zero = keras.ops.zeros_like(z[..., 0])
        return ibnn.posteriors.Draw(z, zero, zero)


def bent():
    posterior = Bent(prior_loc=0.5, prior_scale=2.0)
    posterior.build((5,))
    return posterior


def draws(*arguments):
    """Draws of the channels, (draws, channels)."""
    return np.stack([channel.z for channel in _draw(*arguments)], axis=1)


def test_the_distance_is_zero_for_normal_quantiles_and_grows_with_the_bend():
    quantiles = norm.ppf((np.arange(2000) + 0.5) / 2000)
    bent = np.sinh(np.array([[0.5], [1.0]]) * quantiles).T
    found = _distance_from_gaussian(np.stack([3 * quantiles + 7, *bent.T], axis=1))
    assert found[0] < 0.02
    assert 0.08 < found[1] < found[2]
    # Two points at -1 and 1: the mean of (1 - |q|)^2 is 2 - 2 sqrt(2 / pi).
    two = _distance_from_gaussian(np.repeat([-1.0, 1.0], 1000)[:, None])
    assert two[0] == pytest.approx(np.sqrt(2 - 2 * np.sqrt(2 / np.pi)), abs=1e-3)


def test_the_channels_farthest_from_gaussian_are_chosen():
    drawn = _draw(bent(), None, 3, 2000, 0)
    assert [channel.number for channel in drawn] == [4, 1, 2]
    figure = plots.posterior_marginals(bent(), count=3, draws=2000)
    titles = [ax.get_title().split(",")[0] for ax in figure.axes]
    assert titles == ["channel 4", "channel 1", "channel 2"]


def test_draws_are_those_of_the_seed_and_leave_the_posterior_alone():
    posterior = bent()
    before = np.asarray(posterior.seed_generator.state.value)
    first, again, other = (draws(posterior, [3], 1, 500, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    np.testing.assert_array_equal(np.asarray(posterior.seed_generator.state.value), before)
    noise = np.random.default_rng(0).standard_normal((500, 5))[:, 3]
    np.testing.assert_allclose(first[:, 0], np.sinh(0.02 * noise) / 0.02, rtol=1e-4, atol=1e-5)


def test_a_mixture_is_drawn_from_all_its_components():
    posterior = ibnn.MixturePosterior(components=3)
    posterior.build((2,))
    posterior.loc.assign([[-5.0, 0.0], [0.0, 0.0], [5.0, 0.0]])
    z = draws(posterior, [0], 1, 300, 0)[:, 0]
    assert np.bincount(np.round(z / 5).astype(int) + 1).tolist() == [100, 100, 100]


def test_marginals_show_density_prior_and_gaussian():
    figure = plots.posterior_marginals(bent(), [1, 3], draws=1000)
    z = draws(bent(), [1, 3], 1, 1000, 0)
    for k, ax in enumerate(figure.axes):
        values, edges, _ = ax.patches[0].get_data()
        assert np.sum(values * np.diff(edges)) == pytest.approx(0.998, abs=0.002)
        np.testing.assert_allclose(edges[[0, -1]], np.quantile(z[:, k], (0.001, 0.999)))
        prior, gaussian = (line.get_xydata().T for line in ax.lines)
        np.testing.assert_allclose(prior[1], norm.pdf(prior[0], 0.5, 2.0), rtol=1e-5)
        expected = norm.pdf(gaussian[0], z[:, k].mean(), z[:, k].std())
        np.testing.assert_allclose(gaussian[1], expected, rtol=1e-5, atol=1e-12)


def test_marginals_share_limits_that_show_all():
    figure = plots.posterior_marginals(bent(), [4, 0], draws=1000)
    z = draws(bent(), [4, 0], 1, 1000, 0)
    for ax in figure.axes:
        low, high = ax.get_xlim()
        assert low <= min(np.quantile(z[:, 0], 0.001), -5.5)
        assert high >= max(np.quantile(z[:, 0], 0.999), 6.5)


def test_a_learned_prior_is_the_one_drawn():
    posterior = ibnn.NormalAffine(prior_scale=0.5, learn_prior_scale=True)
    posterior.build((3,))
    posterior.raw_prior_scale.assign(3.0)
    scale = _draw(posterior, [0], 1, 100, 0)[0].scale
    assert scale == pytest.approx(float(posterior.prior().stddev()[0]))
    assert scale > 2.5


def test_pairs_show_draws_and_prior():
    figure = plots.posterior_pairs(bent(), (0, 4, 2), draws=400)
    z = draws(bent(), [0, 4, 2], 1, 400, 0)
    below = [ax for ax in figure.axes if ax.collections]
    assert len(figure.axes) == 6
    for ax, (column, row) in zip(below, [(0, 1), (0, 2), (1, 2)], strict=True):
        np.testing.assert_allclose(ax.collections[0].get_offsets(), z[:, [column, row]])
        assert [ellipse.width for ellipse in ax.patches] == pytest.approx([4, 8])
        assert all(ellipse.center == pytest.approx((0.5, 0.5)) for ellipse in ax.patches)
        r = float(ax.get_title().removeprefix("r = "))
        assert r == pytest.approx(np.corrcoef(z[:, column], z[:, row])[0, 1], abs=0.006)


def test_a_layer_stands_for_its_posterior():
    layer = ibnn.StochasticDense(2, posterior=ibnn.NormalPlanar1d(), train_size=10)
    layer.build((None, 4))
    figure = plots.posterior_marginals(layer, draws=100)
    assert len(figure.axes) == 4
    assert len(plots.posterior_pairs(layer, draws=100).axes) == 6


@pytest.mark.parametrize("plot", [plots.posterior_marginals, plots.posterior_pairs])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"channels": (0, 5)}, r"`channels` must be different numbers from 0 to 4.*got \(0, 5\)"),
        ({"channels": (-1, 0)}, "`channels`"),
        ({"channels": (1, 1)}, "`channels`"),
        ({"channels": ()}, "`channels`"),
        ({"channels": (0.5, 1)}, "`channels`"),
        ({"channels": 3}, "`channels`"),
        ({"draws": 99}, "`draws` must be a whole number of at least 100; got 99"),
        ({"draws": 0.5}, "`draws`"),
        ({"count": 0}, "`count`"),
        ({"posterior": ibnn.NormalAffine}, "`posterior` must be a posterior such as"),
        ({"posterior": None}, "`posterior` must be a posterior such as"),
    ],
)
def test_bad_input_is_refused(plot, arguments, words):
    with pytest.raises(ValueError, match=words):
        plot(**{"posterior": bent(), **arguments})
    assert plt.get_fignums() == []


def test_a_posterior_must_be_built_and_finite():
    with pytest.raises(ValueError, match="`posterior` must be built"):
        plots.posterior_marginals(ibnn.NormalAffine())
    with pytest.raises(ValueError, match="`posterior` must be built"):
        plots.posterior_marginals(ibnn.StochasticDense(2, train_size=10))
    posterior = ibnn.NormalAffine()
    posterior.build((3,))
    posterior.affine.shift.assign([1.0, float("nan"), 1.0])
    with pytest.raises(ValueError, match="`posterior` gave 4096 draws of z that are not finite"):
        plots.posterior_marginals(posterior)


def test_one_channel_has_no_pairs():
    with pytest.raises(ValueError, match="at least two channels; got .3.*posterior_marginals"):
        plots.posterior_pairs(bent(), (3,))
