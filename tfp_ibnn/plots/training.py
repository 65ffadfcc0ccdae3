"""Training curves: one logged quantity of several runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from tfp_ibnn.plots.style import epochs_below, line, new_axes, tidy

__all__ = ["Histories", "check_histories", "check_keys", "training_curves"]

Histories = Mapping[str, Mapping[str, Sequence[float]]]
"""Run name to `History.history`."""


def training_curves(
    histories: Histories, key: str, *, label: str | None = None, ax: Axes | None = None
) -> Axes:
    """Draw one logged quantity of several runs over the epochs.

    A run keeps its colour and line style whichever quantity is drawn. Where a run diverged to NaN,
    its curve ends.

    Args:
        histories: run name to `History.history`; runs that did not log `key` are left out.
        key: the quantity, for example "nll" or "kl".
        label: of the vertical axis; `key` by default.
        ax: where to draw; a new figure by default.

    Example:
        >>> from tfp_ibnn import plots
        >>> ax = plots.training_curves({"flow": {"kl": [9.0, 5.0, 4.0]}}, "kl")
        >>> ax.lines[0].get_xdata().tolist()
        [1, 2, 3]
    """
    check_histories(histories)
    check_keys(histories, [key], ("",))
    ax = new_axes(ax, (5, 3.5))
    for i, (name, history) in enumerate(histories.items()):
        if key in history:
            epochs = np.arange(1, len(history[key]) + 1)
            ax.plot(epochs, history[key], label=name, lw=1.8, **line(i))
    ax.set(xlabel="epoch", ylabel=label or key)
    epochs_below(ax)
    return tidy(ax, "both")


def check_histories(histories: Any) -> None:
    """Raise if this is not a mapping of at least one run to lists of numbers."""
    mappings = isinstance(histories, Mapping) and all(
        isinstance(history, Mapping) for history in histories.values()
    )
    if not mappings or not histories:
        raise ValueError(
            "`histories` must map at least one run name to its `History.history`, as in "
            f"{{'flow': model.fit(...).history}}; got {histories!r:.80}."
        )
    for history in histories.values():
        for name, values in history.items():
            if np.ndim(values) != 1:
                raise ValueError(
                    f"`histories` must hold one number an epoch; got the shape {np.shape(values)} "
                    f"under {name!r}."
                )


def check_keys(histories: Histories, keys: Any, phases: tuple[str, ...]) -> list[str]:
    """Return the keys, or raise if there is one that no run has logged in any phase."""
    if isinstance(keys, str) or len(keys) == 0:
        raise ValueError(f"`keys` must be a list such as ['loss', 'kl']; got {keys!r}.")
    logged = sorted({name for history in histories.values() for name in history})
    for key in keys:
        if not any(phase + key in logged for phase in phases):
            raise ValueError(f"No run has logged {key!r}; choose from {', '.join(logged)}.")
    return list(keys)
