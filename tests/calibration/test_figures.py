"""The figure of a report shows what the table says."""

import dataclasses
import itertools

import numpy as np
import pytest
from matplotlib.text import Annotation, Text

from tfp_ibnn import metrics
from tfp_ibnn.likelihoods import Point
from tfp_ibnn.plots import COLORS

pytestmark = pytest.mark.once


def marks(ax):
    """Return the place of each mark with an error bar, with the length of the bar."""
    found = []
    for container in ax.containers:
        line, _, (bar,) = container.lines
        (low, high) = bar.get_segments()[0][:, 1]
        found.append((line.get_xdata()[0], line.get_ydata()[0], (high - low) / 2))
    return found


def names_of(ax):
    return [child for child in ax.get_children() if isinstance(child, Annotation)]


def test_a_mark_per_candidate_with_its_margin(handmade):
    ax, _ = handmade.plot().axes
    nll = np.array([candidate.nll for candidate in handmade.candidates])
    difference = nll - nll[nll.mean(axis=1).argmin()]
    errors = difference.std(axis=1, ddof=1) / np.sqrt(nll.shape[1])
    passes = [1, 1, 1, 3, 3]
    expected = np.stack([passes, nll.mean(axis=1), errors], axis=1)
    np.testing.assert_allclose(marks(ax), expected, atol=1e-6)
    (front,) = [line for line in ax.lines if line.get_drawstyle() == "steps-post"]
    assert {*front.get_ydata()} <= {*nll.mean(axis=1)}
    assert front.get_ydata()[-1] == nll.mean(axis=1).min()


def test_the_front_is_named_and_no_name_covers_another(handmade):
    ax, _ = handmade.plot().axes
    names = names_of(ax)
    texts = [name.get_text().replace("\n", " ") for name in names]
    chosen = "chosen: ensemble + temperature"
    assert texts == [chosen, "as it is", "as it is + temperature"]
    blue, orange, *_ = COLORS
    assert [name.get_color() for name in names[:2]] == [blue, orange]
    ax.figure.canvas.draw()
    boxes = [Text.get_window_extent(name) for name in names]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_what_is_far_worse_is_a_caret_at_the_top(handmade):
    far = handmade.candidates[2]
    far.nll = far.nll + 100.0
    ax, _ = handmade.plot().axes
    assert len(marks(ax)) == len(handmade.candidates) - 1
    (caret,) = [line for line in ax.lines if line.get_marker() == "^"]
    assert caret.get_ydata() == ax.get_ylim()[1] < 10


def test_reliability_before_and_after(handmade):
    _, ax = handmade.plot().axes
    joined = [line for line in ax.lines if line.get_linewidth() == 2 and len(line.get_xdata())]
    eces = []
    for line, candidate in zip(joined, (handmade.candidates[0], handmade.chosen), strict=True):
        diagram = metrics.reliability(candidate.prediction, handmade.y, 10)
        is_sure = diagram.count >= 10
        np.testing.assert_allclose(line.get_xdata(), diagram.confidence[is_sure])
        np.testing.assert_allclose(line.get_ydata(), diagram.accuracy[is_sure])
        ece = metrics.expected_calibration_error(candidate.prediction, handmade.y)
        eces.append(f"{ece:.3f}")
    assert ax.get_title() == f"ECE {eces[0]} → {eces[1]}"
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["before: as it is", "after: ensemble + temperature"]


def test_one_candidate_is_before_and_after(handmade):
    kept = dataclasses.replace(handmade, candidates=handmade.candidates[:1])
    left, right = kept.plot().axes
    assert [name.get_text() for name in names_of(left)] == ["chosen: as it is"]
    assert left.get_title() == "NLL, unchanged"
    (label,) = [text.get_text() for text in right.get_legend().get_texts()]
    assert label == "before and after: as it is"


def test_coverage_of_a_regression(handmade):
    output = Point(1)
    rng = np.random.default_rng(0)
    y = rng.normal(size=(60, 1))
    for candidate, variance in zip(handmade.candidates, (0.2, 0.9, 0.3, 0.4, 1.0), strict=True):
        candidate.prediction = np.stack([np.zeros_like(y), np.full_like(y, variance)], axis=1)
        candidate.nll = output.nll(candidate.prediction, y)
    report = dataclasses.replace(handmade, output=output, y=y)
    ax = report.plot().axes[1]
    before, after = [line for line in ax.lines if len(line.get_xdata()) > 2]
    z = 1.6448536  # of a central interval of 90 %
    for line, variance in ((before, 0.2), (after, report.chosen.prediction[0, 1, 0])):
        inside = np.mean(np.abs(y) <= z * np.sqrt(variance))
        np.testing.assert_allclose(line.get_ydata()[90], inside - 0.9, atol=1e-6)
    assert ax.get_title().startswith("90 % intervals hold ")
