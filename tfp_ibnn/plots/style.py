"""What all figures have in common: colors, lines, markers and bare axes."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The palette of Okabe and Ito."""

# In gray, several of these colors are alike: something else always tells the curves apart.
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
LEGEND = {"frameon": False, "fontsize": 9}
SIDE_LEGEND = {**LEGEND, "loc": "upper left", "bbox_to_anchor": (1.01, 1.02)}


def dots(position: int) -> dict[str, Any]:
    """Return the color and marker of one of several classes or curves."""
    return {
        "color": COLORS[position % len(COLORS)],
        "marker": MARKERS[position % len(MARKERS)],
    }


def line(position: int) -> dict[str, Any]:
    """Return the color and line style of one of several curves."""
    return {
        "color": COLORS[position % len(COLORS)],
        "ls": LINES[position % len(LINES)],
    }


def pale(color: Any, whiteness: Any) -> np.ndarray:
    """Return a color mixed with white.

    Args:
        color: any color of Matplotlib.
        whiteness: (...), the share of white, from 0 to 1.

    Returns:
        Red, green and blue (..., 3), from 0 to 1.
    """
    share = np.asarray(whiteness)[..., None]
    rgb = np.asarray(to_rgb(color))
    return share + (1 - share) * rgb


def new_axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """Return the axis given, or that of a new figure.

    Args:
        ax: an axis, or None.
        size: width and height of a new figure, in inches.

    Returns:
        The axis.
    """
    if ax is not None:
        return ax
    _, ax = plt.subplots(figsize=size, layout="constrained")
    return ax


def tidy(ax: Axes, grid: str | None = None) -> Axes:
    """Take away the frame's upper and right side, and draw a pale grid.

    Args:
        ax: the axis, which is changed.
        grid: along "x", "y" or "both"; None draws none.

    Returns:
        The axis.
    """
    ax.spines[["top", "right"]].set_visible(False)
    if grid is not None:
        ax.grid(axis=grid, color="0.9", zorder=0)
        ax.set_axisbelow(True)
    return ax
