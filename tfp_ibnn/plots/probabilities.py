"""The probabilities of classes for single inputs, draw by draw."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from scipy.ndimage import gaussian_filter1d
from scipy.special import entr

from tfp_ibnn.plots.style import COLORS, LEGEND, pale, tidy
from tfp_ibnn.prediction import MonteCarlo

_MOST_INPUTS = 12
_MOST_CLASSES = 16
_TOLERANCE = 1e-3  # how far probabilities may sum from one
_HALF_WIDTH = 0.38  # of a cloud of draws, where the places of two classes are 1 apart
_BINS = 50  # of the probability, in which draws are counted
_GOLDEN = (5**0.5 - 1) / 2  # multiples of it, less their whole part, are spread evenly
_LONG_NAME = 3  # letters; longer ones are slanted
_TRUE = {"facecolor": pale(COLORS[1], 0.86), "edgecolor": "none"}


class _Method(NamedTuple):
    """What one model predicts.

    Attributes:
        name: for the heading; "" for a model alone.
        samples: (inputs, draws, classes), the probabilities.
    """

    name: str
    samples: np.ndarray


class _Classes(NamedTuple):
    """The classes that are drawn.

    Attributes:
        numbers: which of all.
        names: one for each of these.
        total: how many there are.
    """

    numbers: np.ndarray
    names: list[str]
    total: int


def draws(
    predictions: Any,
    x: Any = None,
    labels: Any = None,
    *,
    images: Any = None,
    class_names: Sequence[str] | None = None,
) -> Figure:
    """Draw the probability of each class for a few inputs: a dot for each draw of the posterior.

    A cloud in one place away from 0 and 1 is noise in the data (aleatoric); a tall or split one,
    draws that disagree (epistemic). The line across is the mean, which is the prediction, and the
    true class has a shaded column. Above are the entropy of the mean, and its epistemic part.

    Args:
        predictions: a `MonteCarlo` of a classifier, which predicts `x`; what its `predict` returns
            with `return_samples=True`; or an array (inputs, draws, classes). Of several models, a
            mapping of names to these: each has a column. At most 12 inputs.
        x: the inputs; they are drawn too if they are images.
        labels: (inputs,), the true classes, None in place of one that is unknown; or one-hot.
        images: (inputs, height, width), or that with a last axis of 1 or 3: pictures to draw in
            place of `x`. False draws none. Defaults to `x`, if it has such a shape.
        class_names: one per class; their numbers by default. Of more than 16 classes, the most
            probable ones are drawn.

    Returns:
        A new figure, with a row per input.

    Raises:
        ValueError: if there are no draws of probabilities, or arrays do not go together.

    Example:
        >>> import numpy as np, tfp_ibnn.plots as plots
        >>> samples = np.random.default_rng(0).dirichlet([5, 2, 1], size=(2, 64))
        >>> figure = plots.draws(samples, labels=[0, None], class_names=["boot", "bag", "dress"])
    """
    methods = _methods(predictions, x)
    count, _, total = methods[0].samples.shape
    labels = _checked_labels(labels, count, total)
    pictures = _pictures(x, images, count)
    classes = _shown_classes(methods, labels, class_names)
    figure, grid = _new_figure(methods, classes, pictures is not None)
    for number, row in enumerate(grid):
        if pictures is not None:
            _draw_picture(row[0], pictures[number])
        for method, ax in zip(methods, row[-len(methods) :], strict=True):
            samples = method.samples[number]
            _draw_clouds(ax, samples[:, classes.numbers], classes, labels[number])
            _write_uncertainty(ax, samples)
        if pictures is None and count > 1:
            row[0].set_title(f"input {number}", fontsize=9, loc="left", pad=3)
    _name_axes(grid[:, -len(methods) :], methods, classes)
    is_labelled = any(label is not None for label in labels)
    figure.legend(handles=_handles(is_labelled), loc="outside lower center", ncols=3, **LEGEND)
    return figure


def _methods(predictions: Any, x: Any) -> list[_Method]:
    """Return the probabilities of each model, all of the same inputs and classes."""
    is_of_several = isinstance(predictions, Mapping) and not {"mean", "samples"} & set(predictions)
    by_name = predictions if is_of_several else {"": predictions}
    methods = [_Method(str(name), _samples_of(one, x)) for name, one in by_name.items()]
    shapes = {method.samples.shape[::2] for method in methods}
    if len(shapes) != 1:
        raise ValueError(
            "`predictions` must be of one model or more, all of the same inputs and classes; got "
            f"(inputs, classes) = {sorted(shapes)}."
        )
    return methods


def _samples_of(prediction: Any, x: Any) -> np.ndarray:
    """Return the probabilities (inputs, draws, classes) of one model, or raise."""
    if isinstance(prediction, MonteCarlo):
        prediction = _predicted(prediction, x)
    if isinstance(prediction, Mapping):
        if "samples" not in prediction:
            raise ValueError(
                "`predictions` must have the key 'samples', as those of MonteCarlo(..., "
                f"return_samples=True) have; got {[*prediction]}."
            )
        prediction = prediction["samples"]
    samples = np.asarray(prediction)
    if samples.dtype.kind in "fiub" and samples.ndim == 3 and samples.size:
        _check_number(samples)
        samples = samples.astype("float64")
        if samples.shape[-1] == 1:  # of class 1 of two
            samples = np.concatenate([1 - samples, samples], axis=-1)
        distance = np.abs(samples.sum(axis=-1) - 1)
        if np.all(distance < _TOLERANCE) and samples.min() > -_TOLERANCE:
            return np.clip(samples, 0, 1)  # rounding may leave 1.0000001
    raise ValueError(
        "`predictions` must be a MonteCarlo of a classifier, its predictions with "
        "return_samples=True, or probabilities (inputs, draws, classes) that sum to 1; got "
        f"{prediction!r:.200}."
    )


def _predicted(model: MonteCarlo, x: Any) -> Any:
    """Return what a model predicts for the inputs, with all draws."""
    if x is None:
        raise ValueError("`x` is missing: `predictions` is a MonteCarlo, which needs inputs.")
    _check_number(keras.tree.flatten(x)[0])
    if not model.return_samples:
        model = type(model)(model.inner, **{**model.options(), "return_samples": True})
    return model.predict(x, verbose=0)


def _check_number(inputs: Any) -> None:
    """Raise for more inputs than a figure has rows for."""
    shape = getattr(inputs, "shape", ())
    if len(shape) and shape[0] > _MOST_INPUTS:
        raise ValueError(
            f"A figure has at most {_MOST_INPUTS} inputs; got {shape[0]}. Choose some, such as the "
            "first four: x[:4], or prediction['samples'][:4]."
        )


def _checked_labels(labels: Any, count: int, classes: int) -> list[int | None]:
    """Return the true class of each input, None where it is unknown, or raise."""
    if labels is None:
        return [None] * count
    labels = np.asarray(labels, dtype=object)
    if labels.ndim == 2 and labels.shape[1] == classes:
        labels = labels.argmax(axis=-1)
    elif labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    known = [label for label in labels.ravel() if label is not None]
    if labels.shape != (count,) or not np.isin(known, np.arange(classes)).all():
        raise ValueError(
            f"`labels` must be {count} whole numbers from 0 to {classes - 1}, or None where the "
            f"class is unknown, or one-hot; got {labels.tolist()!r:.100}."
        )
    return [None if label is None else int(label) for label in labels]


def _pictures(x: Any, images: Any, count: int) -> np.ndarray | None:
    """Return the pictures to draw, scaled to [0, 1], or None if there are none."""
    if images is False:
        return None
    if images is None:
        if not _are_images(x, count):
            return None
        images = x
    images = np.asarray(images)
    if not _are_images(images, count):
        raise ValueError(
            f"`images` must have the shape ({count}, height, width), perhaps with a last axis of 1 "
            f"or 3; got {np.shape(images)}."
        )
    pictures = images.astype("float64")
    if pictures.shape[-1] == 1 and pictures.ndim == 4:
        pictures = pictures[..., 0]
    pictures = pictures - pictures.min()
    return pictures / (pictures.max() or 1.0)


def _are_images(x: Any, count: int) -> bool:
    """Return whether this is an array of as many images."""
    shape = getattr(x, "shape", ())
    if len(shape) == 4 and shape[-1] not in (1, 3):
        return False
    return len(shape) in (3, 4) and shape[0] == count


def _shown_classes(
    methods: list[_Method], labels: list[int | None], class_names: Sequence[str] | None
) -> _Classes:
    """Return the classes to draw: all, or of many those that are true or most probable."""
    total = methods[0].samples.shape[-1]
    names = [str(name) for name in (range(total) if class_names is None else class_names)]
    if len(names) != total:
        raise ValueError(
            f"`class_names` must have {total} names; got {len(names)}: {names!r:.100}."
        )
    highest = np.max([method.samples.mean(axis=1).max(axis=0) for method in methods], axis=0)
    highest[[label for label in labels if label is not None]] = 2.0  # above all others
    by_rank = np.argsort(-highest, kind="stable")
    numbers = np.sort(by_rank[:_MOST_CLASSES])
    return _Classes(numbers, [names[number] for number in numbers], total)


def _new_figure(
    methods: list[_Method], classes: _Classes, has_pictures: bool
) -> tuple[Figure, np.ndarray]:
    """Return a figure with a row of axes per input: its picture, and one for each model."""
    rows = len(methods[0].samples)
    is_alone = len(methods) == 1
    width = (0.46 if is_alone else 0.3) * len(classes.numbers)
    widths = [max(width, 3.2 if is_alone else 2.2)] * len(methods)
    if has_pictures:
        widths = [1.05, *widths]
    figure, grid = plt.subplots(
        rows,
        len(widths),
        figsize=(sum(widths) + 0.8, 1.4 * rows + 0.8),
        width_ratios=widths,
        squeeze=False,
        layout="constrained",
    )
    return figure, grid


def _draw_picture(ax: Axes, picture: np.ndarray) -> None:
    ax.imshow(picture, cmap="gray", vmin=0, vmax=1)
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set(color="0.7", linewidth=0.8)


def _draw_clouds(ax: Axes, samples: np.ndarray, classes: _Classes, label: int | None) -> None:
    """Draw a cloud of dots for each class, with a line at its mean."""
    size = np.clip(64 / len(samples) ** 0.5, 1.5, 16)  # of a dot, in points squared
    outline = [withStroke(linewidth=3.2, foreground="white")]
    for place, number in enumerate(classes.numbers):
        is_true = number == label
        if is_true:
            ax.axvspan(place - 0.5, place + 0.5, lw=0, zorder=0, **_TRUE)
        values = samples[:, place]
        ax.scatter(
            place + _HALF_WIDTH * _offsets(values),
            values,
            s=size,
            color=COLORS[1] if is_true else COLORS[0],
            alpha=0.5,
            linewidths=0,
            zorder=3,
            clip_on=False,
            rasterized=True,
        )
        ax.hlines(
            values.mean(),
            place - _HALF_WIDTH,
            place + _HALF_WIDTH,
            color="black",
            lw=1.6,
            zorder=4,
            path_effects=outline,
        )
    ax.set(xlim=(-0.6, len(classes.numbers) - 0.4), ylim=(-0.03, 1.03), yticks=(0, 0.5, 1))
    tidy(ax, "y")


def _offsets(values: np.ndarray) -> np.ndarray:
    """Return how far to a side each dot stands, from -1 to 1: wide where there are many."""
    counts, edges = np.histogram(values, _BINS, (0, 1))
    density = gaussian_filter1d(counts.astype("float64"), 1.0, mode="constant")
    centers = (edges[:-1] + edges[1:]) / 2
    width = np.interp(values, centers, density)
    ranks = np.argsort(np.argsort(values, kind="stable"))
    evenly = 2 * ((0.5 + ranks * _GOLDEN) % 1) - 1
    return evenly * np.sqrt(width / width.max())


def _write_uncertainty(ax: Axes, samples: np.ndarray) -> None:
    """Write the entropy of the mean, and how much of it is epistemic, above an axis."""
    entropy = entr(samples.mean(axis=0)).sum()
    aleatoric = entr(samples).sum(axis=-1).mean()
    epistemic = max(0.0, entropy - aleatoric)
    text = f"entropy {entropy:.2f}, epistemic {epistemic:.2f}"
    ax.set_title(text, fontsize=8, loc="right", color="0.35", pad=3)


def _name_axes(panels: np.ndarray, methods: list[_Method], classes: _Classes) -> None:
    """Name the classes below the last row, the models above the first, and the left axes."""
    for row, axes in enumerate(panels):
        for ax in axes:
            _name_classes(ax, classes, is_last=row == len(panels) - 1)
        for ax in axes[1:]:
            ax.tick_params(labelleft=False)
        axes[0].set_ylabel("probability", fontsize=9)
    for method, ax in zip(methods, panels[0], strict=True):
        if method.name:
            ax.set_title(f"{method.name}\n", fontsize=11, pad=3)  # above the uncertainty


def _name_classes(ax: Axes, classes: _Classes, is_last: bool) -> None:
    """Set a tick for each class, with its name if there is no row below."""
    count = len(classes.numbers)
    slanted = {}
    if max(map(len, classes.names)) > _LONG_NAME:
        slanted = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
    ax.set_xticks(range(count), classes.names, **slanted)
    ax.tick_params(labelbottom=is_last)
    if is_last and count < classes.total:
        ax.set_xlabel(f"{count} of {classes.total} classes", fontsize=9)


def _handles(is_labelled: bool) -> list[Any]:
    """Return the marks of the legend."""
    handles: list[Any] = [
        Line2D([], [], ls="", marker="o", ms=4, color=COLORS[0], alpha=0.7, label="a draw"),
        Line2D([], [], color="black", lw=1.6, label="mean of the draws"),
    ]
    if is_labelled:
        handles.append(Patch(label="true class", **_TRUE))
    return handles
