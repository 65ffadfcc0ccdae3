"""Figures of the experiment in two dimensions.

Import it by name, as `tfp_ibnn.plots`: Matplotlib takes long to import.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from experiments.toy2d import Name, Result, method_of
from tfp_ibnn import plots

__all__ = ["boundaries", "calibration", "curves", "lengths", "save_figures"]

_LIMITS = (-5.0, 5.0), (-4.0, 5.0)
_START = {"report": "early", "equal": "converged"}
_QUANTITIES = ("loss", "nll", "kl")


def save_figures(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw all figures into a folder, and return their paths.

    Args:
        results: one for each seed, all of the same settings.
        folder: where to; it must exist.
    """
    if not results:
        raise ValueError("`results` must hold at least one result; got none.")
    figures = {
        "boundaries.png": boundaries(results[0]),
        "calibration.png": calibration(results[0]),
        "curves.png": curves(results),
        "lengths.png": lengths(results),
    }
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=150)
        plt.close(figure)
    return [folder / name for name in figures]


def boundaries(result: Result) -> Figure:
    """Draw the decision boundaries of one seed with their uncertainty (the report's figure 3).

    Above the networks that start from the early one, below those that start from the converged one.
    """
    figure, axes = plt.subplots(
        2, 3, figsize=(11, 6.6), layout="constrained", sharex=True, sharey=True
    )
    shown = slice(min(300, len(result.x)))
    for ax, (name, title) in zip(axes.flat, _six(result).items(), strict=True):
        plots.decision_boundary(
            result.predict[name],
            result.x[shown],
            result.y[shown],
            limits=_LIMITS,
            resolution=30,
            ax=ax,
            title=title,
            legend=ax is axes[0, -1],
        )
    return figure


def calibration(result: Result) -> Figure:
    """Draw accuracy against confidence, and the confidences, of the networks of one seed."""
    figure, axes = plt.subplots(
        2, 3, figsize=(11, 7.4), layout="constrained", sharex=True, sharey=True
    )
    for ax, (name, title) in zip(axes.flat, _six(result).items(), strict=True):
        plots.reliability_diagram(result.probabilities[name], result.labels, title=title, ax=ax)
        ax.set_xticks([0.2, 0.4, 0.6, 0.8])
        ax.label_outer()
    return figure


def curves(results: Sequence[Result]) -> Figure:
    """Draw the training from the early network for all lengths (the report's figure 4).

    Each curve is the mean over the seeds.
    """
    histories = {}
    for length in results[0].settings.lengths:
        runs = [result.histories["report", method_of(length)] for result in results]
        histories[f"length {length}"] = {
            key: np.mean([run[key] for run in runs], axis=0) for key in _QUANTITIES
        }
    return plots.training_panel(histories, _QUANTITIES)


def lengths(results: Sequence[Result]) -> Figure:
    """Draw the end of the training and the test ECE against the length, from the early network.

    The blue points are means over the seeds and the bars standard deviations. Each grey line is a
    seed: seeds have other training points, which moves all their lengths together.
    """
    quantities = {
        "train_loss": ("negative ELBO\n(training, last epochs)", 1),
        "train_nll": ("log-likelihood\n(training, last epochs)", -1),
        "ece": ("ECE (test)", 1),
    }
    numbers = results[0].settings.lengths
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
    for ax, (key, (label, sign)) in zip(axes, quantities.items(), strict=True):
        values = sign * np.array([_of_lengths(result, key) for result in results])
        deviation = values.std(axis=0, ddof=1) if len(values) > 1 else None
        for run in values:
            ax.plot(numbers, run, "o-", color="0.7", lw=1, ms=3, zorder=2)
        ax.errorbar(
            numbers,
            values.mean(axis=0),
            deviation,
            color=plots.COLORS[0],
            marker="o",
            lw=1.5,
            capsize=3,
            zorder=3,
        )
        ax.set(xlabel="length (planar flows)", ylabel=label, xticks=numbers)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="0.9")
        ax.set_axisbelow(True)
    return figure


def _of_lengths(result: Result, key: str) -> list[float]:
    rows = {row["method"]: row for row in result.rows if row["budget"] == "report"}
    return [rows[method_of(length)][key] for length in result.settings.lengths]


def _six(result: Result) -> dict[Name, str]:
    """Return the networks of the two panels of six, and their titles."""
    length = result.settings.flow_length
    titles = {}
    for budget, start in _START.items():
        known = "stopped early" if budget == "report" else "converged"
        titles[budget, "deterministic"] = f"deterministic, {known}"
        titles[budget, "gaussian"] = f"Gaussian, from {start}"
        titles[budget, method_of(length)] = f"flow of length {length}, from {start}"
    return titles
