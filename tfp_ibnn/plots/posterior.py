"""The posterior of the multiplicative noise z, beside the prior: marginals and pairs."""

import math
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
_TAILS = (0.001, 0.999)  # quantiles beyond which draws are not shown


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

    Returns:
        A new figure.

    Raises:
        ValueError: if `posterior` is not over z, or not built, or `channels` are not its own.

    Example:
        >>> import tfp_ibnn as ibnn, tfp_ibnn.plots as plots
        >>> posterior = ibnn.NormalPlanar1d()
        >>> posterior.build((8,))
        >>> figure = plots.posterior_marginals(posterior, channels=(0, 5), draws=500)
    """
    drawn = _draw(posterior, channels, count, draws, seed)
    total = len(drawn)
    columns = min(3, total)
    rows = math.ceil(total / columns)
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(max(2.3 * columns, 4.6), 1.8 * rows + 0.5),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for ax in grid.flat[total:]:
        ax.remove()
    low = min(channel.limits[0] for channel in drawn)
    high = max(channel.limits[1] for channel in drawn)
    for position, channel in enumerate(drawn):
        ax = grid.flat[position]
        _draw_marginal(ax, channel, (low, high))
        ax.set_title(f"channel {channel.number}, W {channel.distance:.2f}", fontsize=10)
        if position + columns >= total:
            ax.set_xlabel("z")
            ax.tick_params(labelbottom=True)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, **LEGEND)
    return figure


def posterior_pairs(
    posterior: Any, channels: Channels = None, *, count: int = 3, draws: int = 4096, seed: int = 0
) -> Figure:
    """Draw the joint density of z for each pair of some channels, with their marginals.

    The marginals are on the diagonal, and below it the draws, with their correlation r. The dashed
    ellipses hold 39 % and 86 % of the prior (one and two deviations).

    Args:
        posterior: a posterior that is built, or a stochastic layer.
        channels: which to draw, two at least; by default those of the largest W, as for
            `posterior_marginals`.
        count: how many channels to choose, at most.
        draws: of the posterior.
        seed: of the draws.

    Returns:
        A new figure.

    Raises:
        ValueError: if there are fewer than two channels, or as for `posterior_marginals`.

    Example:
        >>> import tfp_ibnn as ibnn, tfp_ibnn.plots as plots
        >>> posterior = ibnn.NormalLowRank(2)
        >>> posterior.build((8,))
        >>> figure = plots.posterior_pairs(posterior, channels=(0, 5), draws=500)
    """
    drawn = _draw(posterior, channels, count, draws, seed)
    size = len(drawn)
    if size < 2:
        raise ValueError(
            "`channels` must name at least two channels; got "
            f"{[channel.number for channel in drawn]}. For one, use posterior_marginals."
        )
    side = 1.7 * size + 0.6
    figure, grid = plt.subplots(
        size,
        size,
        figsize=(side, side),
        sharex="col",
        layout="constrained",
    )
    for row, column in np.ndindex(size, size):
        ax = grid[row, column]
        if column > row:
            ax.remove()
            continue
        if column == row:
            _draw_marginal(ax, drawn[row], drawn[row].limits)
        else:
            _draw_pair(ax, drawn[column], drawn[row])
            ax.tick_params(labelleft=column == 0)
        if row == size - 1:
            ax.set_xlabel(f"z, channel {drawn[column].number}", fontsize=9)
        if column == 0 and row > 0:
            ax.set_ylabel(f"z, channel {drawn[row].number}", fontsize=9)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", **LEGEND)
    return figure


class _Channel(NamedTuple):
    """Draws of one channel, and what is known of it.

    Attributes:
        number: which channel it is.
        z: (draws,), the draws.
        distance: of their distribution from a Gaussian, see `_distance_from_gaussian`.
        loc: mean of the prior.
        scale: deviation of the prior.
    """

    number: int
    z: np.ndarray
    distance: float
    loc: float
    scale: float

    @property
    def limits(self) -> tuple[float, float]:
        """Limits that show the draws and three deviations of the prior."""
        low, high = np.quantile(self.z, _TAILS)
        margin = 0.05 * (high - low)
        reach = 3 * self.scale
        lower = min(low - margin, self.loc - reach)
        upper = max(high + margin, self.loc + reach)
        return lower, upper


def _draw(source: Any, channels: Any, count: int, draws: int, seed: int) -> list[_Channel]:
    """Draw from a posterior, or a layer's, and choose channels if none are given."""
    posterior = _posterior_of(source)
    draws = checks.positive_integer("draws", draws, least=100)
    if channels is not None:
        channels = _checked_channels(channels, posterior.channels)
    count = checks.positive_integer("count", count)
    z = _drawn_z(posterior, draws, seed)
    distances = _distance_from_gaussian(z)
    if channels is None:
        by_distance = np.argsort(-distances, kind="stable")
        channels = by_distance[:count]
    prior = posterior.prior()
    loc = ops.convert_to_numpy(prior.mean())
    scale = ops.convert_to_numpy(prior.stddev())
    drawn = []
    for channel in map(int, channels):
        drawn.append(
            _Channel(
                number=channel,
                z=z[:, channel],
                distance=distances[channel],
                loc=loc[channel],
                scale=scale[channel],
            )
        )
    return drawn


