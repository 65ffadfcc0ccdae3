import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pytest

from tfp_ibnn import plots
from tfp_ibnn.metrics import reliability


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def test_reliability_bars_show_the_accuracy_of_each_bin():
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.ones(3), size=200)
    labels = rng.integers(3, size=200)
    ax = plots.reliability_diagram(probabilities, labels, bins=10, title="name")
    expected = reliability(probabilities, labels, bins=10)
    heights = [bar.get_height() for bar in ax.patches[:10]]
    np.testing.assert_allclose(heights, expected.accuracy)
    assert ax.get_title() == f"name\nECE {expected.ece:.3f}"


def test_training_curves_leave_out_runs_without_the_quantity():
    histories = {"a": {"kl": [3.0, 2.0, 1.0]}, "b": {"loss": [1.0]}}
    figure, given = plt.subplots()
    ax = plots.training_curves(histories, "kl", ax=given)
    assert ax is given
    assert [line.get_label() for line in ax.lines] == ["a"]
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [[1, 3], [2, 2], [3, 1]])
