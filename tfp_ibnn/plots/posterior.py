"""The posterior of the multiplicative noise z, beside the prior: marginals and pairs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from keras import ops
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from matplotlib.patheffects import withStroke
from scipy.stats import norm

from tfp_ibnn._core import checks
from tfp_ibnn.plots.style import COLORS, LEGEND, pale, tidy
from tfp_ibnn.posteriors import Posterior

Channels = Sequence[int] | None
_PRIOR = {"color": COLORS[1], "ls": "--", "lw": 1.6}
_NORMAL = {"color": "black", "ls": ":", "lw": 1.4}


def posterior_marginals(
    posterior: Any, channels: Channels = None, *, count: int = 6, draws: int = 4096, seed: int = 0
) -> Figure:
    """Draw the density of z for some channels, each beside its prior.

    Where the shape follows the dashed prior, the data said nothing of that channel. Where it leaves
    the dotted Gaussian of the same moments, by the 2-Wasserstein distance W, the flow is used.

    Args:
        posterior: a posterior that is built, or a stochastic layer.
        channels: which to draw; by default those of the largest W (0.03 or so for a Gaussian).
        count: how many channels to choose, at most.
        draws: of the posterior.
        seed: of the draws.

    Example:
        >>> import tfp_ibnn as ibnn, tfp_ibnn.plots as plots
        >>> posterior = ibnn.NormalPlanar1d()
        >>> posterior.build((8,))
        >>> figure = plots.posterior_marginals(posterior, channels=(0, 5), draws=500)
    """
    drawn = _draw(posterior, channels, count, draws, seed)
    total = len(drawn)
    rows, columns = -(-total // 3), min(3, total)
    size = (max(2.3 * columns, 4.6), 1.8 * rows + 0.5)
    shared = {"layout": "constrained", "squeeze": False}
    figure, grid = plt.subplots(rows, columns, figsize=size, sharex=True, **shared)
    lows, highs = zip(*(channel.limits for channel in drawn), strict=True)
    for ax in grid.flat[total:]:
        ax.remove()
    for position, (ax, channel) in enumerate(zip(grid.flat, drawn, strict=False)):
        _draw_marginal(ax, channel, (min(lows), max(highs)))
        ax.set_title(f"channel {channel.number}, W {channel.distance:.2f}", fontsize=10)
        if position + columns >= total:
            ax.set_xlabel("z")
            ax.tick_params(labelbottom=True)
    handles = grid[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, **LEGEND)
    return figure


def posterior_pairs(
    posterior: Any, channels: Channels = None, *, count: int = 3, draws: int = 4096, seed: int = 0
) -> Figure:
    """Draw the joint density of z for each pair of some channels, with their marginals.

    The marginals are on the diagonal, and below it the draws, with their correlation r. The dashed
    ellipses hold 39 % and 86 % of the prior (one and two deviations). The arguments are those of
    `posterior_marginals`; there must be two channels at least.
    """
    drawn = _draw(posterior, channels, count, draws, seed)
    size = len(drawn)
    if size < 2:
        got = f"{[channel.number for channel in drawn]}. For one, use posterior_marginals"
        raise ValueError(f"`channels` must name at least two channels; got {got}.")
    look = {"figsize": (1.7 * size + 0.6,) * 2, "sharex": "col", "layout": "constrained"}
    figure, grid = plt.subplots(size, size, **look)
    for row, column in np.ndindex(size, size):
        ax, x, y = grid[row, column], drawn[column], drawn[row]
        if column > row:
            ax.remove()
            continue
        if row == size - 1:
            ax.set_xlabel(f"z, channel {x.number}", fontsize=9)
        if column == row:
            _draw_marginal(ax, x, x.limits)
            continue
        ax.scatter(x.z, y.z, s=3, color=COLORS[0], alpha=0.15, linewidths=0, rasterized=True)
        for deviations in (2, 4):  # across
            across = deviations * x.scale, deviations * y.scale
            look = {"path_effects": [withStroke(linewidth=3.2, foreground="white")], **_PRIOR}
            ax.add_patch(Ellipse((x.loc, y.loc), *across, fill=False, zorder=3, **look))
        # Adding 0 turns -0.00 into 0.00.
        r = np.round(np.corrcoef(x.z, y.z)[0, 1], 2) + 0.0
        ax.set_title(f"r = {r:.2f}", fontsize=9, pad=2)
        tidy(ax).set(xlim=x.limits, ylim=y.limits)
        if column == 0:
            ax.set_ylabel(f"z, channel {y.number}", fontsize=9)
        ax.tick_params(labelleft=column == 0)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="upper right", **LEGEND)
    return figure


class _Channel(NamedTuple):
    """Draws of one channel, z (draws,), and what is known of it."""

    number: int
    z: np.ndarray
    distance: float  # from a Gaussian
    loc: float  # of the prior
    scale: float

    @property
    def limits(self) -> tuple[float, float]:
        """Limits that show the draws and three deviations of the prior."""
        low, high = np.quantile(self.z, (0.001, 0.999))
        margin, reach = 0.05 * (high - low), 3 * self.scale
        return min(low - margin, self.loc - reach), max(high + margin, self.loc + reach)


def _draw(given: Any, channels: Any, count: int, draws: int, seed: int) -> list[_Channel]:
    """Draw from a posterior, or a layer's, and choose channels if none are given."""
    posterior = getattr(given, "posterior", given)
    posterior = getattr(posterior, "joint", posterior)
    if not isinstance(posterior, Posterior):
        wanted = "a posterior such as ibnn.NormalPlanar1d(), or a stochastic layer"
        raise ValueError(f"`posterior` must be {wanted}; got {given!r}.")
    if not posterior.built:
        raise ValueError(f"`posterior` must be built, by `build((channels,))` say; got {given!r}.")
    draws = checks.positive_integer("draws", draws, least=100)
    numbers, size = np.asarray(channels), posterior.channels
    known = numbers.ndim == 1 and np.isin(numbers, np.arange(size)).all()
    if channels is not None and not (known and 0 < len(numbers) == len(np.unique(numbers))):
        wanted = f"different numbers from 0 to {size - 1}, such as (0,)"
        raise ValueError(f"`channels` must be {wanted}; got {channels!r}.")
    count = checks.positive_integer("count", count)
    # Noise made here is the same on every backend, and leaves the posterior's own seed alone.
    noise = np.random.default_rng(seed).standard_normal((draws, size))
    component = np.arange(draws, dtype="int32") % posterior.components
    drawn = posterior.transform(ops.convert_to_tensor(noise, dtype=posterior.dtype), component)
    z = np.asarray(ops.convert_to_numpy(drawn.z), dtype="float64")
    if bad := np.sum(~np.isfinite(z)):
        raise ValueError(f"`posterior` gave {bad} draws of z that are not finite: has it diverged?")
    distance = _distance_from_gaussian(z)
    numbers = np.argsort(-distance, kind="stable")[:count] if channels is None else numbers
    prior = posterior.prior()
    loc, scale = (ops.convert_to_numpy(part) for part in (prior.mean(), prior.stddev()))
    return [_Channel(i, z[:, i], distance[i], loc[i], scale[i]) for i in map(int, numbers)]


