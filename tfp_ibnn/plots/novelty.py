"""Novelty: the uncertainty of known against that of unknown classes."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from tfp_ibnn._core import checks
from tfp_ibnn.plots import _inputs
from tfp_ibnn.plots.style import COLORS, new_axes, pale, tidy

__all__ = ["entropy_histograms"]


def entropy_histograms(
    known: Any,
    unknown: Any,
    *,
    bins: int = 30,
    auroc: float | None = None,
    names: tuple[str, str] = ("known classes", "unknown classes"),
    label: str = "entropy (nats)",
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw how uncertain a model is of examples of known and of unknown classes.

    The less the two overlap, the better one threshold tells them apart. Each histogram is a share
    of its own examples, so sets of different sizes compare.

    Args:
        known: (examples,) entropies, or other uncertainties.
        unknown: (others,) those of classes that were not in the training data.
        bins: number of bins, the same for both.
        auroc: area under the ROC curve of the two; written in the figure if it is given.
        names: of the two.
        label: of the horizontal axis.
        title: of the axis.
        ax: where to draw; a new figure by default.

    Example:
        >>> import numpy as np
        >>> from tfp_ibnn import plots
        >>> rng = np.random.default_rng(0)
        >>> known, unknown = rng.beta(1, 8, 500), rng.beta(4, 3, 300)
        >>> ax = plots.entropy_histograms(known, unknown, auroc=0.97)
        >>> ax.get_ylabel()
        'share of examples'
    """
    known, unknown = _inputs.vector("known", known), _inputs.vector("unknown", unknown)
    bins = checks.positive_integer("bins", bins)
    if auroc is not None and not 0 <= checks.finite("auroc", auroc) <= 1:
        raise ValueError(f"`auroc` must lie between 0 and 1; got {auroc!r}.")
    if isinstance(names, str) or len(names) != 2:
        raise ValueError(f"`names` must be two names, known first; got {names!r}.")
    ax = new_axes(ax, (4.6, 3.2))
    both = np.concatenate([known, unknown])
    edges = np.linspace(min(0.0, both.min()), both.max() if both.any() else 1.0, bins + 1)
    looks = (
        {"facecolor": pale(COLORS[0], 0.5), "edgecolor": COLORS[0]},
        {"facecolor": "none", "edgecolor": COLORS[1], "hatch": "////"},
    )
    highest = 0.0
    for values, name, look in zip((known, unknown), names, looks, strict=True):
        share = np.histogram(values, edges)[0] / len(values)
        highest = max(highest, share.max())
        ax.stairs(share, edges, fill=True, lw=1.4, label=f"{name} ({len(values):,})", **look)
    # Room for the legend above. Axes that share a scale take the highest.
    others = [other for other in ax.get_shared_y_axes().get_siblings(ax) if other is not ax]
    tops = [other.get_ylim()[1] for other in others if other.has_data()]
    ax.set(xlim=(edges[0], edges[-1]), ylim=(0, max(1.365 * highest, *tops, 0)))
    ax.set(xlabel=label, ylabel="share of examples", title=title)
    heading = None if auroc is None else f"AUROC {auroc:.3f}"
    ax.legend(
        loc="upper right",
        frameon=False,
        fontsize=9,
        title=heading,
        title_fontsize=9,
        alignment="left",
    )
    return tidy(ax)
