"""Predicted classes over the plane, and how uncertain they are."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from scipy.ndimage import zoom
from scipy.special import entr

from tfp_ibnn._core import checks
from tfp_ibnn.metrics.detection import finite_vector
from tfp_ibnn.plots.style import SIDE_LEGEND, dots, new_axes, pale

_FINE = 300  # points along each axis of the grid on which the boundary is found, at least
_TOLERANCE = 1e-3  # how far probabilities may sum from one


class _Style(NamedTuple):
    """How uncertainty is drawn: grid points along each axis, and ink at the ends of the scale."""

    resolution: int
    ink: tuple[float, float]  # where the model is certain, and at the largest uncertainty


_STYLES = {"size": _Style(36, (0.03, 1.0)), "shade": _Style(120, (1.0, 0.1))}


class _Surface(NamedTuple):
    """Predictions on a grid.

    Attributes:
        across: (count,), the horizontal coordinates.
        up: (count,), the vertical ones.
        points: (count * count, 2), the grid, row by row.
        probabilities: (count * count, classes).
        uncertainty: (count * count,).
    """

    across: np.ndarray
    up: np.ndarray
    points: np.ndarray
    probabilities: np.ndarray
    uncertainty: np.ndarray

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.probabilities.shape[1]


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
    """Draw the predicted class over the plane as color, its uncertainty as size or shade.

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

    Returns:
        The axis.

    Raises:
        ValueError: if `predict` does not return probabilities, or data do not go together.

    Example:
        >>> import numpy as np, tfp_ibnn.plots as plots
        >>> predict = lambda points: 1 / (1 + np.exp(-points[:, :1]))
        >>> ax = plots.decision_boundary(predict, limits=((-4, 4), (-3, 3)), title="sigmoid")
    """
    checks.one_of("style", style, tuple(_STYLES))
    if x is not None:
        x = _array("x", x, ("points", 2))
    elif labels is not None:
        raise ValueError("`labels` go with `x`; got labels only. Give the points (N, 2) as `x`.")
    if resolution is None:
        resolution = _STYLES[style].resolution
    count = checks.positive_integer("resolution", resolution, least=2)
    surface = _surface(predict, _limits(limits, x), count, uncertainty)
    if labels is not None:
        labels = _checked_labels(labels, len(x), surface.classes)
    if maximum is None:
        maximum = _largest(surface, uncertainty)
    maximum = checks.positive("maximum", maximum)
    ax = new_axes(ax, (5.2, 3.8) if legend else (3.9, 3.8))
    ink = np.interp(surface.uncertainty / maximum, (0, 1), _STYLES[style].ink)
    if style == "size":
        _draw_dots(ax, surface, ink)
    else:
        _draw_shades(ax, surface, ink)
    _draw_lines(ax, surface)
    _draw_data(ax, x, labels)
    ax.set(
        xlim=surface.across[[0, -1]],
        ylim=surface.up[[0, -1]],
        title=title,
        xlabel="$x_1$",
        ylabel="$x_2$",
    )
    if legend:
        _draw_legend(ax, style, surface.classes, uncertainty, maximum)
    return ax


def _surface(predict: Any, limits: np.ndarray, count: int, uncertainty: str) -> _Surface:
    """Return predictions on a grid of count by count points."""
    (left, right), (bottom, top) = limits
    across = np.linspace(left, right, count)
    up = np.linspace(bottom, top, count)
    x, y = np.meshgrid(across, up)
    points = np.stack([x.ravel(), y.ravel()], axis=-1)
    probabilities, doubt = _evaluate(predict, points.astype("float32"), uncertainty)
    return _Surface(across, up, points, probabilities, doubt)


def _largest(surface: _Surface, uncertainty: str) -> float:
    """Return the uncertainty that is drawn as the largest."""
    if uncertainty == "entropy":
        return np.log(surface.classes)
    # A model that is certain everywhere has nothing to scale by.
    return surface.uncertainty.max() or 1.0


def _checked_labels(labels: Any, count: int, classes: int) -> np.ndarray:
    """Return labels (count,), of integers or one-hot, or raise."""
    if np.ndim(labels) == 2 and np.shape(labels)[1] > 1:
        one_hot = _array("labels", labels, (count, classes))
        labels = one_hot.argmax(axis=-1)
    labels = finite_vector("labels", labels, count)
    if not np.isin(labels, range(classes)).all():
        raise ValueError(
            f"`labels` must be whole numbers from 0 to {classes - 1}, or one-hot; got "
            f"{np.unique(labels)}."
        )
    return labels


def _draw_dots(ax: Axes, surface: _Surface, ink: np.ndarray) -> None:
    """Draw a dot at each point, in the color of its class, of an area by the ink."""
    box = ax.get_window_extent()
    spacing = min(box.width, box.height) / len(surface.across)
    largest = (0.74 * 72 / ax.figure.dpi * spacing) ** 2  # points squared
    winner = surface.probabilities.argmax(axis=-1)
    for k in range(surface.classes):
        is_won = winner == k
        look = dots(k)
        look["color"] = pale(look["color"], 0.45)
        x, y = surface.points[is_won].T
        ax.scatter(x, y, s=largest * ink[is_won], linewidths=0, **look)


def _draw_shades(ax: Axes, surface: _Surface, ink: np.ndarray) -> None:
    """Draw the color of each point's class, the paler the less ink there is."""
    winner = surface.probabilities.argmax(axis=-1)
    shades = np.zeros((len(winner), 3))
    for k in range(surface.classes):
        is_won = winner == k
        shades[is_won] = pale(dots(k)["color"], 1 - 0.75 * ink[is_won])
    count = len(surface.across)
    ax.pcolormesh(
        surface.across,
        surface.up,
        shades.reshape(count, count, 3),
        shading="nearest",
        rasterized=True,
    )


