import matplotlib.pyplot as plt
import numpy as np
import pytest

from tfp_ibnn import plots

pytestmark = pytest.mark.once

KNOWN, UNKNOWN = np.array([0.1, 0.15, 0.3, 0.9]), np.array([0.8, 2.0])


def test_each_histogram_is_a_share_of_its_own_examples():
    ax = plots.entropy_histograms(KNOWN, UNKNOWN[:, None], bins=4)
    known, unknown = (patch.get_data() for patch in ax.patches)
    np.testing.assert_allclose(known.edges, [0, 0.5, 1, 1.5, 2])
    np.testing.assert_allclose(known.values, [0.75, 0.25, 0, 0])
    np.testing.assert_allclose(unknown.values, [0, 0.5, 0, 0.5])
    assert not ax.patches[0].get_hatch()
    assert ax.patches[1].get_hatch()


def test_the_auroc_is_written_if_it_is_given():
    ax = plots.entropy_histograms(KNOWN, UNKNOWN, auroc=0.98765, names=("in", "out"), title="t")
    legend = ax.get_legend()
    assert legend.get_title().get_text() == "AUROC 0.988"
    assert [text.get_text() for text in legend.get_texts()] == ["in (4)", "out (2)"]
    assert ax.get_title() == "t"
    without = plots.entropy_histograms(KNOWN, UNKNOWN).get_legend()
    assert "AUROC" not in without.get_title().get_text()


def test_scores_below_zero_have_bins_too():
    ax = plots.entropy_histograms(-KNOWN, UNKNOWN, bins=10)
    assert [patch.get_data().values.sum() for patch in ax.patches] == pytest.approx([1, 1])
    assert ax.patches[0].get_data().edges[0] == -0.9


def test_certainty_everywhere_is_one_bar():
    ax = plots.entropy_histograms(np.zeros(3), np.zeros(3), bins=2)
    np.testing.assert_allclose(ax.patches[0].get_data().values, [1, 0])


def test_it_draws_where_it_is_told():
    given = plt.subplots()[1]
    assert plots.entropy_histograms(KNOWN, UNKNOWN, ax=given) is given


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"known": []}, "`known` must hold at least one number"),
        ({"known": [float("inf")]}, "`known` must be finite; got inf"),
        ({"bins": 0}, "`bins` must be a whole number"),
    ],
)
def test_bad_input_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        plots.entropy_histograms(**{"known": KNOWN, "unknown": UNKNOWN, **arguments})
    assert plt.get_fignums() == []


def test_axes_that_share_a_scale_do_not_push_each_other_up():
    rng = np.random.default_rng(0)
    _, axes = plt.subplots(1, 3, sharey=True)
    for ax in axes:
        plots.entropy_histograms(rng.uniform(0, 1, 200), rng.uniform(1, 2, 200), bins=4, ax=ax)
    highest = max(patch.get_data().values.max() for ax in axes for patch in ax.patches)
    assert axes[0].get_ylim()[1] < 1.5 * highest
