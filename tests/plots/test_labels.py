"""Names of points cover nothing."""

import itertools

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from tfp_ibnn.plots.labels import Label, place_labels

pytestmark = pytest.mark.once


@pytest.fixture
def ax():
    figure, ax = plt.subplots(figsize=(5, 4), layout="constrained")
    yield ax
    plt.close(figure)


def test_names_of_close_points_are_apart_and_inside(ax):
    rng = np.random.default_rng(0)
    points = np.concatenate([[[0.98, 0.98], [0.02, 0.02]], rng.uniform(0.4, 0.6, size=(8, 2))])
    ax.set(xlim=(0, 1), ylim=(0, 1))
    labels = [Label(f"candidate {number}", *point, {}) for number, point in enumerate(points)]
    written = place_labels(ax, labels, points)
    ax.figure.canvas.draw()
    names = [Text.get_window_extent(text) for text in written]  # without the lines
    assert len(names) == 10
    assert not any(a.overlaps(b) for a, b in itertools.combinations(names, 2))
    room = ax.get_window_extent()
    for box in names:
        assert room.x0 <= box.x0 < box.x1 <= room.x1
        assert room.y0 <= box.y0 < box.y1 <= room.y1
        for point in ax.transData.transform(points):
            assert not box.contains(*point)


def test_only_a_far_name_has_a_line(ax):
    ax.set(xlim=(0, 1), ylim=(0, 1))
    point = np.array([[0.5, 0.5]])
    (near,) = place_labels(ax, [Label("near", 0.5, 0.5, {"fontsize": 9})], point)
    assert not near.arrow_patch.get_visible()
    x, y = ax.transData.transform((0.5, 0.5))
    wall = Bbox.from_bounds(x - 80, y - 40, 160, 80)
    (far,) = place_labels(ax, [Label("far", 0.5, 0.5, {})], point, [wall])
    assert far.arrow_patch.get_visible()
    assert not Text.get_window_extent(far).overlaps(wall)
