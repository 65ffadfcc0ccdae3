"""Predictions over the inputs: boundaries in the plane, and bands along a line."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from scipy.ndimage import zoom
from scipy.special import entr

from tfp_ibnn._core import checks
from tfp_ibnn.metrics.detection import finite_vector
from tfp_ibnn.plots.style import COLORS, SIDE_LEGEND, dots, new_axes, pale, tidy

# Grid points along each axis; size, or shade, at the least and the largest uncertainty.
_STYLES = {"size": (36, (0.03, 1.0)), "shade": (120, (1.0, 0.1))}
_FINE = 300  # points along each axis of the grid on which the boundary is found, at least


def decision_boundary(
    predict: Callable[[np.ndarray], Any],
    x: Any = None,
    labels: Any = None,
    *,
    uncertainty: str = "entropy",
    style: str = "size",
    limits: tuple[tuple[float, float], tuple[float, float]] | None = None,
    resolution: int | None = None,
    maximum: float | None = None,
    legend: bool = True,
    ax: Axes | None = None,
    title: str | None = None,
) -> Axes:
    """Draw the predicted class over the plane as colour, its uncertainty as size or shade.

    Dots are large, and shades pale, where the model is uncertain. On a black line two classes tie.

    Args:
        predict: maps float32 points (M, 2) to probabilities (M, classes), or (M, 1) for class 1 of
            two, or to a mapping that holds them as "mean", and uncertainties (M,) beside them.
        x: (N, 2) training points, drawn on top.
        labels: (N,) integers or (N, classes) one-hot; each class has its own marker.
        uncertainty: the entry of the mapping to show, or the entropy of the mean, in nats.
        style: "size" for a grid of points, "shade" for a continuous surface.
        limits: ((left, right), (bottom, top)); by default those of `x` and a margin.
        resolution: grid points along each axis; 36 for "size", 120 for "shade".
        maximum: the uncertainty of the largest dots, or the palest shade; by default log(classes)
            for the entropy, else the largest of the grid. Give one number to compare models.
        legend: whether to draw one, right of the axis.
        ax: where to draw; a new figure by default.
        title: of the axis.

    Example:
        >>> import numpy as np, tfp_ibnn.plots as plots
        >>> predict = lambda points: 1 / (1 + np.exp(-points[:, :1]))
        >>> ax = plots.decision_boundary(predict, limits=((-4, 4), (-3, 3)), title="sigmoid")
    """
    checks.one_of("style", style, tuple(_STYLES))
    x = None if x is None else _array("x", x, ("points", 2))
    if labels is not None and x is None:
        raise ValueError("`labels` go with `x`; got labels only. Give the points (N, 2) as `x`.")
    resolution = _STYLES[style][0] if resolution is None else resolution
    count = checks.positive_integer("resolution", resolution, least=2)
    across, up = (np.linspace(*ends, count) for ends in _limits(limits, x))
    grid = np.stack(np.meshgrid(across, up), axis=-1).reshape(-1, 2)
    mean, doubt = _evaluate(predict, grid.astype("float32"), uncertainty)
    classes = mean.shape[1]
    if labels is not None:
        if np.ndim(labels) == 2 and np.shape(labels)[1] > 1:
            labels = _array("labels", labels, (len(x), classes)).argmax(axis=-1)
        labels = finite_vector("labels", labels, len(x))
        if not np.isin(labels, range(classes)).all():
            wanted = f"whole numbers from 0 to {classes - 1}, or one-hot"
            raise ValueError(f"`labels` must be {wanted}; got {np.unique(labels)}.")
    if maximum is None:
        # A model that is certain everywhere has nothing to scale by.
        maximum = np.log(classes) if uncertainty == "entropy" else doubt.max() or 1.0
    maximum = checks.positive("maximum", float(maximum))
    ax = new_axes(ax, (5.2, 3.8) if legend else (3.9, 3.8))
    looks = [dots(k) for k in range(classes)]
    ink = np.interp(doubt / maximum, (0, 1), _STYLES[style][1])
    winner = mean.argmax(axis=-1)
    if style == "size":
        box = ax.get_window_extent()
        area = (0.74 * 72 / ax.figure.dpi * min(box.width, box.height) / count) ** 2
        for k, look in enumerate(looks):
            where = winner == k
            light = {**look, "color": pale(look["color"], 0.45), "linewidths": 0}
            ax.scatter(*grid[where].T, s=area * ink[where], **light)
    else:
        shades = np.stack([pale(look["color"], 1 - 0.75 * ink) for look in looks])
        shade = shades[winner, np.arange(len(winner))].reshape(count, count, 3)
        ax.pcolormesh(across, up, shade, shading="nearest", rasterized=True)
    # On a coarse grid, lines that are drawn class by class would not meet where three classes do.
    factor = -(-_FINE // count)
    fine = zoom(mean.reshape(count, count, classes), (factor, factor, 1), order=1)
    axes = [np.linspace(axis[0], axis[-1], len(fine)) for axis in (across, up)]
    for k in range(1 if classes == 2 else classes):
        lead = fine[..., k] - np.delete(fine, k, axis=-1).max(axis=-1, initial=0)
        if lead.min() < 0 < lead.max():
            ax.contour(*axes, lead, levels=[0.0], colors="black", linewidths=1.4)
    edge = {"s": 24, "edgecolors": "black", "linewidths": 0.7, "zorder": 3}
    if labels is not None:
        for k in np.unique(labels):
            ax.scatter(*x[labels == k].T, **looks[int(k)], **edge)
    elif x is not None:
        ax.scatter(*x.T, color="white", marker="o", **edge)
    ax.set(xlim=across[[0, -1]], ylim=up[[0, -1]], title=title, xlabel="$x_1$", ylabel="$x_2$")
    if legend:
        _draw_legend(ax, style, classes, uncertainty, maximum)
    return ax


def _array(name: str, value: Any, shape: tuple[int | str, ...]) -> np.ndarray:
    """Return `value` as a finite float array, or raise; a word in `shape` is any size of 1 on."""
    try:
        x = np.asarray(value, dtype="float64")
    except (TypeError, ValueError):
        raise ValueError(f"`{name}` must be an array of numbers; got {value!r:.80}.") from None
    pairs = zip(x.shape, shape, strict=False)
    fits = all(size > 0 if isinstance(wanted, str) else size == wanted for size, wanted in pairs)
    if not fits or x.ndim != len(shape):
        words = f"({', '.join(map(str, shape))})"
        raise ValueError(f"`{name}` must have the shape {words}, and not be empty; got {x.shape}.")
    bad = np.argwhere(~np.isfinite(x)).tolist()
    if bad:
        first = x[tuple(bad[0])]
        raise ValueError(f"`{name}` must be finite; got {first} at {bad[0]}, one of {len(bad)}.")
    return x


def _limits(limits: Any, x: np.ndarray | None) -> np.ndarray:
    """Return [[left, right], [bottom, top]], those of the points `x` unless given."""
    wanted = "((left, right), (bottom, top)), such as ((-3, 3), (-2, 2))"
    if limits is not None:
        found = _array("limits", limits, (2, 2))
        if np.any(found[:, 0] >= found[:, 1]):
            raise ValueError(f"`limits` must be {wanted}; got {limits!r}.")
        return found
    if x is None:
        raise ValueError(f"`limits` must be given without `x`: {wanted}.")
    low, high = x.min(axis=0), x.max(axis=0)
    margin = np.where(high > low, 0.1 * (high - low), 1.0)
    return np.stack([low - margin, high + margin], axis=-1)


def _evaluate(predict: Any, grid: np.ndarray, uncertainty: str) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities (M, classes) and uncertainty (M,)."""
    given = predict(grid)
    parts = given if isinstance(given, Mapping) else {"mean": given}
    checks.one_of("uncertainty", uncertainty, sorted({"entropy", *parts} - {"mean"}))
    if "mean" not in parts:
        raise ValueError(f"`predict` must return a mapping with the key 'mean'; got {[*parts]}.")
    mean = np.asarray(parts["mean"])
    if mean.ndim == 2 and mean.shape[1] == 1:
        mean = np.concatenate([1 - mean, mean], axis=1)
    mean = _array("predict(points)", mean, (len(grid), "classes"))
    bad = (np.abs(mean.sum(axis=-1) - 1) > 1e-3) | (mean.min(axis=-1) < 0)
    if bad.any():
        wanted = "probabilities (apply softmax to logits)"
        raise ValueError(f"`predict(points)` must be {wanted}; got {mean[bad][0]}.")
    if uncertainty not in parts:
        return mean, entr(mean).sum(axis=-1)
    return mean, finite_vector(f"predict(points)[{uncertainty!r}]", parts[uncertainty], len(grid))