def _draw_lines(ax: Axes, surface: _Surface) -> None:
    """Draw where classes tie.

    On a coarse grid, lines that are drawn class by class would not meet where three classes do.
    """
    across = surface.across
    up = surface.up
    count = len(across)
    classes = surface.classes
    factor = math.ceil(_FINE / count)
    coarse = surface.probabilities.reshape(count, count, classes)
    fine = zoom(coarse, (factor, factor, 1), order=1)
    size = len(fine)
    x = np.linspace(across[0], across[-1], size)
    y = np.linspace(up[0], up[-1], size)
    lines = 1 if classes == 2 else classes
    for k in range(lines):
        others = np.delete(fine, k, axis=-1)
        highest = others.max(axis=-1, initial=0)
        lead = fine[..., k] - highest
        if lead.min() < 0 < lead.max():
            ax.contour(
                x,
                y,
                lead,
                levels=[0.0],
                colors="black",
                linewidths=1.4,
            )


def _draw_data(ax: Axes, x: np.ndarray | None, labels: np.ndarray | None) -> None:
    """Draw training points, by class if there are labels."""
    if x is None:
        return
    edge = {"s": 24, "edgecolors": "black", "linewidths": 0.7, "zorder": 3}
    if labels is None:
        ax.scatter(*x.T, color="white", marker="o", **edge)
        return
    for k in np.unique(labels):
        ax.scatter(*x[labels == k].T, **dots(int(k)), **edge)


def _array(name: str, value: Any, shape: tuple[int | str, ...]) -> np.ndarray:
    """Return `value` as a finite float array, or raise; a word in `shape` is any size of 1 on."""
    try:
        x = np.asarray(value, dtype="float64")
    except (TypeError, ValueError):
        raise ValueError(f"`{name}` must be an array of numbers; got {value!r:.80}.") from None
    fits = x.ndim == len(shape)
    for size, wanted in zip(x.shape, shape, strict=False):
        is_any = isinstance(wanted, str)
        if size == 0 or not (is_any or size == wanted):
            fits = False
    if not fits:
        raise ValueError(
            f"`{name}` must have the shape ({', '.join(map(str, shape))}), and not be empty; got "
            f"{x.shape}."
        )
    nonfinite = np.argwhere(~np.isfinite(x)).tolist()
    if nonfinite:
        place = nonfinite[0]
        raise ValueError(
            f"`{name}` must be finite; got {x[tuple(place)]} at {place}, one of {len(nonfinite)}."
        )
    return x


