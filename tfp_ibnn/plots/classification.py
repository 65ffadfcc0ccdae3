"""A classifier's predictions: calibration, OOD detection and abstaining."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from tfp_ibnn import metrics
from tfp_ibnn._core import checks
from tfp_ibnn.metrics.detection import finite_vector
from tfp_ibnn.plots.style import COLORS, LEGEND, line, new_axes, pale, tidy

_COUNT_DEPTH = 0.25  # of the axis below accuracy, where counts are drawn
_FEW_EXAMPLES = 10  # below which a bar is pale
_LEGEND_ROOM = 1.365  # height of the axis by that of the highest bar


def reliability_diagram(
    probabilities: Any,
    labels: Any,
    *,
    bins: int = 15,
    title: str = "",
    ax: Axes | None = None,
    sample_weight: Any = None,
) -> Axes:
    """Draw accuracy against confidence, with the number of examples at each confidence below.

    Bars that end below the diagonal belong to an overconfident model. The whiskers are Wilson
    intervals of 68 %, and bars of fewer than ten examples are pale.

    Args:
        probabilities: (examples, classes).
        labels: (examples,) integers, or one-hot.
        bins: number of bins.
        title: of the axis; the ECE is written below it.
        ax: where to draw; a new figure by default.
        sample_weight: (examples,), how often each counts; once by default.

    Returns:
        The axis.

    Example:
        >>> from tfp_ibnn import plots
        >>> ax = plots.reliability_diagram([[0.8, 0.2], [0.8, 0.2]], [0, 1])
    """
    diagram = metrics.reliability(probabilities, labels, bins, sample_weight=sample_weight)
    ax = new_axes(ax, (4, 4))
    centers = (diagram.edges[:-1] + diagram.edges[1:]) / 2
    width = 0.92 / bins
    _draw_accuracy(ax, diagram, centers, width)
    _draw_counts(ax, diagram, centers, width)
    heading = f"{title}\n" if title else ""
    ax.set_title(f"{heading}ECE {diagram.ece:.3f}", fontsize=11)
    ax.set(
        xlim=(0, 1),
        ylim=(-_COUNT_DEPTH, 1),
        xlabel="confidence",
        ylabel="accuracy",
    )
    ax.set_yticks(np.linspace(0, 1, 6))
    return tidy(ax, "y")


def _draw_accuracy(
    ax: Axes, diagram: metrics.Reliability, centers: np.ndarray, width: float
) -> None:
    """Draw bars of accuracy with whiskers, and the diagonal."""
    for x, accuracy, count in zip(centers, diagram.accuracy, diagram.count, strict=True):
        ax.bar(
            x,
            accuracy,
            width,
            color=COLORS[0],
            alpha=0.3 if count < _FEW_EXAMPLES else 1.0,
            zorder=2,
        )
    has_examples = diagram.count > 0
    accuracies = diagram.accuracy[has_examples]
    ax.errorbar(
        centers[has_examples],
        accuracies,
        _wilson_whiskers(accuracies, diagram.count[has_examples]),
        fmt="none",
        ecolor="0.15",
        capsize=2,
        zorder=4,
    )
    (diagonal,) = ax.plot([0, 1], [0, 1], color=COLORS[1], lw=1.5, ls="--", zorder=3)
    diagonal.set_path_effects([withStroke(linewidth=3.5, foreground="white")])


def _wilson_whiskers(share: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return how far Wilson's score interval of one deviation reaches below and above a share.

    Unlike the usual error, it is not 0 at shares of 0 or 1.
    """
    middle = share + 1 / (2 * count)
    variance = share * (1 - share) / count
    half_width = np.sqrt(variance + 1 / (4 * count**2))
    scale = 1 + 1 / count
    low = (middle - half_width) / scale
    high = (middle + half_width) / scale
    return np.maximum([share - low, high - share], 0)


