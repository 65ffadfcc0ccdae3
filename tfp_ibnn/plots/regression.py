"""Regression on one input: the predicted mean with bands of uncertainty."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from tfp_ibnn._core import checks
from tfp_ibnn.plots import _inputs
from tfp_ibnn.plots.style import COLORS, SIDE_LEGEND, new_axes, pale, tidy

__all__ = ["regression_bands"]


def regression_bands(
    x: Any,
    prediction: Mapping[str, Any],
    *,
    data: tuple[Any, Any] | None = None,
    truth: Any = None,
    multiples: Sequence[float] = (2.0,),
    ax: Axes | None = None,
) -> Axes:
    """Draw the predicted mean of a function of one input, with epistemic and total bands.

    The inner band is what the model does not know of the function; it should be narrow among the
    data and widen away from them. The outer, hatched one has the noise of the data added: of the
    points, 95 % should lie within two deviations.

    Args:
        x: (N,) or (N, 1) inputs, in any order.
        prediction: "mean", and the variances "aleatoric" and "epistemic"; each (N,) or (N, 1).
        data: inputs and targets of the training points, each (M,) or (M, 1).
        truth: (N,) or (N, 1) true function at `x`.
        multiples: half widths of the bands, in standard deviations; the widest is the palest.
        ax: where to draw; a new figure by default.

    Example:
        >>> import numpy as np
        >>> from tfp_ibnn import plots
        >>> x = np.linspace(-1, 1, 50)
        >>> prediction = {"mean": x**2, "aleatoric": 0.01 + 0 * x, "epistemic": 0.1 * x**2}
        >>> ax = plots.regression_bands(x, prediction, data=([0.0, 0.5], [0.1, 0.2]))
        >>> ax.get_legend_handles_labels()[1]
        ['mean', '± 2 total', '± 2 epistemic', 'data']
    """
    x = _inputs.vector("x", x)
    keys = ("mean", "aleatoric", "epistemic")
    if not isinstance(prediction, Mapping) or not set(keys) <= set(prediction):
        got = [*prediction] if isinstance(prediction, Mapping) else prediction
        raise ValueError(f"`prediction` must be a mapping with the keys {keys}; got {got!r}.")
    parts = [_inputs.vector(f"prediction[{key!r}]", prediction[key], len(x)) for key in keys]
    for key, part in zip(keys[1:], parts[1:], strict=True):
        if part.min() < 0:
            wanted = "a variance, 0 or above"
            raise ValueError(f"`prediction[{key!r}]` must be {wanted}; got {part.min()}.")
    if np.ndim(multiples) != 1 or len(multiples) == 0:
        raise ValueError(f"`multiples` must be a list of numbers such as (2,); got {multiples!r}.")
    multiples = sorted((checks.positive("multiples", each) for each in multiples), reverse=True)
    if data is not None:
        if not isinstance(data, Sequence) or len(data) != 2:
            got = type(data).__name__
            raise ValueError(f"`data` must be a pair of inputs and targets; got {got}.")
        inputs = _inputs.vector("data[0]", data[0], "points")
        targets = _inputs.vector("data[1]", data[1], len(inputs))
    truth = None if truth is None else _inputs.vector("truth", truth, len(x))

    ax = new_axes(ax, (5.2, 3.4))
    sort = np.argsort(x, kind="stable")
    x, mean, aleatoric, epistemic = (part[sort] for part in (x, *parts))
    ax.plot(x, mean, color=COLORS[0], lw=2, label="mean", zorder=3)
    for name, variance, color, whiteness, hatch, ls, order in (
        ("total", aleatoric + epistemic, COLORS[4], 0.75, "....", "--", 1.5),
        ("epistemic", epistemic, COLORS[0], 0.55, None, "-", 2),
    ):
        for position, multiple in enumerate(multiples, start=1):
            width = multiple * np.sqrt(variance)
            fill = pale(color, 1 - position / len(multiples) * (1 - whiteness))
            look = {"facecolor": fill, "edgecolor": pale(color, 0.35), "hatch": hatch, "lw": 0}
            label = f"± {multiple:g} {name}"
            ax.fill_between(x, mean - width, mean + width, label=label, zorder=order, **look)
            for edge in (mean - width, mean + width):
                ax.plot(x, edge, color=color, ls=ls, lw=0.9, zorder=2.5)
    if truth is not None:
        ax.plot(x, truth[sort], color="black", ls=":", lw=1.8, label="truth", zorder=4)
    if data is not None:
        ax.scatter(inputs, targets, s=14, color="black", marker="x", lw=1, label="data", zorder=5)
    ax.set(xlim=(x[0], x[-1]) if x[-1] > x[0] else None, xlabel="x", ylabel="y")
    ax.legend(**SIDE_LEGEND)
    return tidy(ax)
