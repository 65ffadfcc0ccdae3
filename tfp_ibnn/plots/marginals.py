"""Marginals of a posterior of the multiplicative noise z, beside the prior."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import norm

from tfp_ibnn.plots._draws import Draws, draw
from tfp_ibnn.plots.style import COLORS, pale, tidy

__all__ = ["PRIOR", "draw_marginal", "posterior_marginals"]

_BINS = 50
PRIOR = {"color": COLORS[1], "ls": "--", "lw": 1.6}
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
    columns = min(3, len(drawn.channels))
    rows = -(-len(drawn.channels) // columns)
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(max(2.3 * columns, 4.6), 1.8 * rows + 0.5),
        sharex=True,
        layout="constrained",
        squeeze=False,
    )
    ranges = [drawn.range(position) for position in range(len(drawn.channels))]
    limits = min(low for low, _ in ranges), max(high for _, high in ranges)
    for position, ax in enumerate(grid.flat):
        if position >= len(drawn.channels):
            ax.remove()
            continue
        draw_marginal(ax, drawn, position, limits)
        channel, distance = drawn.channels[position], drawn.distance[position]
        ax.set_title(f"channel {channel}, W {distance:.2f}", fontsize=10)
        if position + columns >= len(drawn.channels):
            ax.set_xlabel("z")
            ax.tick_params(labelbottom=True)
    handles = grid[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def draw_marginal(ax: Axes, drawn: Draws, position: int, limits: tuple[float, float]) -> None:
    """Draw the density of one channel, its prior and the Gaussian of its moments."""
    z = drawn.z[:, position]
    edges = np.linspace(*np.quantile(z, (0.001, 0.999)), _BINS + 1)
    density = np.histogram(z, edges)[0] / (len(z) * np.diff(edges))
    fill = {"facecolor": pale(COLORS[0], 0.55), "edgecolor": COLORS[0]}
    ax.stairs(density, edges, fill=True, lw=0.8, label="posterior", **fill)
    axis = np.linspace(*limits, 400)
    prior = norm.pdf(axis, drawn.prior_loc[position], drawn.prior_scale[position])
    ax.plot(axis, prior, label="prior", **PRIOR)
    ax.plot(axis, norm.pdf(axis, z.mean(), z.std()), label="Gaussian of its moments", **_NORMAL)
    ax.set(xlim=limits, ylim=(0, None), yticks=[])
    tidy(ax).spines["left"].set_visible(False)
