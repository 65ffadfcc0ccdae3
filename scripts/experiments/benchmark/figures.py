"""Figures of a benchmark: ratios beside their targets, and how cost grows."""

import os
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from experiments.benchmark.record import Row
from tfp_ibnn.plots.style import COLORS, LINES, MARKERS, tidy

__all__ = ["growths", "ratios", "save"]

_BLUE, _ORANGE = COLORS[:2]
# By title: the groups of a panel, and what its labels need not repeat.
_PANELS = {
    "a training step, to the deterministic network's": (("training", "vgg16", "gpu"), " step"),
    "a prediction of LeNet, to 128 deterministic passes": (("prediction",), "LeNet, "),
    "peak memory in training VGG16": (("memory",), "VGG16 memory in training, "),
    "error of the mean, 32 quasi-random samples to 128 independent ones": (
        ("sampling",),
        "error, 32 quasi-random samples to 128 independent, ",
    ),
}
_AXES = {
    "samples": ("samples", "LeNet, 100 images", "deterministic passes"),
    "batch": ("batch size", "LeNet, training step", "deterministic"),
    "channels": ("channels", "one convolution, training step", "deterministic"),
    "depth": ("flows in a posterior", "one convolution, training step", "deterministic"),
}
_CURVES = {
    "gaussian": "Gaussian",
    "flow": "flow",
    "planar": "planar flows",
    "convolutions": "1x1 convolutions",
}


def ratios(rows: Sequence[Row]) -> Figure | None:
    """Draw each ratio and its target; return None if there is nothing to draw.

    A target is a black bar. What meets it is a blue dot, what misses it an orange diamond; other
    methods are hollow squares.
    """
    shown = {
        title: [found for found in rows if found["group"] in groups and _drawn(found)]
        for title, (groups, _) in _PANELS.items()
    }
    shown = {title: found for title, found in shown.items() if found}
    if not shown:
        return None
    heights = [len(found) + 1.4 for found in shown.values()]
    figure, axes = plt.subplots(
        len(shown),
        figsize=(8.4, 0.27 * sum(heights) + 0.6),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
        sharex=True,
    )
    for ax, (title, found) in zip(axes[:, 0], shown.items(), strict=True):
        _panel(ax, title, found)
    highest = max(found["ratio"] for part in shown.values() for found in part)
    lowest = min(found["ratio"] for part in shown.values() for found in part)
    axes[-1, 0].set(xscale="log", xlim=(0.93 * min(0.95, lowest), 1.15 * max(2.5, highest)))
    ticks = [0.5, 0.7, 1, 1.2, 1.5, 2, 3, 4, 6, 10, 20]
    axes[-1, 0].xaxis.set_major_locator(FixedLocator(ticks))
    axes[-1, 0].xaxis.set_minor_locator(NullLocator())
    axes[-1, 0].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes[-1, 0].set_xlabel("ratio, logarithmic; 1 costs nothing extra")
    return figure


def _drawn(found: Row) -> bool:
    # A cost far below 1, and one that is told in words, would only squeeze the others.
    return found["ratio"] > 0.3 and "to_ensemble" not in found["id"]


def _panel(ax: Axes, title: str, rows: Sequence[Row]) -> None:
    for place, found in enumerate(rows):
        target, ratio = found["target"], found["ratio"]
        ours = target is not None
        met = ours and ratio <= target
        color = "0.45" if not ours else _BLUE if met else _ORANGE
        if ours:
            ax.plot([target] * 2, [place - 0.36, place + 0.36], color="0.15", lw=2.2, zorder=2)
        ax.plot([1, ratio], [place] * 2, color=color, lw=1.2, alpha=0.5, zorder=1)
        ax.errorbar(
            ratio,
            place,
            xerr=min(found["noise"], 0.9 * ratio),
            fmt="o" if met else "D" if ours else "s",
            color=color,
            mfc=color if ours else "white",
            ms=6,
            lw=1.2,
            zorder=3,
        )
        edge = ax.get_yaxis_transform()
        ax.text(1.01, place, f"{ratio:.2f}", transform=edge, va="center", fontsize=9, color=color)
    ax.axvline(1, color="0.6", lw=0.8, zorder=0)
    ax.set_yticks(
        range(len(rows)),
        [found["label"].replace(_PANELS[title][1], "") for found in rows],
        fontsize=9,
    )
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_title(title, loc="left", fontsize=10)
    ax.tick_params(axis="y", length=0)
    tidy(ax, "x")


def growths(rows: Sequence[Row]) -> Figure | None:
    """Draw cost against size on logarithmic axes, the deterministic network's beside it."""
    if not any("growth" in found for found in rows):
        return None
    figure, axes = plt.subplots(2, 2, figsize=(8.4, 6.4), layout="constrained")
    for ax, (axis, (below, title, own)) in zip(axes.flat, _AXES.items(), strict=True):
        found = [row for row in rows if row.get("growth", {}).get("axis") == axis]
        if not found:
            ax.axis("off")
            continue
        sizes = found[0]["growth"]["sizes"]
        exponent = found[0]["growth"]["own_exponent"]
        label = own if axis == "depth" else f"{own}: {exponent:.2f}"
        ax.loglog(sizes, _milli(found[0]["growth"]["own"]), color="0.5", ls=":", lw=2, label=label)
        for place, row in enumerate(found):
            name = _CURVES[row["id"].rpartition(".")[2]]
            ax.loglog(
                sizes,
                _milli(row["growth"]["seconds"]),
                color=COLORS[place],
                marker=MARKERS[place],
                ls=LINES[place],
                lw=1.8,
                ms=5,
                label=f"{name}: {row['ratio']:.2f}",
            )
        ax.set(xlabel=below, ylabel="milliseconds")
        ax.set_title(title, loc="left", fontsize=10)
        ax.set_xticks(sizes, [str(size) for size in sizes])
        ax.xaxis.set_minor_locator(NullLocator())
        low, high = ax.get_ylim()
        ax.set_ylim(low, high * (high / low) ** 0.35)  # room for the legend
        if high < 10 * low:  # a flat curve should look flat
            ax.set_ylim(low / 2, 8 * high)
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.legend(
            loc="upper left", frameon=False, fontsize=8.5, title="exponent", title_fontsize=8.5
        )
        tidy(ax, "both")
    return figure


def _milli(seconds: Sequence[float]) -> np.ndarray:
    return 1000 * np.asarray(seconds)


def save(figure: Figure | None, path: str | os.PathLike) -> None:
    """Write a figure as PNG, if there is one."""
    if figure is None:
        return
    figure.savefig(path, dpi=100, pil_kwargs={"optimize": True})
    plt.close(figure)
