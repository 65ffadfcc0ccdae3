import matplotlib.pyplot as plt
import numpy as np
import pytest

from tfp_ibnn import plots

pytestmark = pytest.mark.once


def samples():
    return np.random.default_rng(0).dirichlet([4, 2, 1], size=300)


def test_a_line_across_is_the_mean():
    ax = plots.class_distributions(samples())
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


def test_only_the_true_class_is_hatched():
    ax = plots.class_distributions(samples(), label=1, class_names=["a", "b", "c"])
    assert [bool(shape.get_hatch()) for shape in ax.collections[:3]] == [False, True, False]
    assert [tick.get_fontweight() for tick in ax.get_xticklabels()] == ["normal", "bold", "normal"]


def test_draws_that_agree_make_a_flat_violin():
    ax = plots.class_distributions(np.tile([0.25, 0.75], (10, 1)))
    np.testing.assert_allclose(ax.collections[0].get_paths()[0].vertices[:, 1], 0.25)


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
        ({"label": 3}, "`label` must be a class from 0 to 2; got 3"),
        ({"class_names": ["a"]}, "`class_names` must be a list of 3 names"),
        ({"class_names": "abc"}, "`class_names` must be a list of 3 names"),
    ],
)
def test_bad_input_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        plots.class_distributions(**{"samples": samples(), **arguments})
    assert plt.get_fignums() == []