def _limits(limits: Any, x: np.ndarray | None) -> np.ndarray:
    """Return [[left, right], [bottom, top]], those of the points `x` unless given."""
    if limits is not None:
        ends = _array("limits", limits, (2, 2))
        if np.any(ends[:, 0] >= ends[:, 1]):
            raise ValueError(
                "`limits` must be ((left, right), (bottom, top)), such as ((-3, 3), (-2, 2)); got "
                f"{limits!r}."
            )
        return ends
    if x is None:
        raise ValueError(
            "`limits` must be given without `x`: ((left, right), (bottom, top)), such as "
            "((-3, 3), (-2, 2))."
        )
    low = x.min(axis=0)
    high = x.max(axis=0)
    margin = np.where(high > low, 0.1 * (high - low), 1.0)
    return np.stack([low - margin, high + margin], axis=-1)


def _evaluate(predict: Any, points: np.ndarray, uncertainty: str) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities (M, classes) and uncertainty (M,)."""
    prediction = predict(points)
    if not isinstance(prediction, Mapping):
        prediction = {"mean": prediction}
    names = {"entropy", *prediction} - {"mean"}
    checks.one_of("uncertainty", uncertainty, sorted(names))
    if "mean" not in prediction:
        raise ValueError(
            f"`predict` must return a mapping with the key 'mean'; got {[*prediction]}."
        )
    mean = np.asarray(prediction["mean"])
    if mean.ndim == 2 and mean.shape[1] == 1:
        mean = np.concatenate([1 - mean, mean], axis=1)
    mean = _array("predict(points)", mean, (len(points), "classes"))
    distance = np.abs(mean.sum(axis=-1) - 1)
    is_bad = (distance > _TOLERANCE) | (mean.min(axis=-1) < 0)
    if is_bad.any():
        raise ValueError(
            "`predict(points)` must be probabilities (apply softmax to logits); got "
            f"{mean[is_bad][0]}."
        )
    if uncertainty not in prediction:
        return mean, entr(mean).sum(axis=-1)
    entry = f"predict(points)[{uncertainty!r}]"
    return mean, finite_vector(entry, prediction[uncertainty], len(points))


def _draw_legend(ax: Axes, style: str, classes: int, uncertainty: str, maximum: float) -> None:
    """Draw the markers of classes, the line where they tie, and the scale of the uncertainty."""
    handles: list[Any] = []
    for k in range(classes):
        handles.append(Line2D([], [], ls="", label=f"class {k}", **dots(k)))
    tie = "p = 0.5" if classes == 2 else "boundary"
    handles.append(Line2D([], [], color="black", lw=1.4, label=tie))
    handles.append(Patch(fill=False, lw=0, label=f"{uncertainty} ({style})"))
    for share in (0.0, 0.5, 1.0):
        label = f"{share * maximum:.2g}"
        ink = np.interp(share, (0, 1), _STYLES[style].ink)
        if style == "size":
            handles.append(_dot_of_legend(ink, label))
        else:
            handles.append(_shade_of_legend(ink, label))
    ax.legend(handles=handles, **SIDE_LEGEND)


def _dot_of_legend(ink: float, label: str) -> Line2D:
    return Line2D(
        [],
        [],
        ls="",
        color="0.4",
        marker="o",
        markersize=9 * ink**0.5,
        markeredgewidth=0,
        label=label,
    )


def _shade_of_legend(ink: float, label: str) -> Patch:
    return Patch(
        facecolor=pale("black", 1 - 0.75 * ink),
        edgecolor="0.6",
        lw=0.5,
        label=label,
    )
