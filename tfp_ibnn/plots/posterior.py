"""The posterior of the multiplicative noise z, beside the prior: marginals and pairs."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from matplotlib.patheffects import withStroke
from scipy.stats import norm

from tfp_ibnn.plots._draws import Draws, draw
from tfp_ibnn.plots.style import COLORS, LEGEND, pale, tidy

__all__ = ["posterior_marginals", "posterior_pairs"]

_BINS = 50
_PRIOR = {"color": COLORS[1], "ls": "--", "lw": 1.6}
_NORMAL = {"color": "black", "ls": ":", "lw": 1.4}


def posterior_marginals(
    posterior: Any,
    channels: Sequence[int] | None = None,
    *,
    count: int = 6,
    draws: int = 4096,
    seed: int = 0,
) -> Figure:
    """Draw the density of z for some channels, each beside its prior.

    Where the shape follows the dashed prior, the data said nothing of that channel. Where it leaves
    the dotted Gaussian of the same mean and deviation, the flow is used: W is the distance of the
    two, in standard deviations.

    Args:
        posterior: a posterior that is built, or a stochastic layer.
        channels: which to draw. By default the `count` that are farthest from Gaussian: those of
            the largest 2-Wasserstein distance W between the standardised draws and N(0, 1). Draws
            of a Gaussian have a W of 0.03 or so.
        count: how many channels to choose, at most.
        draws: of the posterior.
        seed: of the draws.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> from tfp_ibnn import plots
        >>> posterior = ibnn.NormalPlanar1d()
        >>> posterior.build((8,))
        >>> figure = plots.posterior_marginals(posterior, channels=(0, 5), draws=500)
        >>> [ax.get_title().split(",")[0] for ax in figure.axes]
        ['channel 0', 'channel 5']
    """
    drawn = draw(posterior, channels, count, draws, seed)
    total = len(drawn.channels)
    columns = min(3, total)
    rows = -(-total // columns)
    size = (max(2.3 * columns, 4.6), 1.8 * rows + 0.5)
    shared = {"layout": "constrained", "squeeze": False}
    figure, grid = plt.subplots(rows, columns, figsize=size, sharex=True, **shared)
    lows, highs = zip(*map(drawn.range, range(total)), strict=True)
    for ax in grid.flat[total:]:
        ax.remove()
    for position, ax in enumerate(grid.flat[:total]):
        _draw_marginal(ax, drawn, position, (min(lows), max(highs)))
        channel, distance = drawn.channels[position], drawn.distance[position]
        ax.set_title(f"channel {channel}, W {distance:.2f}", fontsize=10)
        if position + columns >= total:
            ax.set_xlabel("z")
            ax.tick_params(labelbottom=True)
    handles = grid[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, **LEGEND)
    return figure


def posterior_pairs(
    posterior: Any,
    channels: Sequence[int] | None = None,
    *,
    count: int = 3,
    draws: int = 4096,
    seed: int = 0,
) -> Figure:
    """Draw the joint density of z for each pair of some channels, with their marginals.

    The marginals are on the diagonal, and below it the draws, darker where there are more. The
    dashed ellipses hold 39 % and 86 % of the prior (one and two deviations). A cloud that is not an
    upright ellipse shows what a diagonal Gaussian cannot say: r is the correlation.

    The arguments are those of `posterior_marginals`; there must be two channels at least.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> from tfp_ibnn import plots
        >>> posterior = ibnn.NormalInvConv()
        >>> posterior.build((8,))
        >>> figure = plots.posterior_pairs(posterior, channels=(0, 1, 2), draws=500)
        >>> len(figure.axes)
        6
    """
    drawn = draw(posterior, channels, count, draws, seed)
    size = len(drawn.channels)
    if size < 2:
        raise ValueError(
            f"`channels` must name two channels at least; got {drawn.channels}. For one, use "
            "posterior_marginals."
        )
    side = 1.7 * size + 0.6
    figure, grid = plt.subplots(
        size, size, figsize=(side, side), sharex="col", layout="constrained", squeeze=False
    )
    for row, column in np.ndindex(size, size):
        ax = grid[row, column]
        if column > row:
            ax.remove()
            continue
        if column == row:
            _draw_marginal(ax, drawn, row, drawn.range(row))
        else:
            _draw_pair(ax, drawn, column, row)
            if column > 0:
                ax.tick_params(labelleft=False)
        if row == size - 1:
            ax.set_xlabel(f"z, channel {drawn.channels[column]}", fontsize=9)
        if column == 0 < row:
            ax.set_ylabel(f"z, channel {drawn.channels[row]}", fontsize=9)
    handles = grid[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="upper right", **LEGEND)
    return figure


def _draw_marginal(ax: Axes, drawn: Draws, position: int, limits: tuple[float, float]) -> None:
    """Draw the density of one channel, its prior and the Gaussian of its moments."""
    z = drawn.z[:, position]
    edges = np.linspace(*np.quantile(z, (0.001, 0.999)), _BINS + 1)
    density = np.histogram(z, edges)[0] / (len(z) * np.diff(edges))
    fill = {"facecolor": pale(COLORS[0], 0.55), "edgecolor": COLORS[0]}
    ax.stairs(density, edges, fill=True, lw=0.8, label="posterior", **fill)
    axis = np.linspace(*limits, 400)
    prior = norm.pdf(axis, drawn.prior_loc[position], drawn.prior_scale[position])
    ax.plot(axis, prior, label="prior", **_PRIOR)
    ax.plot(axis, norm.pdf(axis, z.mean(), z.std()), label="Gaussian of its moments", **_NORMAL)
    ax.set(xlim=limits, ylim=(0, None), yticks=[])
    tidy(ax).spines["left"].set_visible(False)


def _draw_pair(ax: Axes, drawn: Draws, column: int, row: int) -> None:
    x, y = drawn.z[:, column], drawn.z[:, row]
    ax.scatter(x, y, s=3, color=COLORS[0], alpha=0.15, linewidths=0, rasterized=True)
    center = drawn.prior_loc[column], drawn.prior_loc[row]
    for deviations in (1, 2):
        width, height = (2 * deviations * drawn.prior_scale[i] for i in (column, row))
        ellipse = ax.add_patch(Ellipse(center, width, height, fill=False, zorder=3, **_PRIOR))
        ellipse.set_path_effects([withStroke(linewidth=3.2, foreground="white")])
    # Adding 0 turns -0.00 into 0.00.
    r = np.round(np.corrcoef(x, y)[0, 1], 2) + 0.0
    ax.set_title(f"r = {r:.2f}", fontsize=9, pad=2)
    ax.set(xlim=drawn.range(column), ylim=drawn.range(row))
    tidy(ax)
