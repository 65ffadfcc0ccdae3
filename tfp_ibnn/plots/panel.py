"""Training panel: all that several runs logged, training beside validation."""

from collections.abc import Iterator, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tfp_ibnn._core import checks
from tfp_ibnn.plots.style import COLORS, MARKERS, epochs_below, tidy
from tfp_ibnn.plots.training import Histories, check_histories, check_keys

__all__ = ["training_panel"]

_LABELS = {
    "loss": "negative ELBO",
    "nll": "log-likelihood",
    "kl": "KL (nats)",
    "accuracy": "accuracy",
    "ece": "ECE",
}
_PHASES = {"": ("training", "-"), "val_": ("validation", "--"), "val_mc_": ("validation, MC", ":")}


def training_panel(
    histories: Histories, keys: Sequence[str] | None = None, *, mc_every: int | None = None
) -> Figure:
    """Draw what several runs logged over the epochs, training and validation, one axis a quantity.

    A colour and a marker stand for a run, a line style for training, validation, and validation
    averaged over many draws (MC). A validation curve that turns while training goes on shows
    overfitting; a KL that still moves, a posterior that needs more epochs.

    Args:
        histories: run name to `History.history`.
        keys: quantities, without "val_"; by default those logged of "loss" (the negative ELBO),
            "nll" (drawn with the sign of a log-likelihood), "kl", "accuracy" and "ece". Runs that
            did not log one are left out of it.
        mc_every: the entries "val_mc_..." were logged in the first epoch and then every so many, as
            MonteCarloEvaluation does. By default the smallest number that agrees with how many
            there are.

    Example:
        >>> from tfp_ibnn import plots
        >>> run = {"loss": [3.0, 2.0], "val_loss": [3.1, 2.4], "kl": [9.0, 5.0]}
        >>> figure = plots.training_panel({"flow": run})
        >>> [ax.get_ylabel() for ax in figure.axes]
        ['negative ELBO', 'KL (nats)']
    """
    check_histories(histories)
    if keys is None:
        logged = {key for history in histories.values() for key in history}
        keys = [k for k in _LABELS if any(prefix + k in logged for prefix in _PHASES)]
        keys = keys or list(_LABELS)
    keys = check_keys(histories, keys, tuple(_PHASES))
    if mc_every is not None:
        mc_every = checks.positive_integer("mc_every", mc_every)
    columns = min(3, len(keys))
    rows = -(-len(keys) // columns)
    size = (3.1 * columns + 0.3, 2.4 * rows + 0.6)
    figure, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    phases = set()
    for position, key in enumerate(keys):
        ax = grid.flat[position]
        for run, phase, epochs, values in _curves(histories, key, mc_every):
            phases.add(phase)
            # Few markers, at other epochs for each run, so that they do not hide one another.
            apart = max(1, len(values) // 6)
            ax.plot(
                epochs,
                -values if key == "nll" else values,
                ls=_PHASES[phase][1],
                lw=1.5,
                ms=4,
                markevery=(run * apart // len(histories), apart),
                **_look(run),
            )
        ax.set(ylabel=_LABELS.get(key, key))
        epochs_below(ax)
        if position + columns >= len(keys):
            ax.set_xlabel("epoch")
        tidy(ax, "both")
    _draw_legend(figure, list(grid.flat[len(keys) :]), list(histories), phases)
    return figure


def _draw_legend(figure: Figure, free: list[Axes], runs: list[str], phases: set[str]) -> None:
    """Draw one legend for all axes: in a free cell, else below them."""
    handles = [Line2D([], [], label=name, **_look(i)) for i, name in enumerate(runs)]
    lines = [(label, ls) for phase, (label, ls) in _PHASES.items() if phase in phases]
    handles += [Line2D([], [], color="0.3", ls=ls, lw=1.5, label=label) for label, ls in lines]
    for ax in free:
        ax.set_axis_off()
    if free:
        place = {"loc": "center", "bbox_to_anchor": (0.5, 0.5), "bbox_transform": free[0].transAxes}
    else:
        place = {"loc": "outside lower center", "ncols": 4}
    figure.legend(handles=handles, frameon=False, fontsize=9, **place)


def _look(run: int) -> dict[str, str]:
    return {"color": COLORS[run % len(COLORS)], "marker": MARKERS[run % len(MARKERS)]}


def _curves(
    histories: Histories, key: str, mc_every: int | None
) -> Iterator[tuple[int, str, np.ndarray, np.ndarray]]:
    """Yield run, phase, epochs and values of each curve of a quantity."""
    for run, history in enumerate(histories.values()):
        for phase in _PHASES:
            if phase + key not in history:
                continue
            values = np.asarray(history[phase + key], dtype="float64")
            every = 1
            if phase == "val_mc_":
                total = max(len(entries) for entries in history.values())
                every = mc_every or _interval(len(values), total)
            epochs = 1 + every * np.arange(len(values))
            # Entries between two logged ones may be NaN; elsewhere NaN is where a run diverged.
            kept = np.isfinite(values) if phase == "val_mc_" else slice(None)
            yield run, phase, epochs[kept], values[kept]


def _interval(count: int, total: int) -> int:
    """Return the smallest step by which `count` entries, from epoch 1 on, reach the last epochs."""
    return min(-(-total // count), (total - 1) // (count - 1)) if count > 1 else total
