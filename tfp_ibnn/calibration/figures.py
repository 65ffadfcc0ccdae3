"""The figure of a report: costs and gains of candidates, and calibration before and after."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfp_ibnn import metrics
from tfp_ibnn._core.extras import needs
from tfp_ibnn.calibration.candidates import Candidate, Standing
from tfp_ibnn.likelihoods import Likelihood

_SIZE = (10, 4.5)
_BINS = 10
_FEW_EXAMPLES = 10  # below which a dot is pale, and not joined to others
_PALE = "0.7"
_DARK = "0.25"
_LEVELS = np.linspace(0, 1, 101)


def report_figure(
    compared: Sequence[Standing],
    panels: Mapping[str, Candidate],
    output: Likelihood,
    y: np.ndarray,
    weight: np.ndarray | None,
) -> Any:
    """Return the figure that `Report.plot` describes.

    Args:
        compared: how all candidates compare; the first is the model as it is.
        panels: the model as it is and the chosen one by label, such as "before"; or one for both.
        output: what their predictions mean.
        y: the targets of their predictions.
        weight: how often each row counts; None is once.
    """
    with needs("plots"):
        import matplotlib.pyplot as plt

    count = len(output.parts)
    width, height = _SIZE
    further = (count - 1) * height
    ones = [1] * count
    figure, (left, *others) = plt.subplots(
        1,
        1 + count,
        figsize=(width + further, height),
        width_ratios=(1.25, *ones),
        layout="constrained",
    )
    *_, chosen = panels.values()
    for ax, name in zip(others, output.parts, strict=True):
        _draw_calibration(ax, name, panels, output, y, weight)
    _draw_costs(left, compared, chosen)
    return figure


def _draw_calibration(
    ax: Any,
    name: str,
    panels: Mapping[str, Candidate],
    output: Likelihood,
    y: np.ndarray,
    weight: np.ndarray | None,
) -> None:
    """Draw the calibration of one output.

    Args:
        ax: where.
        name: of the output; "" if there is one alone.
        panels: the candidates by label.
        output: what their predictions mean.
        y: the targets of their predictions.
        weight: how often each row counts; None is once.
    """
    part = output.parts[name]
    own = {}
    for when, candidate in panels.items():
        split = output.split_rows(prediction=candidate.prediction, y=y, weight=weight)
        rows = split[name]
        own[when] = dataclasses.replace(candidate, prediction=rows["prediction"])
    if part.is_classifier:
        _draw_reliability(ax, own, rows["y"], rows["weight"])
    else:
        _draw_coverage(ax, own, part, rows["y"], rows["weight"])
    if name:
        ax.set_title(f"{name}: {ax.get_title()}", fontsize=12)


def _draw_costs(ax: Any, compared: Sequence[Standing], chosen: Candidate) -> None:
    """Draw NLL against passes, and name the front, the model as it is and the chosen candidate."""
    from tfp_ibnn.plots.style import LEGEND, tidy

    before = compared[0]
    (after,) = [standing for standing in compared if standing.candidate is chosen]
    named = [after]
    for standing in compared:
        is_named = standing is before or standing.is_undominated
        if is_named and standing is not after:
            named.append(standing)
    _set_limits(ax, compared, named)
    _draw_front(ax, compared)
    _, top = ax.get_ylim()
    for standing in compared:
        _draw_mark(ax, standing, _color_of(standing, before, after, named), top)
    title = f"NLL {before.nll:.3f} → {after.nll:.3f}"
    ax.set_title("NLL, unchanged" if before is after else title, fontsize=12)
    ax.set(xlabel="passes of the network per prediction", ylabel="NLL (nats), lower is better")
    tidy(ax, "y")
    kinds = {"trained": "s"} if any(standing.cost.trainings for standing in compared) else {}
    if len(named) < len(compared):
        kinds["matched at no higher cost"] = "o"
    for label, mark in kinds.items():
        ax.plot([], [], mark, color=_PALE, ms=5, label=label)
    if kinds:
        ax.legend(**LEGEND, loc="upper right", ncols=2, borderaxespad=0)
    _name_marks(ax, compared, named, before, after)


def _color_of(standing: Standing, before: Standing, after: Standing, named: list[Standing]) -> str:
    from tfp_ibnn.plots.style import COLORS

    blue, orange, *_ = COLORS
    if standing is after:
        return blue
    if standing is before:
        return orange
    return _DARK if standing in named else _PALE


def _set_limits(ax: Any, compared: Sequence[Standing], named: Sequence[Standing]) -> None:
    """Show all passes, and the NLLs of the named candidates: others may be far worse."""
    passes = [standing.cost.passes for standing in compared]
    fewest = min(passes)
    most = max(1.6 * max(passes), 2.5 * fewest)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_xlim(0.8 * fewest, most)
    ends = []
    for standing in named:
        ends += [standing.nll - standing.error, standing.nll + standing.error]
    lowest = min(ends)
    highest = max(ends)
    room = 0.15 * (highest - lowest) or 0.1
    ax.set_ylim(lowest - room, highest + room)


def _draw_front(ax: Any, compared: Sequence[Standing]) -> None:
    """Draw the lowest NLL that is reached with each number of passes."""
    cheapest_first = sorted(compared, key=_passes_and_nll)
    _, right = ax.get_xlim()
    passes = []
    lowest = []
    for standing in cheapest_first:
        passes.append(standing.cost.passes)
        lowest.append(min([standing.nll, *lowest[-1:]]))
    passes.append(right)
    lowest.append(lowest[-1])
    ax.step(passes, lowest, where="post", color="0.8", lw=1.5, zorder=1)


def _passes_and_nll(standing: Standing) -> tuple[float, float]:
    return standing.cost.passes, standing.nll


def _draw_mark(ax: Any, standing: Standing, color: str, top: float) -> None:
    """Draw a candidate: a dot, or a square if it was trained; a caret at the top if it is above."""
    passes = standing.cost.passes
    if standing.nll > top:
        ax.plot(passes, top, "^", color=color, ms=5, clip_on=False)
        return
    is_named = color != _PALE
    ax.errorbar(
        passes,
        standing.nll,
        standing.error,
        fmt="s" if standing.cost.trainings else "o",
        color=color,
        ms=8 if is_named else 5,
        elinewidth=1.5 if is_named else 1,
        zorder=4 if is_named else 2,
    )


def _name_marks(
    ax: Any,
    compared: Sequence[Standing],
    named: Sequence[Standing],
    before: Standing,
    after: Standing,
) -> None:
    """Write the names of some candidates where they cover neither a mark nor the legend."""
    from tfp_ibnn.plots.labels import Label, place_labels

    labels = []
    for standing in named:
        style = {
            "color": _color_of(standing, before, after, list(named)),
            "fontsize": 10 if standing is after else 9,
            "fontweight": "bold" if standing is after else "normal",
        }
        name = standing.candidate.name.replace(" + ", "\n+ ")
        text = f"chosen: {name}" if standing is after else name
        labels.append(Label(text, standing.cost.passes, standing.nll, style))
    _, top = ax.get_ylim()
    points = [(standing.cost.passes, min(standing.nll, top)) for standing in compared]
    legend = ax.get_legend()
    ax.figure.draw_without_rendering()
    taken = [legend.get_window_extent()] if legend else []
    place_labels(ax, labels, np.array(points), taken)


def _draw_reliability(
    ax: Any, panels: Mapping[str, Candidate], y: np.ndarray, weight: np.ndarray | None
) -> None:
    """Draw the accuracy at each confidence; the area of a dot is the share of the examples."""
    from tfp_ibnn.plots.style import LEGEND, tidy

    ax.plot([0, 1], [0, 1], "--", color="0.6", lw=1, zorder=1)
    scores = []
    for (when, candidate), look in zip(panels.items(), _looks(panels), strict=True):
        total = candidate.prediction.sum(axis=1, keepdims=True)
        probabilities = candidate.prediction / total
        ece = metrics.expected_calibration_error(probabilities, y, sample_weight=weight)
        diagram = metrics.reliability(probabilities, y, _BINS, sample_weight=weight)
        is_sure = diagram.count >= _FEW_EXAMPLES
        share = diagram.count / diagram.count.sum()
        ax.plot(diagram.confidence[is_sure], diagram.accuracy[is_sure], **look)
        for place in np.flatnonzero(diagram.count):
            ax.plot(
                diagram.confidence[place],
                diagram.accuracy[place],
                "o",
                color=look["color"],
                ms=4 + 14 * np.sqrt(share[place]),
                alpha=0.8 if is_sure[place] else 0.25,
                mec="white",
            )
        ax.plot([], [], marker="o", label=f"{when}: {candidate.name}", **look)
        scores.append(f"{ece:.3f}")
    ax.set_title(f"ECE {' → '.join(scores)}", fontsize=12)
    ax.set(xlim=(0, 1.03), ylim=(0, 1.03), ylabel="accuracy")
    ax.set_xlabel("confidence; below the diagonal: overconfident")
    ax.legend(**LEGEND, loc="best")
    tidy(ax)


def _draw_coverage(
    ax: Any,
    panels: Mapping[str, Candidate],
    output: Likelihood,
    y: np.ndarray,
    weight: np.ndarray | None,
) -> None:
    """Draw the share of targets in central intervals, minus their probability.

    The band is twice the standard error of that share for a calibrated model,
    sqrt(level (1 - level) / targets).
    """
    from tfp_ibnn.plots.style import LEGEND, tidy

    count = y.size if weight is None else weight.sum() * y.shape[1]
    band = 2 * np.sqrt(_LEVELS * (1 - _LEVELS) / count)
    ax.axhline(0, color="0.4", lw=1)
    ax.fill_between(_LEVELS, -band, band, color="0.9", label="chance, of a calibrated model")
    scores = []
    for (when, candidate), look in zip(panels.items(), _looks(panels), strict=True):
        covered = output.coverage(candidate.prediction, y, _LEVELS, weight)
        ax.plot(_LEVELS, covered - _LEVELS, label=f"{when}: {candidate.name}", **look)
        scores.append(f"{np.interp(0.9, _LEVELS, covered):.0%}")
    ax.set_title(f"90 % intervals hold {' → '.join(scores)}", fontsize=12)
    ax.set(xlim=(0, 1), xlabel="probability of a central interval")
    ax.set_ylabel("share of targets inside - probability")
    ax.legend(**LEGEND, loc="best")
    tidy(ax, "y")


def _looks(panels: Mapping[str, Candidate]) -> list[dict[str, Any]]:
    """Return color and line of each panel: the chosen candidate's is blue."""
    from tfp_ibnn.plots.style import COLORS

    blue, orange, *_ = COLORS
    after = {"color": blue, "ls": "-", "lw": 2}
    if len(panels) == 1:
        return [after]
    return [{"color": orange, "ls": "--", "lw": 2}, after]