def _posterior_of(source: Any) -> Posterior:
    """Return a built posterior over z, that of a layer or the joint one of several, or raise."""
    posterior = getattr(source, "posterior", source)
    posterior = getattr(posterior, "joint", posterior)
    if not isinstance(posterior, Posterior):
        raise ValueError(
            "`posterior` must be a posterior such as ibnn.NormalPlanar1d(), or a stochastic "
            f"layer; got {source!r}."
        )
    if not posterior.built:
        raise ValueError(f"`posterior` must be built, by `build((channels,))` say; got {source!r}.")
    return posterior


def _checked_channels(channels: Any, size: int) -> np.ndarray:
    """Return the numbers of channels, or raise if they are not different ones of so many."""
    numbers = np.asarray(channels)
    are_known = numbers.ndim == 1 and np.isin(numbers, np.arange(size)).all()
    if not are_known or not 0 < len(numbers) == len(np.unique(numbers)):
        raise ValueError(
            f"`channels` must be different numbers from 0 to {size - 1}, such as (0,); got "
            f"{channels!r}."
        )
    return numbers


def _drawn_z(posterior: Posterior, draws: int, seed: int) -> np.ndarray:
    """Return draws of z (draws, channels) in float64, or raise if they are not finite."""
    # Noise made here is the same on every backend, and leaves the posterior's own seed alone.
    noise = np.random.default_rng(seed).standard_normal((draws, posterior.channels))
    noise = ops.convert_to_tensor(noise, dtype=posterior.dtype)
    component = np.arange(draws, dtype="int32") % posterior.components
    drawn = posterior.transform(noise, component)
    z = ops.convert_to_numpy(drawn.z).astype("float64")
    nonfinite = np.sum(~np.isfinite(z))
    if nonfinite:
        raise ValueError(
            f"`posterior` gave {nonfinite} draws of z that are not finite: has it diverged?"
        )
    return z


def _distance_from_gaussian(z: np.ndarray) -> np.ndarray:
    """Return the 2-Wasserstein distance of standardized z (draws, channels) from N(0, 1)."""
    deviation = z.std(axis=0)
    deviation = np.where(deviation > 0, deviation, 1.0)
    standard = (np.sort(z, axis=0) - z.mean(axis=0)) / deviation
    draws = len(z)
    levels = (np.arange(draws) + 0.5) / draws
    quantiles = norm.ppf(levels)
    squares = (standard - quantiles[:, None]) ** 2
    return np.sqrt(np.mean(squares, axis=0))


def _draw_marginal(ax: Axes, channel: _Channel, limits: tuple[float, float]) -> None:
    """Draw the density of a channel, of its prior, and of the Gaussian of its moments."""
    z = channel.z
    low, high = np.quantile(z, _TAILS)
    edges = np.linspace(low, high, 51)
    counts, _ = np.histogram(z, edges)
    density = counts / (len(z) * np.diff(edges))
    ax.stairs(
        density,
        edges,
        fill=True,
        lw=0.8,
        label="posterior",
        facecolor=pale(COLORS[0], 0.55),
        edgecolor=COLORS[0],
    )
    axis = np.linspace(*limits, 400)
    of_prior = norm.pdf(axis, channel.loc, channel.scale)
    of_moments = norm.pdf(axis, z.mean(), z.std())
    ax.plot(axis, of_prior, label="prior", **_PRIOR)
    ax.plot(axis, of_moments, label="Gaussian of its moments", **_NORMAL)
    ax.set(xlim=limits, ylim=(0, None), yticks=[])
    tidy(ax).spines["left"].set_visible(False)


def _draw_pair(ax: Axes, x: _Channel, y: _Channel) -> None:
    """Draw the draws of two channels, with ellipses of the prior, and write their correlation."""
    ax.scatter(
        x.z,
        y.z,
        s=3,
        color=COLORS[0],
        alpha=0.15,
        linewidths=0,
        rasterized=True,
    )
    for deviations in (1, 2):
        ellipse = Ellipse(
            (x.loc, y.loc),
            width=2 * deviations * x.scale,
            height=2 * deviations * y.scale,
            fill=False,
            zorder=3,
            path_effects=[withStroke(linewidth=3.2, foreground="white")],
            **_PRIOR,
        )
        ax.add_patch(ellipse)
    # Adding 0 turns -0.00 into 0.00.
    r = np.round(np.corrcoef(x.z, y.z)[0, 1], 2) + 0.0
    ax.set_title(f"r = {r:.2f}", fontsize=9, pad=2)
    tidy(ax).set(xlim=x.limits, ylim=y.limits)
