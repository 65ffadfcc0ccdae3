import matplotlib.pyplot as plt
import numpy as np
import pytest

from tfp_ibnn import plots

pytestmark = pytest.mark.once


def samples():
    return np.random.default_rng(0).dirichlet([4, 2, 1], size=300)


@pytest.mark.parametrize("kind", ["violin", "histogram"])
def test_a_line_across_is_the_mean(kind):
    ax = plots.class_distributions(samples(), kind=kind)
    segments = ax.collections[-1].get_segments()
    heights = [segment[0, 1] for segment in segments]
    np.testing.assert_allclose(heights, samples().mean(axis=0))
    assert [segment[:, 0].mean() for segment in segments] == pytest.approx([0, 1, 2])


def test_violins_reach_from_the_least_to_the_largest_draw():
    ax = plots.class_distributions(samples())
    for k, body in enumerate(ax.collections[:3]):
        heights = body.get_paths()[0].vertices[:, 1]
        assert heights.min() == pytest.approx(samples()[:, k].min())
        assert heights.max() == pytest.approx(samples()[:, k].max())


def test_bars_are_as_long_as_the_draws_are_many():
    ax = plots.class_distributions(samples(), kind="histogram")
    for k in range(3):
        bars = [bar for bar in ax.patches if bar.get_x() == pytest.approx(k - 0.4)]
        count = np.histogram(samples()[:, k], np.linspace(0, 1, 21))[0]
        filled = count > 0
        lengths = [bar.get_width() for bar in bars]
        np.testing.assert_allclose(lengths, 0.8 * count[filled] / count.max())
        np.testing.assert_allclose([bar.get_y() * 20 for bar in bars], np.flatnonzero(filled))


@pytest.mark.parametrize("kind", ["violin", "histogram"])
def test_only_the_true_class_is_hatched(kind):
    ax = plots.class_distributions(samples(), kind=kind, label=1, class_names=["a", "b", "c"])
    shapes = ax.collections[:3] if kind == "violin" else ax.patches
    hatched = [shape for shape in shapes if shape.get_hatch()]
    assert 0 < len(hatched) < len(shapes)
    if kind == "violin":
        assert hatched == [ax.collections[1]]
    else:
        assert {round(bar.get_x(), 6) for bar in hatched} == {0.6}
    assert [tick.get_fontweight() for tick in ax.get_xticklabels()] == ["normal", "bold", "normal"]


def test_draws_that_agree_make_a_flat_violin():
    ax = plots.class_distributions(np.tile([0.25, 0.75], (10, 1)))
    np.testing.assert_allclose(ax.collections[0].get_paths()[0].vertices[:, 1], 0.25)


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 1), (6, 5, 3)])
def test_the_image_is_drawn_beside(shape):
    image = np.random.default_rng(1).random(shape)
    ax = plots.class_distributions(samples(), image=image, label=2, class_names=["a", "b", "c"])
    (inset,) = ax.child_axes
    shown = inset.images[0].get_array()
    expected = (image - image.min()) / np.ptp(image)
    np.testing.assert_allclose(shown, expected[..., 0] if shape[-1] == 1 else expected)
    assert inset.get_title(loc="left") == "c"
    ax.figure.draw_without_rendering()
    assert not inset.get_window_extent().overlaps(ax.get_window_extent())


def test_it_draws_where_it_is_told():
    given = plt.subplots()[1]
    assert plots.class_distributions(samples(), ax=given) is given


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"samples": [0.5, 0.5]}, r"`samples` must have the shape \(draws, classes\).*got \(2,\)"),
        ({"samples": np.zeros((0, 3))}, "`samples` .* not be empty"),
        ({"samples": [[0.5, float("nan")]]}, r"`samples` must be finite; got nan at \[0, 1\]"),
        ({"samples": [[3.0, -2.0]]}, "`samples` must be probabilities.*softmax"),
        ({"samples": [[0.5, 0.2]]}, "`samples` must be probabilities"),
        ({"samples": "abc"}, "`samples` must be an array of numbers"),
        ({"kind": "box"}, "`kind` must be one of 'violin', 'histogram'; got 'box'"),
        ({"label": 3}, "`label` must be a class from 0 to 2; got 3"),
        ({"class_names": ["a"]}, "`class_names` must be a list of 3 names"),
        ({"class_names": "abc"}, "`class_names` must be a list of 3 names"),
        ({"image": np.zeros(5)}, r"`image` must have the shape \(height, width\)"),
        ({"image": np.zeros((5, 5, 2))}, r"got \(5, 5, 2\)"),
        ({"image": np.full((5, 5), np.inf)}, "`image` must be finite"),
    ],
)
def test_bad_input_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        plots.class_distributions(**{"samples": samples(), **arguments})
    assert plt.get_fignums() == []
