"""Figures of the VGG16 experiment.

Import it by name, as `tfp_ibnn.plots`: Matplotlib takes long to import.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from experiments.afterwards import folder_of
from experiments.comparison_figures import (
    NAMES,
    curves,
    methods_of,
    save,
    scores,
    standard_error,
)
from experiments.report import history
from experiments.vgg16_results import Results, probabilities
from tfp_ibnn.plots.style import COLORS, MARKERS, epochs_below, line, marked, tidy

__all__ = ["foreign", "posteriors", "reliability", "robustness", "save_figures", "training"]

Row = dict[str, Any]

_SCORES = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE"}
_BINS = 12
# Of curves that lie upon each other two are enough.
_DRAWN = "deterministic mc_dropout gaussian mixture_16_ibnn flow_last gaussian_elbo".split()
# With the same prior; iBNN's mixture has means that lie far apart.
_POSTERIORS = "gaussian mixture_16 flow_last gaussian_elbo flow_elbo".split()


def save_figures(
    results: Results, runs: str | os.PathLike, folder: str | os.PathLike
) -> list[Path]:
    """Draw what there are results of into a folder, and return the paths.

    Figures from logs are not drawn if folders of their runs are gone.

    Args:
        results: of `vgg16`.
        runs: the folder of the runs, whose logs are drawn.
        folder: of the results, as `vgg16_results.write` has left it.
    """
    equal = [row for row in results.rows if row["budget"] == "equal"]
    reported = [row for row in results.rows if row["budget"] == "report"]
    figures = {}
    if equal:
        shifted = [row for row in results.robustness if row["budget"] == "equal"]
        figures |= {"scores.png": scores(equal), "robustness.png": robustness(shifted)}
    drawn = [row for row in equal if row["method"] in _DRAWN]
    if drawn:
        figures["reliability.png"] = reliability(drawn, folder)
    if drawn and _are_there(drawn, runs):
        figures["training.png"] = training(drawn, runs)
    if any(row["method"] in _POSTERIORS for row in equal):
        figures["posteriors.png"] = posteriors(equal)
    if any(row["shift"] == "foreign" for row in results.robustness):
        figures["foreign.png"] = foreign(results.robustness)
    if reported and _are_there(reported, runs):
        figures["curves.png"] = curves(reported, runs)
    return save(figures, folder)


def reliability(rows: Sequence[Row], folder: str | os.PathLike) -> Figure:
    """Draw by how much accuracy exceeds confidence, in bins of equally many test images.

    The images of all seeds are taken together. Of images that are nearly certain there are many:
    the axis of confidence shows the share of doubt, 1 - confidence, on a logarithmic scale.

    Args:
        rows: one a run.
        folder: of the results.
    """
    methods = methods_of(rows)
    columns = min(3, len(methods))
    lines = -(-len(methods) // columns)
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(0.5 + 2.9 * columns, 0.4 + 2.2 * lines),
        sharex=True,
        sharey=True,
        layout="constrained",
        squeeze=False,
    )
    for ax, method in zip(axes.flat, methods, strict=False):
        doubt, wrong = _doubts(rows, folder, method)
        parts = np.array_split(np.argsort(-doubt), _BINS)
        gap = [doubt[part].mean() - wrong[part].mean() for part in parts]
        # The seeds share their images, which count once.
        images = len(doubt) / sum(row["method"] == method for row in rows)
        error = [max(wrong[part].std(), 1e-3) / (images / _BINS) ** 0.5 for part in parts]
        ax.axhline(0, color="0.6", lw=1)
        ax.errorbar(
            [max(doubt[part].mean(), 1e-4) for part in parts],
            gap,
            error,
            color=COLORS[0],
            marker="o",
            ms=3,
            lw=1.2,
            capsize=2,
        )
        ax.set_title(NAMES[method], fontsize=9)
        ax.set_xscale("log")
        tidy(ax, "both")
    for empty in range(len(methods), axes.size):
        axes.flat[empty].set_visible(False)
        axes.flat[empty - columns].tick_params(labelbottom=True)
    axes[0, 0].invert_xaxis()
    figure.supxlabel("1 - confidence (more certain to the right)", fontsize=10)
    figure.supylabel("accuracy - confidence", fontsize=10)
    return figure


def training(rows: Sequence[Row], runs: str | os.PathLike) -> Figure:
    """Draw NLL and accuracy on training images, and the KL, over the epochs; means of the seeds."""
    keys = {"nll": "NLL in training", "accuracy": "accuracy in training", "kl": "KL (nats)"}
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.9), layout="constrained")
    for position, method in enumerate(methods_of(rows)):
        found = [history(folder_of(row, runs)) for row in rows if row["method"] == method]
        for ax, key in zip(axes, keys, strict=True):
            # A deterministic network's loss is its NLL, and it has no KL.
            logged = [one.get(key, one["loss"] if key == "nll" else None) for one in found]
            if logged[0] is not None:
                values = np.mean(logged, axis=0)
                epochs = np.arange(1, len(values) + 1)
                ax.plot(epochs, values, label=NAMES[method], lw=1.3, **line(position))
    for ax, label in zip(axes, keys.values(), strict=True):
        ax.set(xlabel="epoch", ylabel=label)
        epochs_below(ax)
        tidy(ax, "y")
    axes[0].set_yscale("log")
    axes[2].set_yscale("log")
    axes[2].set_ylim(bottom=1)
    _legend_below(figure, axes[0])
    return figure


def posteriors(rows: Sequence[Row]) -> Figure:
    """Draw the standard deviation of z that each layer ends with; means of the seeds."""
    rows = [row for row in rows if row["method"] in _POSTERIORS]
    figure, ax = plt.subplots(figsize=(8, 3.2), layout="constrained")
    for position, method in enumerate(methods_of(rows)):
        found = [row["z_std"] for row in rows if row["method"] == method]
        values = {layer: np.mean([one[layer] for one in found]) for layer in found[0]}
        ax.plot(list(values), list(values.values()), label=NAMES[method], **marked(position))
    ax.set(ylabel="standard deviation of z", ylim=(0, None))
    ax.tick_params(axis="x", rotation=45)
    tidy(ax, "y")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    return figure


def robustness(rows: Sequence[Row]) -> Figure:
    """Draw accuracy, NLL and ECE against the strength of corruptions and rotations.

    Means over the seeds and, of corruptions, over their kinds.
    """
    rows = [row for row in rows if row["method"] in _DRAWN]
    kinds = {"corruption": "severity of the corruption", "rotation": "rotation (degrees)"}
    figure, axes = plt.subplots(len(kinds), 3, figsize=(10.5, 6.6), layout="constrained")
    for line_of_axes, (kind, label) in zip(axes, kinds.items(), strict=True):
        for ax, (key, score) in zip(line_of_axes, _SCORES.items(), strict=True):
            for position, method in enumerate(methods_of(rows)):
                levels, values = _by_level(rows, method, kind, key)
                ax.plot(levels, values, label=NAMES[method], **marked(position))
            ax.set(xlabel=label, ylabel=score, xticks=levels)
            tidy(ax, "y")
    _legend_below(figure, axes[0, 0])
    return figure


def foreign(rows: Sequence[Row]) -> Figure:
    """Draw how well each uncertainty tells foreign images from known ones, by AUROC.

    Means over the seeds, and their standard errors. Models that know half of the classes are shown
    for those images only that the others do not find foreign: their other classes.
    """
    rows = [row for row in rows if row["shift"] == "foreign"]
    equal = {row["name"] for row in rows if row["budget"] == "equal"}
    rows = [row for row in rows if row["budget"] == "equal" or row["name"] not in equal]
    cases = list(dict.fromkeys(row["name"] for row in rows))
    kinds = {"entropy_auroc": "entropy", "epistemic_auroc": "epistemic"}
    parts = [[row for row in rows if row["name"] == case] for case in cases]
    methods = methods_of(rows)
    figure, axes = plt.subplots(
        1,
        len(cases),
        figsize=(1.8 + 3.0 * len(cases), 1.2 + 0.32 * len(methods)),
        sharey=True,
        layout="constrained",
        squeeze=False,
    )
    for ax, name, part in zip(axes[0], cases, parts, strict=True):
        for position, (key, label) in enumerate(kinds.items()):
            for place, method in enumerate(methods):
                values = [row[key] for row in part if row["method"] == method]
                if values and None not in values:
                    ax.errorbar(
                        np.mean(values),
                        place + 0.14 * (2 * position - 1),
                        xerr=standard_error(values),
                        fmt=MARKERS[position],
                        ms=4,
                        capsize=2,
                        color=COLORS[position],
                        label=label,
                    )
        ax.set_title(name.replace("_", "-"), fontsize=10)
        ax.set(xlabel="AUROC", ylim=(len(methods) - 0.5, -0.5))
        ax.set_yticks(range(len(methods)), [NAMES[method] for method in methods])
        tidy(ax, "x")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique, loc="outside lower center", ncols=2)
    return figure


def _are_there(rows: Sequence[Row], runs: str | os.PathLike) -> bool:
    return all(folder_of(row, runs).exists() for row in rows)


def _doubts(
    rows: Sequence[Row], folder: str | os.PathLike, method: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return 1 - confidence of each test image, of all seeds, and whether it is wrong."""
    doubt, wrong = [], []
    for row in rows:
        if row["method"] == method:
            mean, labels = probabilities(row, folder)
            # The sum of the others has all digits, where 1 - confidence has none left in float16.
            doubt.append(np.sort(mean, axis=1)[:, :-1].sum(axis=1))
            wrong.append(mean.argmax(axis=1) != labels)
    return np.concatenate(doubt), np.concatenate(wrong).astype("float64")


def _by_level(
    rows: Sequence[Row], method: str, kind: str, key: str
) -> tuple[list[float], list[float]]:
    """Return the levels of a shift, 0 for clean images, and the mean score at each."""
    found: dict[float, list[float]] = {}
    for row in rows:
        if row["method"] == method and row["shift"] in ("clean", kind):
            found.setdefault(row["level"], []).append(row[key])
    return sorted(found), [float(np.mean(found[level])) for level in sorted(found)]


def _legend_below(figure: Figure, ax: Any) -> None:
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
