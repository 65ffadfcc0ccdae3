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

    Example:
        >>> from tfp_ibnn import plots
        >>> ax = plots.reliability_diagram([[0.8, 0.2], [0.8, 0.2]], [0, 1])
    """
    result = metrics.reliability(probabilities, labels, bins, sample_weight=sample_weight)
    ax = new_axes(ax, (4, 4))
    center, width, depth = (result.edges[:-1] + result.edges[1:]) / 2, 0.92 / bins, 0.25
    for x, accuracy, count in zip(center, result.accuracy, result.count, strict=True):
        ax.bar(x, accuracy, width, color=COLORS[0], alpha=0.3 if count < 10 else 1.0, zorder=2)
    # By Wilson's score: a bar at 0 or 1 has an uncertainty, too.
    some = result.count > 0
    p, n = result.accuracy[some], result.count[some]
    middle, half = p + 1 / (2 * n), np.sqrt(p * (1 - p) / n + 1 / (4 * n**2))
    ends = np.array([middle - half, middle + half]) / (1 + 1 / n)
    whiskers = np.maximum([p - ends[0], ends[1] - p], 0)
    ax.errorbar(center[some], p, whiskers, fmt="none", ecolor="0.15", capsize=2, zorder=4)
    diagonal = ax.plot([0, 1], [0, 1], color=COLORS[1], lw=1.5, ls="--", zorder=3)[0]
    diagonal.set_path_effects([withStroke(linewidth=3.5, foreground="white")])
    height = np.log1p(result.count) / np.log1p(result.count.sum())
    ax.bar(center, -depth * height, width, color="0.6", zorder=2)
    ax.axhline(0, color="0.2", lw=0.8, zorder=3)
    ax.text(0.02, -0.9 * depth, "examples (log)", fontsize=8, color="0.3", va="center")
    ax.set_title((f"{title}\n" if title else "") + f"ECE {result.ece:.3f}", fontsize=11)
    ax.set(xlim=(0, 1), ylim=(-depth, 1), xlabel="confidence", ylabel="accuracy")
    ax.set_yticks(np.linspace(0, 1, 6))
    return tidy(ax, "y")


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

    Example:
        >>> from tfp_ibnn import plots
        >>> ax = plots.entropy_histograms([0.1, 0.2, 0.4], [0.3, 0.9], auroc=0.83)
    """
    known, unknown = finite_vector("known", known), finite_vector("unknown", unknown)
    bins = checks.positive_integer("bins", bins)
    ax = new_axes(ax, (4.6, 3.2))
    both = np.concatenate([known, unknown])
    edges = np.linspace(min(0.0, both.min()), both.max() if both.any() else 1.0, bins + 1)
    filled = {"facecolor": pale(COLORS[0], 0.5), "edgecolor": COLORS[0]}
    hatched = {"facecolor": "none", "edgecolor": COLORS[1], "hatch": "////"}
    # Room for the legend above. Axes that share a scale take the highest.
    others = [other for other in ax.get_shared_y_axes().get_siblings(ax) if other is not ax]
    tops = [other.get_ylim()[1] for other in others if other.has_data()]
    for values, name, look in zip((known, unknown), names, (filled, hatched), strict=True):
        share = np.histogram(values, edges)[0] / len(values)
        tops.append(1.365 * share.max())
        ax.stairs(share, edges, fill=True, lw=1.4, label=f"{name} ({len(values):,})", **look)
    ax.set(xlim=(edges[0], edges[-1]), ylim=(0, max(tops)))
    ax.set(xlabel=label, ylabel="share of examples", title=title)
    heading = None if auroc is None else f"AUROC {auroc:.3f}"
    ax.legend(title=heading, title_fontsize=9, loc="upper right", alignment="left", **LEGEND)
    return tidy(ax)


def risk_coverage(
    curves: Mapping[str, Any], *, label: str = "risk", ax: Axes | None = None
) -> Axes:
    """Draw the mean loss of the examples kept against the share that is kept, most certain first.

    The better the uncertainty, the lower the curve and the area under it (AURC, in the legend).

    Args:
        curves: name to `metrics.risk_coverage(uncertainty, loss)`.
        label: of the vertical axis.
        ax: where to draw; a new figure by default.

    Example:
        >>> from tfp_ibnn import metrics, plots
        >>> flow = metrics.risk_coverage([0.1, 0.2, 0.9, 0.3], [0, 0, 1, 0])
        >>> ax = plots.risk_coverage({"flow": flow})
    """
    found = list(curves.values()) if isinstance(curves, Mapping) else []
    if not found or not all(isinstance(curve, metrics.RiskCoverage) for curve in found):
        wanted = "names to `metrics.risk_coverage(uncertainty, loss)`"
        raise ValueError(f"`curves` must map {wanted}; got {curves!r:.80}.")
    ax = new_axes(ax, (4.6, 3.4))
    for i, (name, curve) in enumerate(curves.items()):
        legend = f"{name} (AURC {curve.area:#.3g})"
        ax.plot(curve.coverage, curve.risk, lw=1.8, label=legend, **line(i))
    ax.set(xlim=(0, 1), xlabel="coverage", ylabel=label)
    ax.set_ylim(bottom=min(0, ax.get_ylim()[0]))
    # Above the axis: curves of risk may pass anywhere inside.
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), **LEGEND)
    return tidy(ax, "both")
