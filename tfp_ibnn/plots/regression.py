"""A regression's predictions along a line: the mean, and bands of uncertainty."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from tfp_ibnn.metrics.detection import finite_vector
from tfp_ibnn.plots.style import COLORS, SIDE_LEGEND, new_axes, pale, tidy

_KEYS = ("mean", "aleatoric", "epistemic")
_DEVIATIONS = 2  # that a band is wide to either side


class _Band(NamedTuple):
    """How a band looks."""

    name: str
    color: str
    whiteness: float
    hatch: str | None
    line: str
    order: float


_TOTAL = _Band("total", COLORS[4], 0.75, "....", "--", 1.5)
_EPISTEMIC = _Band("epistemic", COLORS[0], 0.55, None, "-", 2)


def regression_bands(
    x: Any,
    prediction: Mapping[str, Any],
    *,
    data: tuple[Any, Any] | None = None,
    truth: Any = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the predicted mean of a function of one input, with epistemic and total bands.

    The inner band is what the model does not know of the function: narrow among the data, wide away
    from them. The outer, hatched one has the noise added. Both are two standard deviations wide to
    either side: 95 % of the points lie in the outer one.

    Args:
        x: (N,) or (N, 1) inputs, in any order.
        prediction: "mean", and the variances "aleatoric" and "epistemic"; each (N,) or (N, 1).
        data: inputs and targets of the training points, each (M,) or (M, 1).
        truth: (N,) or (N, 1) true function at `x`.
        ax: where to draw; a new figure by default.

    Returns:
        The axis.

    Raises:
        ValueError: if arrays do not go together, or a variance is negative.

    Example:
        >>> import numpy as np, tfp_ibnn.plots as plots
        >>> x = np.linspace(-1, 1, 50)
        >>> prediction = {"mean": x**2, "aleatoric": 0.01 + 0 * x, "epistemic": 0.1 * x**2}
        >>> ax = plots.regression_bands(x, prediction, data=([0.0, 0.5], [0.1, 0.2]))
    """
    x = finite_vector("x", x)
    parts = _checked_prediction(prediction, len(x))
    if data is not None:
        inputs = finite_vector("data[0]", data[0])
        targets = finite_vector("data[1]", data[1], len(inputs))
    if truth is not None:
        truth = finite_vector("truth", truth, len(x))
    ax = new_axes(ax, (5.2, 3.4))
    order = np.argsort(x, kind="stable")
    x = x[order]
    mean, aleatoric, epistemic = (parts[key][order] for key in _KEYS)
    ax.plot(x, mean, color=COLORS[0], lw=2, label="mean", zorder=3)
    _draw_band(ax, x, mean, aleatoric + epistemic, _TOTAL)
    _draw_band(ax, x, mean, epistemic, _EPISTEMIC)
    if truth is not None:
        ax.plot(x, truth[order], color="black", ls=":", lw=1.8, label="truth", zorder=4)
    if data is not None:
        look = {"s": 14, "color": "black", "marker": "x", "lw": 1}
        ax.scatter(inputs, targets, label="data", zorder=5, **look)
    has_width = x[-1] > x[0]
    ax.set(xlim=(x[0], x[-1]) if has_width else None, xlabel="x", ylabel="y")
    ax.legend(**SIDE_LEGEND)
    return tidy(ax)


def _checked_prediction(prediction: Any, count: int) -> dict[str, np.ndarray]:
    """Return the mean and variances (count,) by name, or raise."""
    if not isinstance(prediction, Mapping) or not set(_KEYS) <= set(prediction):
        names = [*prediction] if isinstance(prediction, Mapping) else prediction
        raise ValueError(f"`prediction` must be a mapping with the keys {_KEYS}; got {names!r}.")
    parts = {}
    for key in _KEYS:
        parts[key] = finite_vector(f"prediction[{key!r}]", prediction[key], count)
    for key in ("aleatoric", "epistemic"):
        lowest = parts[key].min()
        if lowest < 0:
            raise ValueError(f"`prediction[{key!r}]` must be a variance, 0 or above; got {lowest}.")
    return parts


def _draw_band(
    ax: Axes, x: np.ndarray, mean: np.ndarray, variance: np.ndarray, band: _Band
) -> None:
    """Draw a band around the mean, and its edges."""
    half_width = _DEVIATIONS * np.sqrt(variance)
    edges = (mean - half_width, mean + half_width)
    ax.fill_between(
        x,
        *edges,
        label=f"± {_DEVIATIONS} {band.name}",
        zorder=band.order,
        hatch=band.hatch,
        facecolor=pale(band.color, band.whiteness),
        edgecolor=pale(band.color, 0.35),
        lw=0,
    )
    for edge in edges:
        ax.plot(x, edge, color=band.color, ls=band.line, lw=0.9, zorder=2.5)
