"""Calibration: the reliability diagram."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from tfp_ibnn.metrics import reliability
from tfp_ibnn.plots.style import COLORS, new_axes, tidy

__all__ = ["reliability_diagram"]


def reliability_diagram(
    probabilities: Any,
    labels: Any,
    *,
    bins: int = 15,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw accuracy against confidence, with the number of examples at each confidence below.

    Bars that end on the diagonal belong to a calibrated model; below it, the model is too sure. The
    whiskers are binomial standard errors, and bars of fewer than ten examples are pale.

    Args:
        probabilities: (examples, classes).
        labels: (examples,) integers, or one-hot.
        bins: number of bins.
        title: of the axis; the ECE is written below it.
        ax: where to draw; a new figure by default.

    Example:
        >>> from tfp_ibnn import plots
        >>> ax = plots.reliability_diagram([[0.8, 0.2], [0.8, 0.2]], [0, 1])
        >>> ax.get_title()
        'ECE 0.300'
    """
    result = reliability(probabilities, labels, bins)
    ax = new_axes(ax, (4, 4))
    width = 0.92 / bins
    center = (result.edges[:-1] + result.edges[1:]) / 2
    pale = np.where(result.count < 10, 0.3, 1.0)
    for x, accuracy, alpha in zip(center, result.accuracy, pale, strict=True):
        ax.bar(x, accuracy, width, color=COLORS[0], alpha=alpha, zorder=2)
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.sqrt(result.accuracy * (1 - result.accuracy) / result.count)
    ax.errorbar(center, result.accuracy, error, fmt="none", ecolor="0.15", capsize=2, zorder=4)
    diagonal = ax.plot([0, 1], [0, 1], color=COLORS[1], lw=1.5, ls="--", zorder=3)[0]
    diagonal.set_path_effects([withStroke(linewidth=3.5, foreground="white")])
    depth = 0.25
    height = np.log1p(result.count) / np.log1p(result.count.sum())
    ax.bar(center, -depth * height, width, color="0.6", zorder=2)
    ax.axhline(0, color="0.2", lw=0.8, zorder=3)
    ax.text(0.02, -0.9 * depth, "examples (log)", fontsize=8, color="0.3", va="center")
    heading = f"ECE {result.ece:.3f}"
    ax.set_title(f"{title}\n{heading}" if title else heading, fontsize=11)
    ax.set(xlim=(0, 1), ylim=(-depth, 1), xlabel="confidence", ylabel="accuracy")
    ax.set_yticks(np.linspace(0, 1, 6))
    return tidy(ax, "y")
