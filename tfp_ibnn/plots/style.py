"""What all figures have in common: colours, lines, markers and bare axes."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The palette of Okabe and Ito."""

# In grey, several of these colours are alike: something else always tells the curves apart.
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
LEGEND = {"frameon": False, "fontsize": 9}
SIDE_LEGEND = {**LEGEND, "loc": "upper left", "bbox_to_anchor": (1.01, 1.02)}


def dots(position: int) -> dict[str, Any]:
    """Return the colour and marker of one of several classes or curves."""
    return {"color": COLORS[position % len(COLORS)], "marker": MARKERS[position % len(MARKERS)]}


def line(position: int) -> dict[str, Any]:
    """Return the colour and line style of one of several curves."""
    return {"color": COLORS[position % len(COLORS)], "ls": LINES[position % len(LINES)]}


def pale(color: Any, whiteness: Any) -> np.ndarray:
    """Return a colour mixed with white; `whiteness` (...) gives (..., 3)."""
    share = np.asarray(whiteness)[..., None]
    return share + (1 - share) * np.asarray(to_rgb(color))


def new_axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """Return the axis given, or that of a new figure of a size in inches."""
    return plt.subplots(figsize=size, layout="constrained")[1] if ax is None else ax


def tidy(ax: Axes, grid: str | None = None) -> Axes:
    """Take away the frame's upper and right side; draw a pale grid along "x", "y" or "both"."""
    ax.spines[["top", "right"]].set_visible(False)
    if grid is not None:
        ax.grid(axis=grid, color="0.9", zorder=0)
        ax.set_axisbelow(True)
    return ax
