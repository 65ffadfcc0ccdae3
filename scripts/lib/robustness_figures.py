"""Figures of one model on shifted and OOD images."""

import pandas as pd
from matplotlib.ticker import MultipleLocator

from lib.figures import AXES, SCORES, UNCERTAINTIES, facets
from tfp_ibnn import plots
from tfp_ibnn.plots.style import COLORS


def figures(found, dataset):
    """Return the figures of an evaluation, by name: what was measured, and the clean dataset."""
    shifted = any(row["shift"] in AXES for row in found.rows)
    drawn = {"robustness.png": shifts(found.rows)} if shifted else {}
    return drawn | ({"foreign.png": histograms(found, dataset)} if found.ood else {})


def shifts(rows):
    """Draw accuracy, NLL and ECE against the strength of each kind of shift, 0 for clean images.

    Of the corruptions, the mean is strong and each single one faint.
    """
    rows = pd.DataFrame(rows)
    kinds = [kind for kind in AXES if (rows["shift"] == kind).any()]
    clean = rows[rows["shift"] == "clean"]

    def draw(ax, kind, key):
        found = rows[rows["shift"] == kind]
        names = found["name"].unique()
        all_ = pd.concat([found, *(clean.assign(name=name) for name in names)])
        values = all_.pivot_table(index="level", columns="name", values=key)
        levels, several = list(values.index), len(names) > 1
        if several:
            ax.plot(levels, values, color="0.75", lw=1, zorder=2)[0].set_label("single ones")
        label = f"mean of {len(names)} corruptions" if several else names[0]
        style = {"color": COLORS[0], "ms": 4, "zorder": 3, "label": label}
        ax.plot(levels, values.mean(axis=1), "o-", **style)
        ax.set(xlabel=AXES[kind], ylabel=SCORES[key])
        ax.set_ylim(0, 1 if key == "accuracy" else 1.08 * values.max().max())
        if len(levels) < 8:
            ax.set_xticks(levels, [f"{level:g}" for level in levels])
        elif kind == "rotation" and max(levels) - min(levels) >= 90:
            ax.xaxis.set_major_locator(MultipleLocator(45))
        if names[0] and key == "accuracy":
            ax.legend(frameon=False, fontsize=9, loc="lower left")

    grid = [[(kind, key) for key in SCORES] for kind in kinds]
    return facets(grid, draw, (10, 0.4 + 2.7 * len(kinds)))


def histograms(found, dataset):
    """Draw the uncertainties of known against those of OOD images, a row for each dataset."""
    rows = {row["name"]: row for row in found.rows if row["shift"] == "foreign"}
    # A single network has no epistemic uncertainty.
    kinds = [kind for kind in UNCERTAINTIES if kind == "entropy" or found.clean.samples > 1]

    def draw(ax, name, kind):
        both = (getattr(scores, kind) for scores in (found.clean, found.ood[name]))
        shown = {"names": (dataset, name), "label": UNCERTAINTIES[kind], "ax": ax}
        plots.entropy_histograms(*both, auroc=rows[name][f"{kind}_auroc"], **shown)

    grid = [[(name, kind) for kind in kinds] for name in found.ood]
    return facets(grid, draw, (4.6 * len(kinds), 3.2 * len(grid)), grid_lines=None)
