"""Training curves: what several runs logged, training beside validation."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tfp_ibnn.plots.style import LEGEND, dots, epochs_below, tidy

Histories = Mapping[str, Mapping[str, Sequence[float]]]  # run name to `History.history`
_USUAL = ("loss", "nll", "kl", "accuracy", "ece")
_LABELS = {"loss": "negative ELBO", "nll": "log-likelihood", "kl": "KL (nats)", "ece": "ECE"}
_PHASES = {"": ("training", "-"), "val_": ("validation", "--"), "val_mc_": ("validation, MC", ":")}


def training_panel(histories: Histories, keys: Sequence[str] | None = None) -> Figure:
    """Draw what several runs logged over the epochs, training and validation, one axis a quantity.

    Colours and markers distinguish runs; line styles training, validation, and its mean over draws.

    Args:
        histories: run name to `History.history`.
        keys: quantities, without "val_"; by default those logged of "loss" (the negative ELBO),
            "nll" (drawn with the sign of a log-likelihood), "kl", "accuracy" and "ece".

    Example:
        >>> from tfp_ibnn import plots
        >>> run = {"loss": [3.0, 2.0], "val_loss": [3.1, 2.4], "kl": [9.0, 5.0]}
        >>> figure = plots.training_panel({"flow": run})
    """
    keys = _checked_keys(histories, keys)
    rows, columns = -(-len(keys) // 3), min(3, len(keys))
    size = (3.1 * columns + 0.3, 2.4 * rows + 0.6)
    figure, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    logged = set()
    for position, (ax, key) in enumerate(zip(grid.flat, keys, strict=False)):
        for run, history in enumerate(histories.values()):
            for phase, (_, ls) in _PHASES.items():
                if phase + key not in history:
                    continue
                logged.add(phase)
                epochs, values = _curve(history, phase, key)
                # Few markers, at other epochs for each run, so that they do not hide one another.
                apart = max(1, len(values) // 6)
                marks = {"ms": 4, "markevery": (run * apart // len(histories), apart)}
                values = -values if key == "nll" else values
                ax.plot(epochs, values, ls=ls, lw=1.5, **marks, **dots(run))
        ax.set(ylabel=_LABELS.get(key, key))
        epochs_below(ax)
        if position + columns >= len(keys):
            ax.set_xlabel("epoch")
        tidy(ax, "both")
    handles = [Line2D([], [], label=name, **dots(i)) for i, name in enumerate(histories)]
    for phase, (name, ls) in _PHASES.items():
        if phase in logged and logged != {""}:  # of training alone, no need to say
            handles.append(Line2D([], [], color="0.3", ls=ls, lw=1.5, label=name))
    # One legend for all axes: in a free cell, else below them.
    place = {"loc": "outside lower center", "ncols": 4}
    for ax in grid.flat[len(keys) :][::-1]:
        ax.set_axis_off()
        place = {"loc": "center", "bbox_to_anchor": (0.5, 0.5), "bbox_transform": ax.transAxes}
    figure.legend(handles=handles, **LEGEND, **place)
    return figure


def _curve(history: Any, phase: str, key: str) -> tuple[np.ndarray, ...]:
    values = np.asarray(history[phase + key], dtype="float64")
    count, total = len(values), max(map(len, history.values()))
    if phase != "val_mc_":
        return np.arange(1, count + 1), values
    # The smallest step by which so many entries, from epoch 1 on, reach the last epochs.
    least = min(-(-total // count), (total - 1) // (count - 1)) if count > 1 else total
    # Entries between two logged ones may be NaN; elsewhere NaN is where a run diverged.
    kept = np.isfinite(values)
    return (1 + least * np.arange(count))[kept], values[kept]


def _checked_keys(histories: Any, keys: Sequence[str] | None) -> list[str]:
    """Return the keys, or those logged of `_USUAL`; raise if no run has logged one of them."""
    runs = list(histories.values()) if isinstance(histories, Mapping) else []
    if not runs or not all(isinstance(history, Mapping) for history in runs):
        wanted = "at least one run name to its `History.history`"
        raise ValueError(f"`histories` must map {wanted}; got {histories!r:.80}.")
    for name, values in (entry for history in runs for entry in history.items()):
        if np.ndim(values) != 1:
            got = f"the shape {np.shape(values)} under {name!r}"
            raise ValueError(f"`histories` must hold one number per epoch; got {got}.")
    logged = sorted(set().union(*runs))
    if keys is None:
        keys = [k for k in _USUAL if any(phase + k in logged for phase in _PHASES)] or _USUAL
    for key in keys:
        if not any(phase + key in logged for phase in _PHASES):
            raise ValueError(f"No run has logged {key!r}; choose from {', '.join(logged)}.")
    return list(keys)
