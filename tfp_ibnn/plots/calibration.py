"""Is an uncertainty right, and what is it good for? Calibration, OOD detection, abstaining."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from tfp_ibnn import metrics
from tfp_ibnn._core import checks
from tfp_ibnn.plots import _inputs
from tfp_ibnn.plots.style import COLORS, LEGEND, line, new_axes, pale, tidy

__all__ = ["entropy_histograms", "reliability_diagram", "risk_coverage"]


def reliability_diagram(
    probabilities: Any,
    labels: Any,
    *,
    bins: int = 15,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw accuracy against confidence, with the number of examples at each confidence below.

    Bars that end below the diagonal belong to an overconfident model. The whiskers are binomial
    standard errors, and bars of fewer than ten examples are pale.

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
    result = metrics.reliability(probabilities, labels, bins)
    ax = new_axes(ax, (4, 4))
    center, width, depth = (result.edges[:-1] + result.edges[1:]) / 2, 0.92 / bins, 0.25
    opacity = np.where(result.count < 10, 0.3, 1.0)
    for x, accuracy, alpha in zip(center, result.accuracy, opacity, strict=True):
        ax.bar(x, accuracy, width, color=COLORS[0], alpha=alpha, zorder=2)
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.sqrt(result.accuracy * (1 - result.accuracy) / result.count)
    ax.errorbar(center, result.accuracy, error, fmt="none", ecolor="0.15", capsize=2, zorder=4)
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

    The less the two overlap, the better one threshold tells them apart. Each is a share of its own
    examples.

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
        >>> import numpy as np, tfp_ibnn.plots as plots
        >>> rng = np.random.default_rng(0)
        >>> ax = plots.entropy_histograms(rng.beta(1, 8, 500), rng.beta(4, 3, 300), auroc=0.97)
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
    # Room for the legend above. Axes that share a scale take the highest.
    others = [other for other in ax.get_shared_y_axes().get_siblings(ax) if other is not ax]
    tops = [other.get_ylim()[1] for other in others if other.has_data()]
    for values, name, look in zip((known, unknown), names, looks, strict=True):
        share = np.histogram(values, edges)[0] / len(values)
        tops.append(1.365 * share.max())
        ax.stairs(share, edges, fill=True, lw=1.4, label=f"{name} ({len(values):,})", **look)
    ax.set(xlim=(edges[0], edges[-1]), ylim=(0, max(tops)))
    ax.set(xlabel=label, ylabel="share of examples", title=title)
    heading = None if auroc is None else f"AUROC {auroc:.3f}"
    place = {"loc": "upper right", "alignment": "left"}
    ax.legend(title=heading, title_fontsize=9, **place, **LEGEND)
    return tidy(ax)


def risk_coverage(
    curves: Mapping[str, Any], *, label: str = "risk", ax: Axes | None = None
) -> Axes:
    """Draw the mean loss of the examples kept against the share that is kept, surest first.

    A curve that falls to the left belongs to an uncertainty that knows the errors. The area under
    the curve (AURC) is in the legend; less is better.

    Args:
        curves: name to a pair of uncertainty (examples,) and loss (examples,), such as 1 for an
            error and 0 otherwise, or to what `metrics.risk_coverage` returns.
        label: of the vertical axis.
        ax: where to draw; a new figure by default.

    Example:
        >>> from tfp_ibnn import plots
        >>> ax = plots.risk_coverage({"flow": ([0.1, 0.2, 0.9, 0.3], [0, 0, 1, 0])})
        >>> ax.get_xlabel()
        'coverage'
    """
    if not isinstance(curves, Mapping) or not curves:
        wanted = "at least one name to (uncertainty, loss)"
        raise ValueError(f"`curves` must map {wanted}; got {curves!r:.80}.")
    found = {name: _curve(f"curves[{name!r}]", curve) for name, curve in curves.items()}
    ax = new_axes(ax, (4.6, 3.4))
    for i, (name, (coverage, risk, area)) in enumerate(found.items()):
        ax.plot(coverage, risk, lw=1.8, label=f"{name} (AURC {area:#.3g})", **line(i))
    ax.set(xlim=(0, 1), xlabel="coverage", ylabel=label)
    ax.set_ylim(bottom=min(0, ax.get_ylim()[0]))
    # Above the axis: curves of risk may pass anywhere inside.
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), **LEGEND)
    return tidy(ax, "both")


def _curve(name: str, curve: Any) -> tuple[Any, Any, float]:
    """Return coverage, risk and area."""
    if not all(hasattr(curve, part) for part in ("coverage", "risk", "area")):
        if not isinstance(curve, tuple | list) or len(curve) != 2:
            raise ValueError(f"`{name}` must be a pair of uncertainty and loss; got {curve!r:.80}.")
        uncertainty = _inputs.vector(f"{name}[0]", curve[0])
        loss = _inputs.vector(f"{name}[1]", curve[1], len(uncertainty))
        curve = metrics.risk_coverage(uncertainty, loss)
    coverage = _inputs.vector(f"{name}.coverage", curve.coverage, "points")
    return coverage, _inputs.vector(f"{name}.risk", curve.risk, len(coverage)), float(curve.area)
