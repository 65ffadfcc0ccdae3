import matplotlib.pyplot as plt
import numpy as np
import pytest

from tfp_ibnn import plots
from tfp_ibnn.plots.style import pale

pytestmark = pytest.mark.once

LIMITS = ((-4.0, 4.0), (-3.0, 3.0))


def sigmoid(points):
    """Class 1 right of x = 1."""
    return 1 / (1 + np.exp(1 - points[:, :1]))


def three(points):
    score = np.exp(points @ np.array([[1.0, -1.0, 0.0], [1.0, 1.0, -1.5]]))
    return score / score.sum(axis=1, keepdims=True)


def parts(points):
    mean = np.concatenate([1 - sigmoid(points), sigmoid(points)], axis=1)
    return {"mean": mean, "epistemic": np.abs(points[:, 1:])}


def dots(ax, count):
    """Positions, sizes and classes of the first `count` scatters."""
    found = ax.collections[:count]
    where = np.concatenate([np.asarray(dots.get_offsets()) for dots in found])
    size = np.concatenate([dots.get_sizes() for dots in found])
    kind = np.concatenate([np.full(len(dots.get_offsets()), k) for k, dots in enumerate(found)])
    return where, size, kind


def lines(ax):
    return [
        path.vertices
        for contour in ax.collections
        if hasattr(contour, "levels")
        for path in contour.get_paths()
    ]


def test_each_grid_point_has_the_marker_of_its_class():
    ax = plots.decision_boundary(three, limits=LIMITS, resolution=12)
    where, _, kind = dots(ax, 3)
    assert len(where) == 144
    np.testing.assert_array_equal(kind, three(where).argmax(axis=1))
    assert len({dots.get_paths()[0].vertices.tobytes() for dots in ax.collections[:3]}) == 3


def test_dots_grow_with_the_entropy():
    ax = plots.decision_boundary(sigmoid, limits=LIMITS, resolution=12)
    where, size, _ = dots(ax, 2)
    p = sigmoid(where)[:, 0]
    entropy = -p * np.log(p) - (1 - p) * np.log(1 - p)
    share = size / size.max()
    expected = 0.03 + 0.97 * entropy / np.log(2)
    np.testing.assert_allclose(share, expected / expected.max(), rtol=1e-4)


def test_dots_grow_with_the_part_that_is_named():
    ax = plots.decision_boundary(parts, limits=LIMITS, uncertainty="epistemic", maximum=6.0)
    where, size, _ = dots(ax, 2)
    expected = 0.03 + 0.97 * np.abs(where[:, 1]) / 6
    np.testing.assert_allclose(size / size.max(), expected / expected.max(), rtol=1e-4)


def test_an_entropy_that_is_not_given_is_that_of_the_mean():
    given = plots.decision_boundary(parts, limits=LIMITS)
    np.testing.assert_allclose(
        dots(given, 2)[1], dots(plots.decision_boundary(sigmoid, limits=LIMITS), 2)[1], rtol=1e-4
    )


def test_shade_pales_with_the_uncertainty():
    ax = plots.decision_boundary(sigmoid, limits=LIMITS, style="shade", resolution=30)
    mesh = ax.collections[0].get_array().reshape(30, 30, -1)[0, :, :3]
    p = sigmoid(np.linspace(-4, 4, 30)[:, None])[:, 0]
    entropy = -p * np.log(p) - (1 - p) * np.log(1 - p)
    white = 1 - 0.75 * (1 - 0.9 * entropy / np.log(2))
    expected = np.where(
        (p > 0.5)[:, None], pale(plots.COLORS[1], white), pale(plots.COLORS[0], white)
    )
    np.testing.assert_allclose(mesh, expected, atol=1e-5)


@pytest.mark.parametrize("style", ["size", "shade"])
def test_the_line_is_where_both_classes_have_half(style):
    ax = plots.decision_boundary(sigmoid, limits=LIMITS, style=style)
    (line,) = lines(ax)
    np.testing.assert_allclose(line[:, 0], 1, atol=0.01)
    assert np.ptp(line[:, 1]) == pytest.approx(6)


def test_three_classes_meet_in_lines_between_the_first_two():
    ax = plots.decision_boundary(three, limits=LIMITS, style="shade")
    points = np.concatenate([vertices for vertices in lines(ax) if len(vertices)])
    ordered = np.sort(three(points), axis=1)
    np.testing.assert_allclose(ordered[:, 2], ordered[:, 1], atol=0.02)


def test_no_line_where_one_class_wins_everywhere():
    ax = plots.decision_boundary(lambda points: np.full((len(points), 1), 0.9), limits=LIMITS)
    assert lines(ax) == []