def _draw_counts(ax: Axes, diagram: metrics.Reliability, centers: np.ndarray, width: float) -> None:
    """Draw the number of examples in each bin, on a scale of logarithms, downwards from 0."""
    total = diagram.count.sum()
    heights = np.log1p(diagram.count) / np.log1p(total)
    ax.bar(centers, -_COUNT_DEPTH * heights, width, color="0.6", zorder=2)
    ax.axhline(0, color="0.2", lw=0.8, zorder=3)
    ax.text(
        0.02,
        -0.9 * _COUNT_DEPTH,
        "examples (log)",
        fontsize=8,
        color="0.3",
        va="center",
    )


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

    The less they overlap, the better one threshold separates them. Each is a share of its own.

    Args:
        known: (examples,) entropies, or other uncertainties.
        unknown: (others,) those of classes that were not in the training data.
        bins: number of bins, the same for both.
        auroc: area under the ROC curve of the two; written in the figure if it is given.
        names: of the two.
        label: of the horizontal axis.
        title: of the axis.
        ax: where to draw; a new figure by default.

    Returns:
        The axis.

    Example:
        >>> from tfp_ibnn import plots
        >>> ax = plots.entropy_histograms([0.1, 0.2, 0.4], [0.3, 0.9], auroc=0.83)
    """
    known = finite_vector("known", known)
    unknown = finite_vector("unknown", unknown)
    bins = checks.positive_integer("bins", bins)
    ax = new_axes(ax, (4.6, 3.2))
    edges = _histogram_edges(known, unknown, bins)
    filled = {"facecolor": pale(COLORS[0], 0.5), "edgecolor": COLORS[0]}
    hatched = {"facecolor": "none", "edgecolor": COLORS[1], "hatch": "////"}
    tops = _tops_of_others(ax)
    for values, name, look in zip((known, unknown), names, (filled, hatched), strict=True):
        counts, _ = np.histogram(values, edges)
        share = counts / len(values)
        tops.append(_LEGEND_ROOM * share.max())
        text = f"{name} ({len(values):,})"
        ax.stairs(share, edges, fill=True, lw=1.4, label=text, **look)
    ax.set(
        xlim=(edges[0], edges[-1]),
        ylim=(0, max(tops)),
        xlabel=label,
        ylabel="share of examples",
        title=title,
    )
    ax.legend(
        title=None if auroc is None else f"AUROC {auroc:.3f}",
        title_fontsize=9,
        loc="upper right",
        alignment="left",
        **LEGEND,
    )
    return tidy(ax)


def _histogram_edges(known: np.ndarray, unknown: np.ndarray, bins: int) -> np.ndarray:
    """Return the edges of bins from 0, or below it, to the largest number."""
    both = np.concatenate([known, unknown])
    low = min(0.0, both.min())
    high = both.max() if both.any() else 1.0
    return np.linspace(low, high, bins + 1)


def _tops_of_others(ax: Axes) -> list[float]:
    """Return the upper limits of drawn axes that share the vertical scale, which take the highest.

    Every one of them has room for a legend.
    """
    tops = []
    for other in ax.get_shared_y_axes().get_siblings(ax):
        if other is not ax and other.has_data():
            _, top = other.get_ylim()
            tops.append(top)
    return tops


def risk_coverage(
    curves: Mapping[str, Any], *, label: str = "risk", ax: Axes | None = None
) -> Axes:
    """Draw the mean loss of the examples kept against the share that is kept, most certain first.

    The better the uncertainty, the lower the curve and the area under it (AURC, in the legend).

    Args:
        curves: name to `metrics.risk_coverage(uncertainty, loss)`.
        label: of the vertical axis.
        ax: where to draw; a new figure by default.

    Returns:
        The axis.

    Raises:
        ValueError: if `curves` is not such a mapping.

    Example:
        >>> from tfp_ibnn import metrics, plots
        >>> flow = metrics.risk_coverage([0.1, 0.2, 0.9, 0.3], [0, 0, 1, 0])
        >>> ax = plots.risk_coverage({"flow": flow})
    """
    values = list(curves.values()) if isinstance(curves, Mapping) else []
    are_curves = all(isinstance(value, metrics.RiskCoverage) for value in values)
    if not values or not are_curves:
        raise ValueError(
            "`curves` must map names to `metrics.risk_coverage(uncertainty, loss)`; got "
            f"{curves!r:.80}."
        )
    ax = new_axes(ax, (4.6, 3.4))
    for position, (name, curve) in enumerate(curves.items()):
        text = f"{name} (AURC {curve.area:#.3g})"
        ax.plot(curve.coverage, curve.risk, lw=1.8, label=text, **line(position))
    ax.set(xlim=(0, 1), xlabel="coverage", ylabel=label)
    bottom, _ = ax.get_ylim()
    ax.set_ylim(bottom=min(0, bottom))
    # Above the axis: curves of risk may pass anywhere inside.
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), **LEGEND)
    return tidy(ax, "both")
