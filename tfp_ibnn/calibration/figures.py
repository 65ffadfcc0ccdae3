"""Figures of the calibration before and after."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tfp_ibnn._core.extras import needs
from tfp_ibnn.calibration.candidates import Candidate
from tfp_ibnn.likelihoods import Likelihood


def reliability_figure(
    panels: Mapping[str, Candidate], y: np.ndarray, weight: np.ndarray | None
) -> Any:
    """Return a figure with a reliability diagram for each candidate of a classifier.

    Args:
        panels: candidates by label, such as "before".
        y: the classes (examples,).
        weight: how often each example counts; None is once.
    """
    with needs("plots"):
        import matplotlib.pyplot as plt

        from tfp_ibnn import plots

    count = len(panels)
    size = (4 * count, 4.2)
    figure, axes = plt.subplots(1, count, figsize=size, layout="constrained")
    for ax, (when, candidate) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        total = candidate.prediction.sum(axis=1, keepdims=True)
        probabilities = candidate.prediction / total
        title = f"{when}: {candidate.name}"
        plots.reliability_diagram(probabilities, y, ax=ax, title=title, sample_weight=weight)
        ax.title.set_fontsize(9)  # names can be long
    return figure


def coverage_figure(
    panels: Mapping[str, Candidate],
    output: Likelihood,
    y: np.ndarray,
    weight: np.ndarray | None,
) -> Any:
    """Return a figure of the share of targets in central intervals, minus their probability.

    The band is twice the standard error of that share for a calibrated model,
    sqrt(level (1 - level) / targets).

    Args:
        panels: candidates of a regression by label, such as "before"; at most two.
        output: what their predictions mean.
        y: the targets (examples, width).
        weight: how often each example counts; None is once.
    """
    with needs("plots"):
        import matplotlib.pyplot as plt

        from tfp_ibnn import plots

    figure, ax = plt.subplots(figsize=(5.2, 3.8), layout="constrained")
    levels = np.linspace(0, 1, 101)
    count = y.size
    if weight is not None:
        count = weight.sum() * y.shape[1]
    band = 2 * np.sqrt(levels * (1 - levels) / count)
    ax.axhline(0, color="0.4", lw=1)
    ax.fill_between(levels, -band, band, color="0.9", label="chance, of a calibrated model")
    styles = zip(panels.items(), plots.COLORS, ("--", "-"), strict=False)
    for (when, candidate), color, style in styles:
        covered = output.coverage(candidate.prediction, y, levels, weight)
        label = f"{when}: {candidate.name}"
        ax.plot(levels, covered - levels, style, color=color, label=label)
    ax.set(xlim=(0, 1), xlabel="probability", ylabel="share of targets inside - probability")
    figure.legend(loc="outside upper center", frameon=False)
    return figure
