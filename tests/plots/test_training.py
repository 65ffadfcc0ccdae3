import matplotlib.pyplot as plt
import numpy as np
import pytest

from tfp_ibnn import plots

pytestmark = pytest.mark.once

NAN = float("nan")


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


def panels(figure):
    return {ax.get_ylabel(): ax for ax in figure.axes if ax.axison}


def test_panel_has_an_axis_for_each_quantity_that_was_logged():
    figure = plots.training_panel({"a": run(), "b": {"ece": [0.1], "mae": [1.0]}})
    expected = ["negative ELBO", "log-likelihood", "KL (nats)", "accuracy", "ECE"]
    assert list(panels(figure)) == expected
    assert len(panels(figure)["ECE"].lines) == 1


def test_panel_draws_training_and_validation_of_each_run():
    figure = plots.training_panel({"a": run(), "b": run(1.0)}, ["loss"])
    found = curves(panels(figure)["negative ELBO"])
    epochs = np.arange(1, 11)
    for i, shift in enumerate((0, 1)):
        for line, scale in (("-", 3), ("--", 4)):
            expected = np.stack([epochs, scale / epochs + shift], axis=1)
            np.testing.assert_allclose(found[plots.COLORS[i], line], expected)
    assert len(found) == 4


def test_likelihood_has_the_sign_of_a_likelihood():
    found = curves(panels(plots.training_panel({"a": run()}))["log-likelihood"])
    np.testing.assert_allclose(found[plots.COLORS[0], "-"][:, 1], -np.array(run()["nll"]))


def test_sparse_entries_are_spread_over_the_epochs():
    figure = plots.training_panel({"a": run()})
    found = curves(panels(figure)["log-likelihood"])[plots.COLORS[0], ":"]
    np.testing.assert_allclose(found, [[1, -0.5], [6, -0.25]])


@pytest.mark.parametrize("every", [1, 2, 3, 5, 6, 10, 15, 30])
def test_the_interval_is_found_from_the_number_of_entries(every):
    epochs = np.arange(1, 31)
    history = {"nll": np.zeros(30), "val_mc_nll": -epochs[::every]}
    found = curves(panels(plots.training_panel({"a": history}))["log-likelihood"])
    sparse = found[plots.COLORS[0], ":"]
    np.testing.assert_allclose(sparse[:, 0], sparse[:, 1])


def test_sparse_entries_may_be_padded_with_nan():
    history = {**run(), "val_mc_nll": [NAN, 0.5, NAN, NAN, 0.25, NAN, NAN, NAN, NAN, 0.125]}
    found = curves(panels(plots.training_panel({"a": history}))["log-likelihood"])
    np.testing.assert_allclose(found[plots.COLORS[0], ":"], [[2, -0.5], [5, -0.25], [10, -0.125]])


def test_a_diverged_run_has_a_gap():
    figure = plots.training_panel({"a": {"loss": [2.0, NAN, 1.0]}})
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), [2.0, NAN, 1.0])


@pytest.mark.parametrize("keys", [["loss", "kl"], ["loss", "kl", "nll", "accuracy"]])
def test_one_legend_names_runs_and_phases(keys):
    (legend,) = plots.training_panel({"a": run(), "b": run()}, keys).legends
    expected = ["a", "b", "training", "validation"]
    expected += ["validation, MC"] if "nll" in keys else []
    assert [text.get_text() for text in legend.get_texts()] == expected


def test_a_legend_without_validation_names_the_runs_alone():
    (legend,) = plots.training_panel({"a": {"loss": [1.0]}, "b": {"loss": [2.0]}}).legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]


def test_any_other_entry_can_be_asked_for():
    figure = plots.training_panel({"a": {"dense/kl": [1.0, 2.0]}}, ["dense/kl"])
    assert list(panels(figure)) == ["dense/kl"]


@pytest.mark.parametrize("histories", [{}, None, [1.0], {"a": [1.0]}, {"a": None}])
def test_what_is_no_history_is_refused(histories):
    with pytest.raises(ValueError, match="`histories` must map at least one run"):
        plots.training_panel(histories, ["loss"])


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="No run has logged 'lr'; choose from kl, loss"):
        plots.training_panel({"a": {"loss": [1.0], "kl": [1.0]}}, ["lr"])
    with pytest.raises(ValueError, match="No run has logged 'kl'; choose from nll"):
        plots.training_panel({"a": {"nll": [1.0]}}, ["kl"])
    with pytest.raises(ValueError, match="No run has logged 'loss'; choose from mae"):
        plots.training_panel({"a": {"mae": [1.0]}})
    with pytest.raises(ValueError, match=r"one number per epoch; got the shape \(1, 2\)"):
        plots.training_panel({"a": {"loss": [[1.0, 2.0]]}}, ["loss"])
    assert plt.get_fignums() == []
