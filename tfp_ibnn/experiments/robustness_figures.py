"""Figures of an evaluation on shifted and foreign images.

Import it by name, as `tfp_ibnn.plots`: Matplotlib takes long to import.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from tfp_ibnn import plots
from tfp_ibnn._core import files
from tfp_ibnn.experiments.robustness import Measured
from tfp_ibnn.experiments.scoring import Scores
from tfp_ibnn.plots.style import COLORS, tidy

__all__ = ["curves", "histograms", "save_figures"]

Row = dict[str, Any]

_SCORES = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE"}
_AXES = {
    "corruption": "severity of the corruption",
    "rotation": "rotation (degrees)",
    "fgsm": "FGSM, epsilon (of 255)",
}
_UNCERTAINTIES = {"entropy": "entropy (nats)", "epistemic": "epistemic uncertainty (nats)"}


def save_figures(found: Measured, dataset: str, folder: str | os.PathLike) -> list[Path]:
    """Draw `robustness.png` and `foreign.png`, where there is something to draw.

    Args:
        found: what was measured.
        dataset: of the clean images.
        folder: where to; it must exist.
    """
    figures = {}
    if any(row["shift"] in _AXES for row in found.rows):
        figures["robustness.png"] = curves(found.rows)
    if found.foreign:
        figures["foreign.png"] = histograms(found.rows, found.clean, found.foreign, dataset)
    for name, figure in figures.items():
        with files.replacing(Path(folder) / name) as temporary:
            figure.savefig(temporary, dpi=150)
    return [Path(folder) / name for name in figures]


def curves(rows: Sequence[Row]) -> Figure:
    """Draw accuracy, NLL and ECE against the strength of each kind of shift, 0 for clean images.

    Of the corruptions, the mean is strong and each single one faint.
    """
    kinds = [kind for kind in _AXES if any(row["shift"] == kind for row in rows)]
    figure = Figure(figsize=(10, 0.4 + 2.7 * len(kinds)), layout="constrained")
    axes = figure.subplots(len(kinds), 3, squeeze=False)
    for line, kind in zip(axes, kinds, strict=True):
        names = list(dict.fromkeys(row["name"] for row in rows if row["shift"] == kind))
        for ax, (key, label) in zip(line, _SCORES.items(), strict=True):
            single = [_curve(rows, kind, name, key) for name in names]
            levels = [level for level, _ in single[0]]
            values = np.array([[value for _, value in curve] for curve in single])
            if len(names) > 1:
                faint = ax.plot(levels, values.T, color="0.75", lw=1, zorder=2)
                faint[0].set_label("single ones")
            mean = f"mean of {len(names)} corruptions" if len(names) > 1 else names[0]
            ax.plot(levels, values.mean(axis=0), "o-", color=COLORS[0], ms=4, zorder=3, label=mean)
            ax.set(xlabel=_AXES[kind], ylabel=label)
            ax.set_ylim(0, 1 if key == "accuracy" else 1.08 * values.max())
            if len(levels) < 8:
                ax.set_xticks(levels, [f"{level:g}" for level in levels])
            elif kind == "rotation" and max(levels) - min(levels) >= 90:
                ax.xaxis.set_major_locator(MultipleLocator(45))
            tidy(ax, "y")
        if names[0]:
            line[0].legend(frameon=False, fontsize=9, loc="lower left")
    return figure


def histograms(
    rows: Sequence[Row], known: Scores, unknown: dict[str, Scores], dataset: str
) -> Figure:
    """Draw the uncertainties of known against those of foreign images, a row for each dataset."""
    # A single network has no epistemic uncertainty.
    kinds = [kind for kind in _UNCERTAINTIES if kind == "entropy" or known.samples > 1]
    figure = Figure(figsize=(4.6 * len(kinds), 3.2 * len(unknown)), layout="constrained")
    axes = figure.subplots(len(unknown), len(kinds), squeeze=False)
    found = {row["name"]: row for row in rows if row["shift"] == "foreign"}
    for line, (name, scores) in zip(axes, unknown.items(), strict=True):
        for ax, kind in zip(line, kinds, strict=True):
            plots.entropy_histograms(
                getattr(known, kind),
                getattr(scores, kind),
                auroc=found[name][f"{kind}_auroc"],
                names=(dataset, name),
                label=_UNCERTAINTIES[kind],
                ax=ax,
            )
    return figure


def _curve(rows: Sequence[Row], kind: str, name: str, key: str) -> list[tuple[float, float]]:
    """Return levels, clean ones first where none is below 0, and scores."""
    chosen = [row for row in rows if (row["shift"], row["name"]) == (kind, name)]
    clean = [row for row in rows if row["shift"] == "clean"]
    return sorted((row["level"], row[key]) for row in [*clean, *chosen])
