import matplotlib.pyplot as plt
import numpy as np
import pytest

from tfp_ibnn import plots

pytestmark = pytest.mark.once

X = np.array([0.0, 2.0, 1.0])
PREDICTION = {
    "mean": np.array([1.0, 3.0, 2.0]),
    "aleatoric": np.array([0.16, 0.09, 0.0]),
    "epistemic": np.array([0.09, 0.16, 0.25]),
}


def band(ax, label):
    """Lower and upper edge at x = 0, 1, 2."""
    (found,) = [fill for fill in ax.collections if fill.get_label() == label]
    vertices = found.get_paths()[0].vertices
    return [[f(vertices[vertices[:, 0] == x, 1]) for x in (0, 1, 2)] for f in (min, max)]


def test_bands_are_the_mean_and_its_deviations_in_order_of_x():
    ax = plots.regression_bands(X, PREDICTION)
    mean, epistemic, total = np.array([1, 2, 3]), np.array([0.3, 0.5, 0.4]), 0.5
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [[0, 1], [1, 2], [2, 3]])
    for name, scale in (("epistemic", epistemic), ("total", total)):
        expected = [mean - 2 * scale, mean + 2 * scale]
        np.testing.assert_allclose(band(ax, f"± 2 {name}"), expected)


def test_columns_are_vectors():
    columns = {key: value[:, None] for key, value in PREDICTION.items()}
    ax = plots.regression_bands(X[:, None], columns, truth=X[:, None])
    np.testing.assert_allclose(
        band(ax, "± 2 total"), band(plots.regression_bands(X, PREDICTION), "± 2 total")
    )


def test_only_the_total_band_is_hatched():
    ax = plots.regression_bands(X, PREDICTION)
    assert [bool(fill.get_hatch()) for fill in ax.collections] == [True, False]


def test_data_and_truth_are_drawn():
    ax = plots.regression_bands(X, PREDICTION, data=([0.5, 1.5], [7.0, 8.0]), truth=X**2)
    np.testing.assert_allclose(ax.collections[-1].get_offsets(), [[0.5, 7], [1.5, 8]])
    (truth,) = [line for line in ax.lines if line.get_label() == "truth"]
    np.testing.assert_allclose(truth.get_xydata(), [[0, 0], [1, 1], [2, 4]])
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == ["mean", "± 2 total", "± 2 epistemic", "truth", "data"]


def test_it_draws_where_it_is_told():
    given = plt.subplots()[1]
    assert plots.regression_bands(X, PREDICTION, ax=given) is given


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"x": np.zeros((3, 2))}, r"`prediction\['mean'\]` must hold 6 numbers"),
        ({"x": []}, "`x` must hold at least one number"),
        ({"x": X * np.nan}, "`x` must be finite"),
        ({"prediction": PREDICTION["mean"]}, "`prediction` must be a mapping with the keys"),
        ({"prediction": {"mean": X}}, r"`prediction` must be a mapping .*got \['mean'\]"),
        ({"prediction": {**PREDICTION, "mean": [1.0]}}, r"`prediction\['mean'\]` must hold 3"),
        ({"prediction": {**PREDICTION, "epistemic": -X}}, "must be a variance, 0 or above"),
        ({"data": (X, X[:2])}, r"`data\[1\]` must hold 3 numbers"),
        ({"truth": X[:2]}, "`truth` must hold 3 numbers"),
    ],
)
def test_bad_input_is_refused(arguments, words):
    open_before = plt.get_fignums()  # of other tests
    with pytest.raises(ValueError, match=words):
        plots.regression_bands(**{"x": X, "prediction": PREDICTION, **arguments})
    assert plt.get_fignums() == open_before