def _draw_legend(ax: Axes, style: str, classes: int, uncertainty: str, maximum: float) -> None:
    handles: list[Any] = [
        *(Line2D([], [], ls="", label=f"class {k}", **dots(k)) for k in range(classes)),
        Line2D([], [], color="black", lw=1.4, label="p = 0.5" if classes == 2 else "boundary"),
        Patch(fill=False, lw=0, label=f"{uncertainty} ({style})"),
    ]
    for share in (0.0, 0.5, 1.0):
        ink, label = np.interp(share, (0, 1), _STYLES[style][1]), f"{share * maximum:.2g}"
        if style == "size":
            look = {"marker": "o", "markersize": 9 * ink**0.5, "markeredgewidth": 0}
            handles.append(Line2D([], [], ls="", color="0.4", label=label, **look))
        else:
            look = {"facecolor": pale("black", 1 - 0.75 * ink), "edgecolor": "0.6", "lw": 0.5}
            handles.append(Patch(label=label, **look))
    ax.legend(handles=handles, **SIDE_LEGEND)


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

    Example:
        >>> import numpy as np, tfp_ibnn.plots as plots
        >>> x = np.linspace(-1, 1, 50)
        >>> prediction = {"mean": x**2, "aleatoric": 0.01 + 0 * x, "epistemic": 0.1 * x**2}
        >>> ax = plots.regression_bands(x, prediction, data=([0.0, 0.5], [0.1, 0.2]))
    """
    x = finite_vector("x", x)
    keys = ("mean", "aleatoric", "epistemic")
    if not isinstance(prediction, Mapping) or not set(keys) <= set(prediction):
        got = [*prediction] if isinstance(prediction, Mapping) else prediction
        raise ValueError(f"`prediction` must be a mapping with the keys {keys}; got {got!r}.")
    parts = [finite_vector(f"prediction[{key!r}]", prediction[key], len(x)) for key in keys]
    for key, part in zip(keys[1:], parts[1:], strict=True):
        if (low := part.min()) < 0:
            raise ValueError(f"`prediction[{key!r}]` must be a variance, 0 or above; got {low}.")
    if data is not None:
        inputs = finite_vector("data[0]", data[0])
        targets = finite_vector("data[1]", data[1], len(inputs))
    truth = None if truth is None else finite_vector("truth", truth, len(x))
    ax = new_axes(ax, (5.2, 3.4))
    sort = np.argsort(x, kind="stable")
    x, mean, aleatoric, epistemic = (part[sort] for part in (x, *parts))
    ax.plot(x, mean, color=COLORS[0], lw=2, label="mean", zorder=3)
    for name, variance, color, whiteness, hatch, ls, order in (
        ("total", aleatoric + epistemic, COLORS[4], 0.75, "....", "--", 1.5),
        ("epistemic", epistemic, COLORS[0], 0.55, None, "-", 2),
    ):
        edges = mean - 2 * np.sqrt(variance), mean + 2 * np.sqrt(variance)
        look = {"facecolor": pale(color, whiteness), "edgecolor": pale(color, 0.35), "lw": 0}
        ax.fill_between(x, *edges, label=f"± 2 {name}", zorder=order, hatch=hatch, **look)
        for edge in edges:
            ax.plot(x, edge, color=color, ls=ls, lw=0.9, zorder=2.5)
    if truth is not None:
        ax.plot(x, truth[sort], color="black", ls=":", lw=1.8, label="truth", zorder=4)
    if data is not None:
        ax.scatter(inputs, targets, s=14, color="black", marker="x", lw=1, label="data", zorder=5)
    ax.set(xlim=(x[0], x[-1]) if x[-1] > x[0] else None, xlabel="x", ylabel="y")
    ax.legend(**SIDE_LEGEND)
    return tidy(ax)
