"""A classifier's predictions: calibration, OOD detection, abstaining, and single examples."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from tfp_ibnn import metrics
from tfp_ibnn._core import checks
from tfp_ibnn.plots import _inputs
from tfp_ibnn.plots.style import COLORS, LEGEND, line, new_axes, pale, tidy


def reliability_diagram(
    probabilities: Any, labels: Any, *, bins: int = 15, title: str = "", ax: Axes | None = None
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

    Example:
        >>> from tfp_ibnn import plots
        >>> ax = plots.reliability_diagram([[0.8, 0.2], [0.8, 0.2]], [0, 1])
    """
    result = metrics.reliability(probabilities, labels, bins)
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
    known, unknown = _inputs.vector("known", known), _inputs.vector("unknown", unknown)
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


def class_distributions(
    samples: Any,
    *,
    class_names: Sequence[str] | None = None,
    label: int | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw how the probability of each class varies between draws of the posterior.

    The line across is the mean, the prediction. A narrow shape between 0 and 1 is noise in the data
    (aleatoric); a wide or split one, draws that disagree (epistemic). The true class is hatched.

    Args:
        samples: (draws, classes) probabilities of one example.
        class_names: one per class; their numbers by default.
        label: the true class.
        ax: where to draw; a new figure by default.

    Example:
        >>> from tfp_ibnn import plots
        >>> ax = plots.class_distributions([[0.7, 0.3], [0.8, 0.2]], class_names=["cat", "dog"])
    """
    samples = _inputs.probabilities("samples", samples, "draws")
    classes = samples.shape[1]
    names = _inputs.names("class_names", class_names, classes)
    if label is not None and label not in range(classes):
        raise ValueError(f"`label` must be a class from 0 to {classes - 1}; got {label}.")
    ax = new_axes(ax, (min(max(0.5 * classes + 1, 3.6), 9), 2.9))
    shapes = {"widths": 0.8, "showextrema": False, "points": 200}
    for k, body in enumerate(ax.violinplot(samples, range(classes), **shapes)["bodies"]):
        color, hatch = (COLORS[1], "////") if k == label else (COLORS[0], None)
        body.set(alpha=1, facecolor=pale(color, 0.55), edgecolor=color, lw=0.9, hatch=hatch)
    places = np.arange(classes)
    ax.hlines(samples.mean(axis=0), places - 0.4, places + 0.4, color="black", lw=1.6)
    slanted = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
    ax.set_xticks(places, names, **(slanted if max(map(len, names)) > 4 else {}))
    if label is not None:
        ax.get_xticklabels()[label].set_fontweight("bold")
    ax.set(xlim=(-0.6, classes - 0.4), ylim=(-0.02, 1.02), ylabel="probability")
    return tidy(ax, "y")


def extreme_images(
    images: Any,
    uncertainty: Any,
    *,
    count: int = 8,
    labels: Any = None,
    predictions: Any = None,
    class_names: Sequence[str] | None = None,
    name: str = "entropy",
) -> Figure:
    """Draw the images of least and of greatest uncertainty, in two rows.

    Good uncertainty puts plain images above and odd, mislabelled or ambiguous ones below. A wrong
    prediction has a frame, and its caption gives the true class after it.

    Args:
        images: (examples, height, width), or that with a last axis of 1 or 3; on any scale.
        uncertainty: (examples,).
        count: images in a row, at most half of all.
        labels: (examples,) true classes, or one-hot.
        predictions: (examples,) predicted classes, or (examples, classes) probabilities.
        class_names: one per class; their numbers by default.
        name: of the uncertainty.

    Example:
        >>> import numpy as np, tfp_ibnn.plots as plots
        >>> figure = plots.extreme_images(np.eye(8)[None].repeat(20, 0), np.arange(20), count=4)
    """
    pictures = _inputs.images(images)
    total = len(pictures)
    doubt = _inputs.vector("uncertainty", uncertainty, total)
    count = checks.positive_integer("count", count, most=total // 2)
    given = {"predictions": predictions, "labels": labels}
    found = [_inputs.classes(key, x, total) for key, x in given.items() if x is not None]
    known = 1 if class_names is None else len(class_names)
    classes = max(known, *(1 + int(value.max()) for value in found), 1)
    words = _inputs.names("class_names", class_names, classes)
    order = np.argsort(doubt, kind="stable")
    rows = {"most certain": order[:count], "least certain": order[::-1][:count]}
    # Wide enough for "not NAME" in bold.
    side = max(0.95, 0.085 * (max(map(len, words)) + 4))
    size = (max(side * count + 0.3, 3.0), 2 * side + 0.9 + 0.2 * len(found))
    figure, grid = plt.subplots(2, count, figsize=size, layout="constrained", squeeze=False)
    for axes, (row, chosen) in zip(grid, rows.items(), strict=True):
        axes[0].set_ylabel(row, fontsize=10)
        for ax, i in zip(axes, chosen, strict=True):
            ax.imshow(pictures[i], cmap="gray", vmin=0, vmax=1)
            ax.set(xticks=[], yticks=[])
            ax.set_title(f"{doubt[i]:.2f}", fontsize=9, pad=3)
            own = dict.fromkeys(value[i] for value in found)
            ax.set_xlabel("\nnot ".join(words[k] for k in own), fontsize=9)
            ax.spines[:].set_visible(len(own) > 1)
            if len(own) > 1:
                ax.spines[:].set(color=COLORS[1], linewidth=2.5)
                ax.xaxis.label.set(color=COLORS[1], fontweight="bold")
    below = "predicted class" if predictions is not None else "true class"
    below += " (not: true class)" if len(found) == 2 else ""
    figure.supxlabel(f"above: {name}" + (f"\nbelow: {below}" if found else ""), fontsize=8)
    return figure
