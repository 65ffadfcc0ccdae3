import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pytest

from lib.panels import extreme_images, training_panel
from tfp_ibnn import plots

pytestmark = pytest.mark.once

NAN = float("nan")
RNG = np.random.default_rng(0)
IMAGES = RNG.random((12, 4, 5))
DOUBT = RNG.permutation(12) / 10


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


def run(shift=0.0):
    epochs = np.arange(1, 11)
    return {
        "loss": (3 / epochs + shift).tolist(),
        "val_loss": (4 / epochs + shift).tolist(),
        "nll": (2 / epochs + shift).tolist(),
        "kl": (10.0 * epochs).tolist(),
        "val_mc_nll": [0.5, 0.25],
        "val_mc_accuracy": [0.75, 0.875],
    }


def curves(ax):
    return {(line.get_color(), line.get_linestyle()): line.get_xydata() for line in ax.lines}


def panels(*arguments):
    return {ax.get_ylabel(): ax for ax in training_panel(*arguments).axes if ax.axison}


def test_panel_has_an_axis_for_each_quantity_that_was_logged():
    found = panels({"a": run(), "b": {"ece": [0.1], "mae": [1.0]}})
    assert list(found) == ["negative ELBO", "log-likelihood", "KL (nats)", "accuracy", "ECE"]
    assert len(found["ECE"].lines) == 1
    assert list(panels({"a": {"dense/kl": [1.0, 2.0]}}, ["dense/kl"])) == ["dense/kl"]


def test_panel_draws_training_and_validation_of_each_run():
    found = curves(panels({"a": run(), "b": run(1.0)}, ["loss"])["negative ELBO"])
    epochs = np.arange(1, 11)
    for i, shift in enumerate((0, 1)):
        for line, scale in (("-", 3), ("--", 4)):
            expected = np.stack([epochs, scale / epochs + shift], axis=1)
            np.testing.assert_allclose(found[plots.COLORS[i], line], expected)
    assert len(found) == 4


def test_likelihood_has_its_sign_and_sparse_entries_are_spread_over_the_epochs():
    found = curves(panels({"a": run()})["log-likelihood"])
    np.testing.assert_allclose(found[plots.COLORS[0], "-"][:, 1], -np.array(run()["nll"]))
    np.testing.assert_allclose(found[plots.COLORS[0], ":"], [[1, -0.5], [6, -0.25]])


@pytest.mark.parametrize("every", [1, 3, 10, 30])
def test_the_interval_is_found_from_the_number_of_entries(every):
    history = {"nll": np.zeros(30), "val_mc_nll": -np.arange(1, 31)[::every]}
    sparse = curves(panels({"a": history})["log-likelihood"])[plots.COLORS[0], ":"]
    np.testing.assert_allclose(sparse[:, 0], sparse[:, 1])


def test_sparse_entries_may_be_padded_and_a_diverged_run_has_a_gap():
    padded = [NAN, 0.5, NAN, NAN, 0.25, NAN, NAN, NAN, NAN, 0.125]
    found = curves(panels({"a": {**run(), "val_mc_nll": padded}})["log-likelihood"])
    np.testing.assert_allclose(found[plots.COLORS[0], ":"], [[2, -0.5], [5, -0.25], [10, -0.125]])
    (line,) = panels({"a": {"loss": [2.0, NAN, 1.0]}})["negative ELBO"].lines
    np.testing.assert_allclose(line.get_ydata(), [2.0, NAN, 1.0])


@pytest.mark.parametrize(
    ("keys", "phases"),
    [
        (["kl"], []),
        (["loss", "kl"], ["training", "validation"]),
        (["loss", "kl", "nll", "accuracy"], ["training", "validation", "validation, MC"]),
    ],
)
def test_one_legend_names_runs_and_phases(keys, phases):
    (legend,) = training_panel({"a": run(), "b": run()}, keys).legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b", *phases]


def test_rows_hold_the_surest_and_the_least_sure():
    figure = extreme_images(IMAGES, DOUBT, count=3)
    order = np.argsort(DOUBT)
    scaled = (IMAGES - IMAGES.min()) / np.ptp(IMAGES)
    for ax, i in zip(figure.axes, [*order[:3], *order[::-1][:3]], strict=True):
        np.testing.assert_allclose(ax.images[0].get_array(), scaled[i])
        assert ax.get_title() == f"{DOUBT[i]:.2f}"
    assert [figure.axes[i].get_ylabel() for i in (0, 3)] == ["most certain", "least certain"]


@pytest.mark.parametrize("as_probabilities", [False, True])
def test_wrong_predictions_are_framed_and_named(as_probabilities):
    labels = np.arange(12) % 3
    predictions = labels.copy()
    first, second = np.argsort(DOUBT)[:2]
    predictions[first] = (labels[first] + 1) % 3
    names = ["cat", "dog", "cow"]
    given = np.eye(3)[predictions] if as_probabilities else predictions
    known = {"labels": labels, "predictions": given, "class_names": names}
    figure = extreme_images(IMAGES, DOUBT, count=2, **known)
    expected = f"{names[predictions[first]]}\nnot {names[labels[first]]}"
    assert [ax.get_xlabel() for ax in figure.axes[:2]] == [expected, names[labels[second]]]
    assert [ax.spines["left"].get_visible() for ax in figure.axes] == [True, False, False, False]


@pytest.mark.parametrize(
    ("given", "below"),
    [({}, ""), ({"labels": DOUBT * 0}, "true class"), ({"predictions": DOUBT * 0}, "predicted")],
)
def test_the_foot_explains_the_captions(given, below):
    foot = extreme_images(IMAGES, DOUBT, count=2, name="variance", **given).get_supxlabel()
    assert "above: variance" in foot
    assert ("below" in foot) == bool(given)
    assert below in foot


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_come_last(channels):
    images = np.arange(8 * 20 * channels).reshape(8, 4, 5, channels)
    shown = extreme_images(images, np.arange(8), count=2).axes[0].images[0].get_array()
    assert shown.shape == ((4, 5) if channels == 1 else (4, 5, 3))
