"""Names of points, placed so that they cover neither each other nor what is drawn."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

_GAP = 6.0  # points between a mark and its name
_NEAR = 10.0  # points up to which no line leads from a name to its mark
_MARK = 4.0  # half the size of a mark, in points
_STEPS = 40  # of half a line each, in which a name moves away


class Label(NamedTuple):
    """The name of a point.

    Args:
        text: the name.
        x: its place, as data.
        y: its place, as data.
        style: further arguments of Matplotlib's `annotate`.
    """

    text: str
    x: float
    y: float
    style: dict[str, Any]


def place_labels(
    ax: Axes, labels: Sequence[Label], points: np.ndarray, boxes: Iterable[Bbox] = ()
) -> list[Annotation]:
    """Write names beside points, where nothing else is; those far away get a thin line.

    Call it last: the limits of the axis and the layout of the figure must not change any more.

    Args:
        ax: the axis.
        labels: the names; the first ones get the best places.
        points: all marks that no name may cover, (marks, 2), as data.
        boxes: of other things that no name may cover, in pixels.

    Returns:
        The names in Matplotlib's form.
    """
    ax.figure.draw_without_rendering()  # the layout moves the axis
    pixels_per_point = ax.figure.dpi / 72
    room = ax.get_window_extent()
    taken = list(boxes)
    for x, y in ax.transData.transform(points):
        size = _MARK * pixels_per_point
        taken.append(Bbox.from_extents(x - size, y - size, x + size, y + size))
    written = []
    for label in labels:
        annotation = _annotation(ax, label)
        box = Text.get_window_extent(annotation)  # without the line
        center = ax.transData.transform((label.x, label.y))
        offset = _free_offset(center, box, room, taken, _GAP * pixels_per_point)
        taken.append(_box_at(center + offset, box))
        annotation.xyann = tuple(offset / pixels_per_point)
        distance = np.maximum(np.abs(offset) - [box.width / 2, box.height / 2], 0)
        is_near = np.hypot(*distance) <= _NEAR * pixels_per_point
        annotation.arrow_patch.set_visible(not is_near)
        written.append(annotation)
    return written


def _annotation(ax: Axes, label: Label) -> Annotation:
    annotation = ax.annotate(
        label.text,
        (label.x, label.y),
        xytext=(0, 0),
        textcoords="offset points",
        ha="center",
        va="center",
        arrowprops={"arrowstyle": "-", "color": "0.4", "lw": 0.8, "shrinkA": 1, "shrinkB": 3},
        **label.style,
    )
    annotation.set_in_layout(False)
    annotation.set_path_effects([withStroke(linewidth=3, foreground="white")])
    return annotation


def _free_offset(
    center: np.ndarray, box: Bbox, room: Bbox, taken: Sequence[Bbox], gap: float
) -> np.ndarray:
    """Return how far a name is from its mark, in pixels: the nearest free place, or the first.

    Args:
        center: of the mark.
        box: as large as the name.
        room: what the name must stay in.
        taken: what it must not cover.
        gap: between the mark and the name.
    """
    for offset in _offsets(box, gap):
        moved = _box_at(center + offset, box)
        is_inside = room.x0 <= moved.x0 and moved.x1 <= room.x1
        is_inside = is_inside and room.y0 <= moved.y0 and moved.y1 <= room.y1
        if is_inside and not any(moved.overlaps(other) for other in taken):
            return offset
    return next(_offsets(box, gap))


def _offsets(box: Bbox, gap: float) -> Iterator[np.ndarray]:
    """Yield places for a name, the nearest first: right, left, above and below of its mark."""
    beside = gap + box.width / 2
    above = gap + box.height / 2
    shifts = np.arange(_STEPS) * box.height / 2
    for shift, sign in itertools.product(shifts, (1, -1)):
        yield np.array([beside, sign * shift])
        yield np.array([-beside, sign * shift])
        yield np.array([0.0, sign * (above + shift)])


def _box_at(center: np.ndarray, box: Bbox) -> Bbox:
    """Return a box of the same size around another center."""
    x, y = center
    return Bbox.from_bounds(x - box.width / 2, y - box.height / 2, box.width, box.height)