def _distance_from_gaussian(z: np.ndarray) -> np.ndarray:
    """Return the 2-Wasserstein distance of standardised z (draws, channels) from N(0, 1)."""
    deviation = z.std(axis=0)
    standard = (np.sort(z, axis=0) - z.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
    quantiles = norm.ppf((np.arange(len(z)) + 0.5) / len(z))
    return np.sqrt(np.mean((standard - quantiles[:, None]) ** 2, axis=0))


def _draw_marginal(ax: Axes, channel: _Channel, limits: tuple[float, float]) -> None:
    z = channel.z
    edges = np.linspace(*np.quantile(z, (0.001, 0.999)), 51)
    density = np.histogram(z, edges)[0] / (len(z) * np.diff(edges))
    fill = {"facecolor": pale(COLORS[0], 0.55), "edgecolor": COLORS[0]}
    ax.stairs(density, edges, fill=True, lw=0.8, label="posterior", **fill)
    axis = np.linspace(*limits, 400)
    ax.plot(axis, norm.pdf(axis, channel.loc, channel.scale), label="prior", **_PRIOR)
    ax.plot(axis, norm.pdf(axis, z.mean(), z.std()), label="Gaussian of its moments", **_NORMAL)
    ax.set(xlim=limits, ylim=(0, None), yticks=[])
    tidy(ax).spines["left"].set_visible(False)
