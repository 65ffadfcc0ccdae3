"""Figures of the LeNet experiment."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from tfp_ibnn.experiments.report import history
from tfp_ibnn.plots.style import COLORS, MARKERS, epochs_below, tidy

__all__ = ["curves", "save_figures", "scores"]

_TITLES = {"cifar10": "CIFAR-10", "fashion_mnist": "Fashion-MNIST"}
_NAMES = {
    "deterministic": "deterministic",
    "deterministic_continued": "deterministic, continued",
    "mc_dropout": "MC dropout",
    "gaussian": "Gaussian",
    "mixture": "mixture",
    "flow": "flow",
}


def save_figures(
    rows: Sequence[dict[str, Any]], runs: str | os.PathLike, folder: str | os.PathLike
) -> list[Path]:
    """Draw `curves.png` and `scores.png` into a folder, and return their paths.

    Args:
        rows: one a run, from `lenet`.
        runs: the folder of the runs, whose logs the curves come from.
        folder: where to; it must exist.
    """
    figures = {"curves.png": curves(rows, runs), "scores.png": scores(rows)}
    for name, figure in figures.items():
        figure.savefig(Path(folder) / name, dpi=150)
        plt.close(figure)
    return [Path(folder) / name for name in figures]


def curves(rows: Sequence[dict[str, Any]], runs: str | os.PathLike) -> Figure:
    """Draw test scores over the epochs with the report's budget (the report's figure 5).

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
        for position, method in enumerate(_methods(rows)):
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
                    label=_NAMES[method],
                    **_look(position),
                )
        for ax, label in zip(line, keys.values(), strict=True):
            ax.set(xlabel="epochs after the baseline", ylabel=label, title=_TITLES[dataset])
            epochs_below(ax)
            tidy(ax, "y")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def scores(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw accuracy, NLL and ECE of every method, one point a seed and a bar at their mean."""
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    budgets = list(dict.fromkeys(row["budget"] for row in rows))
    figure, axes = plt.subplots(
        len(datasets) * len(budgets),
        3,
        figsize=(10.5, 0.4 + 2.2 * len(datasets) * len(budgets)),
        layout="constrained",
        squeeze=False,
    )
    cases = [(dataset, budget) for dataset in datasets for budget in budgets]
    for line, (dataset, budget) in zip(axes, cases, strict=True):
        here = [row for row in rows if (row["dataset"], row["budget"]) == (dataset, budget)]
        methods = _methods(here)
        for ax, key, label in zip(
            line, ("accuracy", "nll", "ece"), ("accuracy", "NLL", "ECE"), strict=True
        ):
            for place, method in enumerate(methods):
                values = [row[key] for row in here if row["method"] == method]
                ax.plot(values, [place] * len(values), "o", ms=4, color=COLORS[0], alpha=0.6)
                ax.plot([np.mean(values)] * 2, [place - 0.3, place + 0.3], lw=2, color=COLORS[1])
            ax.set(xlabel=label, ylim=(len(methods) - 0.5, -0.5))
            ax.set_yticks(range(len(methods)), [_NAMES[method] for method in methods])
            ax.label_outer(remove_inner_ticks=True)
            ax.xaxis.label.set_visible(True)
            ax.tick_params(labelbottom=True)
            tidy(ax, "x")
        line[0].set_title(f"{_TITLES[dataset]}, budget: {budget}", loc="left", fontsize=10)
    return figure


def _methods(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [name for name in _NAMES if any(row["method"] == name for row in rows)]


def _look(position: int) -> dict[str, Any]:
    return {"color": COLORS[position], "marker": MARKERS[position], "ms": 4, "lw": 1.5}
