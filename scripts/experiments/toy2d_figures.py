"""Figures of the experiment in two dimensions."""

import numpy as np
import pandas as pd

from experiments.figures import facets
from experiments.toy2d import method_of
from tfp_ibnn import plots
from tfp_ibnn.plots.style import COLORS

__all__ = ["figures"]


def figures(results):
    """Return the figures of the experiment in two dimensions, by name; one result per seed."""
    if not results:
        raise ValueError("`results` must hold at least one result; got none.")
    first, length = results[0], results[0].settings.flow_length
    starts = {"report": ("early", "stopped early"), "equal": ("converged", "converged")}
    grid = []
    for budget, (start, known) in starts.items():
        row = [((budget, "deterministic"), f"deterministic, {known}")]
        row.append(((budget, "gaussian"), f"Gaussian, from {start}"))
        row.append(((budget, f"flow_{length}"), f"flow of length {length}, from {start}"))
        grid.append(row)
    shared = {"sharex": True, "sharey": True, "grid_lines": None}

    def boundary(ax, name, title):
        style = {"limits": ((-5.0, 5.0), (-4.0, 5.0)), "resolution": 30, "title": title, "ax": ax}
        points, last = (first.x[:300], first.y[:300]), (name, title) == grid[0][2]
        plots.decision_boundary(first.predict[name], *points, legend=last, **style)

    def calibration(ax, name, title):
        plots.reliability_diagram(first.probabilities[name], first.labels, title=title, ax=ax)
        ax.set_xticks([0.2, 0.4, 0.6, 0.8])
        ax.label_outer()

    return {
        "boundaries.png": facets(grid, boundary, (11, 6.6), **shared),
        "calibration.png": facets(grid, calibration, (11, 7.4), **shared),
        "curves.png": _toy_curves(results),
        "lengths.png": _toy_lengths(results),
    }


def _toy_curves(results):
    """Draw the training from the early network for all lengths (the report's figure 4)."""
    keys, histories = ("loss", "nll", "kl"), {}
    for length in results[0].settings.lengths:
        runs = [result.histories["report", method_of(length)] for result in results]
        mean = {key: np.mean([run[key] for run in runs], axis=0) for key in keys}
        histories[f"length {length}"] = mean
    return plots.training_panel(histories, keys)


def _toy_lengths(results):
    """Draw the end of the training and the test ECE against the length, from the early network.

    The blue points are means over the seeds and the bars standard deviations. Each grey line is a
    seed: seeds have other training points, which moves all their lengths together.
    """
    numbers = results[0].settings.lengths
    rows = pd.DataFrame(row for result in results for row in result.rows)
    rows = rows[rows["budget"] == "report"]

    def draw(ax, key, label, sign):
        values = sign * rows.pivot(index="seed", columns="method", values=key)
        values = values[[method_of(length) for length in numbers]]
        ax.plot(numbers, values.T, "o-", color="0.7", lw=1, ms=3, zorder=2)
        style = {"color": COLORS[0], "marker": "o", "lw": 1.5, "capsize": 3, "zorder": 3}
        ax.errorbar(numbers, values.mean(), values.std() if len(values) > 1 else None, **style)
        ax.set(xlabel="length (planar flows)", ylabel=label, xticks=numbers)

    quantities = [
        ("train_loss", "negative ELBO\n(training, last epochs)", 1),
        ("train_nll", "log-likelihood\n(training, last epochs)", -1),
        ("ece", "ECE (test)", 1),
    ]
    return facets([quantities], draw, (10, 3.2))