def test_training_points_lie_on_top_by_class():
    x, labels = np.array([[0.0, 0.0], [1.0, 1.0], [2.0, -1.0]]), np.array([0, 1, 1])
    ax = plots.decision_boundary(sigmoid, x, labels)
    first, second = ax.collections[-2:]
    np.testing.assert_allclose(first.get_offsets(), x[:1])
    np.testing.assert_allclose(second.get_offsets(), x[1:])
    assert first.get_zorder() > 2
    assert ax.get_xlim() == pytest.approx((-0.2, 2.2))
    assert ax.get_ylim() == pytest.approx((-1.2, 1.2))


def test_one_hot_labels_are_labels():
    x = np.array([[0.0, 0.0], [1.0, 1.0]])
    for labels in ([0, 1], [[0], [1]], [[1, 0], [0, 1]]):
        ax = plots.decision_boundary(sigmoid, x, labels)
        np.testing.assert_allclose(ax.collections[-1].get_offsets(), x[1:])


def test_points_without_labels_have_no_class():
    ax = plots.decision_boundary(sigmoid, np.array([[0.0, 0.0], [1.0, 1.0]]))
    assert len(ax.collections[-1].get_offsets()) == 2


def test_the_legend_gives_the_scale_of_the_uncertainty():
    ax = plots.decision_boundary(parts, limits=LIMITS, uncertainty="epistemic", maximum=6.0)
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == ["class 0", "class 1", "p = 0.5", "epistemic (size)", "0", "3", "6"]
    sizes = [line.get_markersize() for line in ax.get_legend().get_lines()[-3:]]
    assert sizes == sorted(sizes)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("$x_1$", "$x_2$")
    assert plots.decision_boundary(sigmoid, limits=LIMITS, legend=False).get_legend() is None


def test_predict_is_called_with_float32_on_the_grid():
    seen = []

    def predict(points):
        seen.append(points)
        return sigmoid(points)

    plots.decision_boundary(predict, limits=LIMITS, resolution=5)
    assert seen[0].dtype == np.float32
    np.testing.assert_allclose(np.unique(seen[0][:, 0]), np.linspace(-4, 4, 5))


def test_it_draws_where_it_is_told():
    given = plt.subplots()[1]
    ax = plots.decision_boundary(sigmoid, limits=LIMITS, ax=given, title="name")
    assert ax is given
    assert ax.get_title() == "name"


X = np.zeros((3, 2))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "`limits` must be given"),
        ({"limits": ((3, -3), (0, 1))}, r"`limits` must be \(\(left"),
        ({"limits": (0, 1)}, r"`limits` must have the shape \(2, 2\)"),
        ({"x": np.zeros((3, 4))}, r"`x` must have the shape \(points, 2\).*got \(3, 4\)"),
        ({"x": np.full((3, 2), np.nan)}, "`x` must be finite; got nan"),
        ({"x": np.zeros((0, 2))}, "not be empty"),
        ({"x": "abc"}, "`x` must be an array of numbers"),
        ({"x": X, "labels": np.eye(3)}, r"`labels` must have the shape \(3, 2\)"),
        ({"x": X, "labels": [0, 1]}, "`labels` must hold 3 numbers"),
        ({"x": X, "labels": [0, 1, 2]}, "`labels` must be whole numbers from 0 to 1"),
        ({"x": X, "labels": [0, 0.5, 1]}, "`labels` must be whole numbers"),
        ({"labels": [0], "limits": LIMITS}, "`labels` go with `x`"),
        ({"style": "colour", "limits": LIMITS}, "`style` must be one of 'size', 'shade'"),
        ({"uncertainty": "epistemic", "limits": LIMITS}, "`uncertainty` must be one of 'entropy'"),
        (
            {"resolution": 1, "limits": LIMITS},
            "`resolution` must .* at least 2; got 1",
        ),
        ({"resolution": 0, "limits": LIMITS}, "`resolution` must be a whole number"),
        ({"maximum": 0, "limits": LIMITS}, "`maximum` must be above 0; got 0"),
        ({"predict": lambda p: {"entropy": p[:, 0]}, "limits": LIMITS}, "the key 'mean'"),
        ({"predict": lambda p: np.nan * p, "limits": LIMITS}, "must be finite"),
        ({"predict": lambda p: 3 + p[:, :1], "limits": LIMITS}, "must be probabilities"),
        ({"predict": lambda p: sigmoid(p)[:5], "limits": LIMITS}, r"must have the shape \(1296, "),
    ],
)
def test_bad_input_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        plots.decision_boundary(**{"predict": sigmoid, **arguments})
    assert plt.get_fignums() == []
