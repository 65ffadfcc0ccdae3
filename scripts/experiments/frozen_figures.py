"""The figure of the experiment with frozen networks.

Import it by name, as `tfp_ibnn.plots`: Matplotlib takes long to import.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.comparison_figures import NAMES, methods_of, save, spread
from experiments.frozen import BUDGETS
from tfp_ibnn.plots.style import tidy

__all__ = ["differences", "save_figures"]

Row = dict[str, Any]


def save_figures(rows: Sequence[Row], folder: str | os.PathLike) -> list[Path]:
    """Draw `differences.png` into a folder, and return its path in a list."""
    return save({"differences.png": differences(rows)}, folder)


def differences(rows: Sequence[Row]) -> Figure:
    """Draw by how much flows differ from the Gaussian: every seed, the mean, its standard error."""
    found = {(row["budget"], row["method"], row["seed"]): row for row in rows}
    flows = [method for method in methods_of(rows) if method.startswith("flow")]
    keys = {"negative_elbo": "negative ELBO (nats)", "nll": "NLL of the test images"}
    titles = {"frozen": "network as it was", "joint": "network trained as well"}
    figure, axes = plt.subplots(
        len(keys), len(BUDGETS), figsize=(8.5, 4.6), sharex="row", layout="constrained"
    )
    for line, (key, label) in zip(axes, keys.items(), strict=True):
        for ax, budget in zip(line, BUDGETS, strict=True):
            for place, method in enumerate(flows):
                values = [
                    row[key] - found[budget, "gaussian", seed][key]
                    for (where, what, seed), row in found.items()
                    if (where, what) == (budget, method)
                ]
                spread(ax, place, values)
            ax.axvline(0, color="0.6", lw=1, zorder=0)
            ax.set(xlabel=f"{label}, minus the Gaussian's", ylim=(len(flows) - 0.5, -0.5))
            ax.set_yticks(range(len(flows)), [NAMES[method] for method in flows])
            ax.tick_params(labelbottom=True, labelleft=budget == BUDGETS[0])
            ax.xaxis.set_major_locator(MaxNLocator(5))
            ax.set_title(titles[budget], fontsize=10)
            tidy(ax, "x")
    return figure
