"""Figures of trainings and of single examples. Import it late: Matplotlib takes long to import."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from tfp_ibnn.plots.style import COLORS, LEGEND, dots, tidy

_USUAL = ("loss", "nll", "kl", "accuracy", "ece")
_LABELS = {"loss": "negative ELBO", "nll": "log-likelihood", "kl": "KL (nats)", "ece": "ECE"}
_PHASES = {"": ("training", "-"), "val_": ("validation", "--"), "val_mc_": ("validation, MC", ":")}


def epochs_below(ax):
    """Give an axis whole numbers of epochs along its lower side."""
    ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))


def training_panel(histories, keys=None, loss_label=None):
    """Draw what several runs logged over the epochs, training and validation, one axis a quantity.

    Colours and markers distinguish runs; line styles training, validation, and its mean over draws.

    Args:
        histories: run name to `History.history`.
        keys: quantities, without "val_"; by default those logged of "loss",
            "nll" (drawn with the sign of a log-likelihood), "kl", "accuracy" and "ece".
        loss_label: name of the loss, where it is not the negative ELBO.
    """
    labels = _LABELS | ({"loss": loss_label} if loss_label else {})
    every = set().union(*histories.values())
    keys = keys or [k for k in _USUAL if any(phase + k in every for phase in _PHASES)]
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
        ax.set(ylabel=labels.get(key, key))
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


def _curve(history, phase, key):
    values = np.asarray(history[phase + key], dtype="float64")
    count, total = len(values), max(map(len, history.values()))
    if phase != "val_mc_":
        return np.arange(1, count + 1), values
    # The smallest step by which so many entries, from epoch 1 on, reach the last epochs.
    least = min(-(-total // count), (total - 1) // (count - 1)) if count > 1 else total
    # Entries between two logged ones may be NaN; elsewhere NaN is where a run diverged.
    kept = np.isfinite(values)
    return (1 + least * np.arange(count))[kept], values[kept]


def extreme_images(
    images,
    uncertainty,
    *,
    count=8,
    labels=None,
    predictions=None,
    class_names=None,
    name="entropy",
):
    """Draw the images of least and of greatest uncertainty, in two rows.

    Good uncertainty puts plain images above and odd, mislabelled or ambiguous ones below. A wrong
    prediction has a frame, and its caption gives the true class after it.

    Args:
        images: (examples, height, width), or that with a last axis of 1 or 3; on any scale.
        uncertainty: (examples,).
        count: images in a row, at most half of all.
        labels: (examples,) true classes.
        predictions: (examples,) predicted classes, or (examples, classes) probabilities.
        class_names: one per class; their numbers by default.
        name: of the uncertainty.
    """
    pictures = np.asarray(images, dtype="float64")
    pictures = (pictures - pictures.min()) / (np.ptp(pictures) or 1)
    given = [np.asarray(x) for x in (predictions, labels) if x is not None]
    found = [x.argmax(axis=-1) if x.ndim == 2 else x.astype(int) for x in given]
    classes = max((1 + int(x.max()) for x in found), default=1)
    words = [str(word) for word in class_names or range(classes)]
    order = np.argsort(uncertainty, kind="stable")
    rows = {"most certain": order[:count], "least certain": order[::-1][:count]}
    # Wide enough for "not NAME" in bold.
    side = max(0.95, 0.085 * (max(map(len, words)) + 4))
    size = (max(side * count + 0.3, 3.0), 2 * side + 0.9 + 0.2 * len(found))
    figure, grid = plt.subplots(2, count, figsize=size, layout="constrained", squeeze=False)
    for axes, (row, chosen) in zip(grid, rows.items(), strict=True):
        axes[0].set_ylabel(row, fontsize=10)
        for ax, i in zip(axes, chosen, strict=True):
            ax.imshow(pictures[i], cmap="gray", vmin=0, vmax=1)
            ax.set(xticks=[], yticks=[])
            ax.set_title(f"{uncertainty[i]:.2f}", fontsize=9, pad=3)
            own = dict.fromkeys(value[i] for value in found)
            ax.set_xlabel("\nnot ".join(words[k] for k in own), fontsize=9)
            ax.spines[:].set_visible(len(own) > 1)
            if len(own) > 1:
                ax.spines[:].set(color=COLORS[1], linewidth=2.5)
                ax.xaxis.label.set(color=COLORS[1], fontweight="bold")
    below = "predicted class" if predictions is not None else "true class"
    below += " (not: true class)" if len(found) == 2 else ""
    figure.supxlabel(f"above: {name}" + (f"\nbelow: {below}" if found else ""), fontsize=8)
    return figure
