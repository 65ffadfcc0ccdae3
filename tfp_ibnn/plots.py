"""Figures, legible in print and for the colour-blind; each draws on an axis that it is given."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from tfp_ibnn.metrics import reliability

__all__ = ["COLORS", "reliability_diagram", "training_curves"]

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The palette of Okabe and Ito."""

_LINES = ("-", "--", "-.", ":")


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
    """
    ax = plt.subplots(figsize=(4, 4))[1] if ax is None else ax
    result = reliability(probabilities, labels, bins)
    width = 0.92 / bins
    center = (result.edges[:-1] + result.edges[1:]) / 2
    pale = np.where(result.count < 10, 0.3, 1.0)
    for x, accuracy, alpha in zip(center, result.accuracy, pale, strict=True):
        ax.bar(x, accuracy, width, color=COLORS[0], alpha=alpha, zorder=2)
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.sqrt(result.accuracy * (1 - result.accuracy) / result.count)
    ax.errorbar(center, result.accuracy, error, fmt="none", ecolor="0.15", capsize=2, zorder=4)
    ax.plot([0, 1], [0, 1], color=COLORS[1], lw=1.5, ls="--", zorder=3)
    depth = 0.25
    height = np.log1p(result.count) / np.log1p(result.count.sum())
    ax.bar(center, -depth * height, width, color="0.6", zorder=2)
    ax.axhline(0, color="0.2", lw=0.8, zorder=3)
    ax.text(0.02, -0.9 * depth, "examples (log)", fontsize=8, color="0.3", va="center")
    heading = f"ECE {result.ece:.3f}"
    ax.set_title(f"{title}\n{heading}" if title else heading, fontsize=11)
    ax.set(xlim=(0, 1), ylim=(-depth, 1), xlabel="confidence", ylabel="accuracy")
    ax.set_yticks(np.linspace(0, 1, 6))
    ax.grid(axis="y", color="0.9", zorder=0)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def training_curves(
    histories: Mapping[str, Mapping[str, Sequence[float]]],
    key: str,
    *,
    label: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw one logged quantity of several runs over the epochs.

    Args:
        histories: run name to `History.history`; runs that did not log `key` are left out.
        key: the quantity, for example "nll" or "kl".
        label: of the vertical axis; `key` by default.
        ax: where to draw; a new figure by default.
    """
    ax = plt.subplots(figsize=(5, 3.5))[1] if ax is None else ax
    for i, (name, history) in enumerate(histories.items()):
        if key in history:
            values = history[key]
            style = {"color": COLORS[i % len(COLORS)], "ls": _LINES[i % len(_LINES)]}
            ax.plot(range(1, len(values) + 1), values, label=name, lw=1.8, **style)
    ax.set(xlabel="epoch", ylabel=label or key)
    ax.grid(color="0.9")
    ax.spines[["top", "right"]].set_visible(False)
    return ax
