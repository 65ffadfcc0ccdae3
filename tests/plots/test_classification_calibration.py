import matplotlib.pyplot as plt
import numpy as np
import pytest

from tfp_ibnn import plots
from tfp_ibnn.metrics import reliability

pytestmark = pytest.mark.once


def predictions():
    rng = np.random.default_rng(0)
    return rng.dirichlet(np.ones(3), size=200), rng.integers(3, size=200)


def test_bars_show_the_accuracy_of_each_bin():
    ax = plots.reliability_diagram(*predictions(), bins=10, title="name")
    expected = reliability(*predictions(), bins=10)
    heights = [bar.get_height() for bar in ax.patches[:10]]
    np.testing.assert_allclose(heights, expected.accuracy)
    assert ax.get_title() == f"name\nECE {expected.ece:.3f}"


def test_bars_below_count_the_examples():
    ax = plots.reliability_diagram(*predictions(), bins=10)
    count = reliability(*predictions(), bins=10).count
    depths = np.array([-bar.get_height() for bar in ax.patches[10:]])
    np.testing.assert_allclose(depths / depths.max(), np.log1p(count) / np.log1p(count).max())


def test_bars_of_few_examples_are_pale():
    ax = plots.reliability_diagram(*predictions(), bins=10)
    count = reliability(*predictions(), bins=10).count
    alphas = [bar.get_alpha() for bar in ax.patches[:10]]
    assert 0 < np.sum(count < 10) < 10
    assert alphas == np.where(count < 10, 0.3, 1.0).tolist()


def test_it_draws_where_it_is_told():
    given = plt.subplots()[1]
    assert plots.reliability_diagram(*predictions(), ax=given) is given


def test_logits_are_refused_before_a_figure_is_made():
    with pytest.raises(ValueError, match="logits"):
        plots.reliability_diagram([[3.0, -1.0]], [0])
    assert plt.get_fignums() == []
