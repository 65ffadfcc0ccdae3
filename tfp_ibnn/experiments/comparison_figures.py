"""Figures of the comparisons of methods.

Import it by name, as `tfp_ibnn.plots`: Matplotlib takes long to import.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tfp_ibnn._core import files
from tfp_ibnn.experiments.report import history
from tfp_ibnn.plots.style import COLORS, epochs_below, marked, tidy

__all__ = [
    "NAMES",
    "curves",
    "methods_of",
    "save",
    "save_figures",
    "scores",
    "spread",
    "standard_error",
]

Row = dict[str, Any]

_TITLES = {"cifar10": "CIFAR-10", "fashion_mnist": "Fashion-MNIST"}
NAMES = {
    "deterministic": "deterministic",
    "deterministic_continued": "deterministic, continued",
    "mc_dropout": "MC dropout",
    "gaussian": "Gaussian",
    "mixture": "mixture",
    "mixture_4": "mixture of 4",
    "mixture_16": "mixture of 16",
    "mixture_16_ibnn": "mixture of 16, iBNN's recipe",
    "flow": "flow",
    "flow_first": "flow, affine first",
    "flow_last": "flow, affine last",
    "flow_over_mixture": "flow over mixture of 4",
    "flow_planar": "planar flows",
    "flow_iaf": "autoregressive flow",
    "flow_sylvester": "Sylvester flows",
    "gaussian_inner": "Gaussian, none in conv1",
    "fixed_inner": "fixed noise, none in conv1",
    "gaussian_elbo": "Gaussian, ELBO",
    "flow_elbo": "flow, ELBO",
}
"""What methods are called in figures, in the order in which they stand there."""


def save_figures(
    rows: Sequence[Row], runs: str | os.PathLike, folder: str | os.PathLike
) -> list[Path]:
    """Draw `curves.png` and `scores.png` into a folder, and return their paths.

    Args:
        rows: one a run, from `lenet`.
        runs: the folder of the runs, whose logs the curves come from.
        folder: where to; it must exist.
    """
    return save({"curves.png": curves(rows, runs), "scores.png": scores(rows)}, folder)


def save(figures: Mapping[str, Figure], folder: str | os.PathLike) -> list[Path]:
    """Write figures, by name, into a folder, and return their paths."""
    for name, figure in figures.items():
        with files.replacing(Path(folder) / name) as temporary:
            figure.savefig(temporary, dpi=150)
        plt.close(figure)
    return [Path(folder) / name for name in figures]


def curves(rows: Sequence[Row], runs: str | os.PathLike) -> Figure:
    """Draw test scores over the epochs with the report's budget (the report's figures 5 and 6).

    Of each method the mean over the seeds, as averaged predictions have it, every five epochs.
    """
    rows = [row for row in rows if row["budget"] == "report" and row["method"] != "deterministic"]
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    keys = {"test_accuracy": "accuracy", "test_nll": "NLL", "test_ece": "ECE"}
    figure, axes = plt.subplots(
        len(datasets),
        3,
        figsize=(10.5, 0.5 + 3.0 * len(datasets)),
        layout="constrained",
        squeeze=False,
    )
    for line, dataset in zip(axes, datasets, strict=True):
        for position, method in enumerate(methods_of(rows)):
            found = [
                history(Path(runs) / "report" / dataset / method / f"seed{row['seed']}")
                for row in rows
                if (row["dataset"], row["method"]) == (dataset, method)
            ]
            for ax, key in zip(line, keys, strict=True):
                values = np.mean([one[key] for one in found], axis=0)
                every = len(found[0]["loss"]) // len(values)
                ax.plot(
                    every * np.arange(1, len(values) + 1),
                    values,
                    label=NAMES[method],
                    **marked(position),
                )
        for ax, label in zip(line, keys.values(), strict=True):
            ax.set(xlabel="epochs after the baseline", ylabel=label)
            epochs_below(ax)
            tidy(ax, "y")
        line[0].set_title(_TITLES[dataset], loc="left", fontsize=10)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def scores(rows: Sequence[Row]) -> Figure:
    """Draw accuracy, NLL and ECE of every method: a point a seed, their mean and standard error."""
    parts: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        parts.setdefault((row["dataset"], row["budget"]), []).append(row)
    heights = [0.8 + 0.28 * len(methods_of(part)) for part in parts.values()]
    figure, axes = plt.subplots(
        len(parts),
        3,
        figsize=(10.5, 0.3 + sum(heights)),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
    )
    keys = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE"}
    for line, ((dataset, budget), part) in zip(axes, parts.items(), strict=True):
        methods = methods_of(part)
        for ax, (key, label) in zip(line, keys.items(), strict=True):
            for place, method in enumerate(methods):
                values = [row[key] for row in part if row["method"] == method]
                spread(ax, place, values)
            ax.set(xlabel=label, ylim=(len(methods) - 0.5, -0.5))
            ax.set_yticks(range(len(methods)), [NAMES[method] for method in methods])
            ax.label_outer(remove_inner_ticks=True)
            ax.xaxis.label.set_visible(True)
            ax.tick_params(labelbottom=True)
            ax.locator_params(axis="x", nbins=5)
            tidy(ax, "x")
        line[0].set_title(f"{_TITLES[dataset]}, budget: {budget}", loc="left", fontsize=10)
    return figure


def spread(ax: Axes, place: float, values: Sequence[float]) -> None:
    """Draw the values of the seeds at a height, their mean, and the standard error of that."""
    mean = np.mean(values)
    ax.plot(values, [place] * len(values), "o", ms=4, color=COLORS[0], alpha=0.5)
    ax.plot([mean] * 2, [place - 0.3, place + 0.3], lw=2, color=COLORS[1])
    ax.errorbar(mean, place, xerr=standard_error(values), color=COLORS[1], capsize=3)


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of a mean, or None if there is but one value."""
    return float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else None


def methods_of(rows: Sequence[Row]) -> list[str]:
    """Return the methods that there are rows of, in the order of `NAMES`."""
    return [name for name in NAMES if any(row["method"] == name for row in rows)]
