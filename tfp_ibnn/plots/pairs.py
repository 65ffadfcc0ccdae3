"""Pairs of channels of a posterior of the multiplicative noise z, beside the prior."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from matplotlib.patheffects import withStroke

from tfp_ibnn.plots._draws import Draws, draw
from tfp_ibnn.plots.marginals import PRIOR, draw_marginal
from tfp_ibnn.plots.style import COLORS, tidy

__all__ = ["posterior_pairs"]


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

    Args:
        posterior: a posterior that is built, or a stochastic layer.
        channels: which to draw, two at least; chosen as in `posterior_marginals` by default.
        count: how many channels to choose, at most.
        draws: of the posterior.
        seed: of the draws.

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
            draw_marginal(ax, drawn, row, drawn.range(row))
        else:
            _draw_pair(ax, drawn, column, row)
            if column > 0:
                ax.tick_params(labelleft=False)
        if row == size - 1:
            ax.set_xlabel(f"z, channel {drawn.channels[column]}", fontsize=9)
        if column == 0 < row:
            ax.set_ylabel(f"z, channel {drawn.channels[row]}", fontsize=9)
    handles = grid[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="upper right", frameon=False, fontsize=9)
    return figure


def _draw_pair(ax: Axes, drawn: Draws, column: int, row: int) -> None:
    x, y = drawn.z[:, column], drawn.z[:, row]
    ax.scatter(x, y, s=3, color=COLORS[0], alpha=0.15, linewidths=0, rasterized=True)
    center = drawn.prior_loc[column], drawn.prior_loc[row]
    for deviations in (1, 2):
        width, height = (2 * deviations * drawn.prior_scale[i] for i in (column, row))
        ellipse = ax.add_patch(Ellipse(center, width, height, fill=False, zorder=3, **PRIOR))
        ellipse.set_path_effects([withStroke(linewidth=3.2, foreground="white")])
    # Adding 0 turns -0.00 into 0.00.
    r = np.round(np.corrcoef(x, y)[0, 1], 2) + 0.0
    ax.set_title(f"r = {r:.2f}", fontsize=9, pad=2)
    ax.set(xlim=drawn.range(column), ylim=drawn.range(row))
    tidy(ax)
