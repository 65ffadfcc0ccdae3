"""Figures of the experiment in two dimensions."""

from pathlib import Path

import numpy as np
import pandas as pd

from experiments.figures import facets
from experiments.folder import read_record
from experiments.report import history
from experiments.scoring import Scorer, read_model
from experiments.store import predictions
from tfp_ibnn import plots
from tfp_ibnn.data import toy
from tfp_ibnn.plots.style import COLORS


def figures(records, runs):
    """Return the figures by name; those of single models are of the first seed."""
    if not records:
        raise ValueError("`records` must hold at least one run; got none.")
    rows = pd.DataFrame(records)
    first = rows[rows["seed"] == rows["seed"].iloc[0]].set_index(["budget", "method"])
    (flow,) = {m for budget, m in first.index if budget == "equal" and m.startswith("flow")}
    grid = [
        [
            (budget, "deterministic", f"deterministic, {known}"),
            (budget, "gaussian", f"Gaussian, from {start}"),
            (budget, flow, f"flow of length {flow.removeprefix('flow_')}, from {start}"),
        ]
        for budget, start, known in (
            ("report", "early", "stopped early"),
            ("equal", *2 * ("converged",)),
        )
    ]
    shared = {"sharex": True, "sharey": True, "grid_lines": None}

    def boundary(ax, budget, method, title):
        row = first.loc[budget, method]
        path, known = (
            Path(runs) / row["name"],
            read_record(Path(runs) / row["name"] / "settings.json"),
        )
        model = read_model(path / "model.keras", "four_clusters")
        scorer = Scorer(model, row["samples"], row["seed"])
        x, y = (part[:300] for part in toy.sample(known["train_size"], [1, row["seed"]]))
        style = {"limits": ((-5.0, 5.0), (-4.0, 5.0)), "resolution": 30, "title": title, "ax": ax}
        style["legend"] = (budget, method, title) == grid[0][2]
        plots.decision_boundary(lambda points: scorer.score(points, None).mean, x, y, **style)

    def calibration(ax, budget, method, title):
        found = predictions(Path(runs) / first.loc[budget, method]["name"])
        plots.reliability_diagram(*found, title=title, ax=ax)
        ax.set_xticks([0.2, 0.4, 0.6, 0.8])
        ax.label_outer()

    return {
        "boundaries.png": facets(grid, boundary, (11, 6.6), **shared),
        "calibration.png": facets(grid, calibration, (11, 7.4), **shared),
        "curves.png": _curves(rows, runs),
        "lengths.png": _lengths(rows),
    }


def _by_length(rows):
    """Return the names of the stochastic methods that start from the early network, by length."""
    names = rows["method"][(rows["budget"] == "report") & ~rows["method"].str.startswith("det")]
    return {int(name.removeprefix("flow_").replace("gaussian", "0")): name for name in names}


def _curves(rows, runs):
    """Draw the training from the early network for all lengths (the report's figure 4)."""
    keys, histories = ("loss", "nll", "kl"), {}
    for length, method in _by_length(rows).items():
        names = rows["name"][(rows["budget"] == "report") & (rows["method"] == method)]
        logs = [history(Path(runs) / name) for name in names]
        histories[f"length {length}"] = {k: np.mean([log[k] for log in logs], axis=0) for k in keys}
    return plots.training_panel(histories, keys)


def _lengths(rows):
    """Draw the end of the training and the test ECE against the length, from the early network.

    The blue points are means over the seeds and the bars standard deviations. Each grey line is a
    seed: seeds have other training points, which moves all their lengths together.
    """
    lengths = _by_length(rows)
    rows, numbers = rows[rows["budget"] == "report"], list(lengths)

    def draw(ax, key, label, sign):
        values = sign * rows.pivot(index="seed", columns="method", values=key)
        values = values[list(lengths.values())]
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
