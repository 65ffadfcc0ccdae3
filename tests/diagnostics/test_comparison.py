"""The report of a comparison, and its figure."""

import types

import matplotlib.pyplot as plt
import numpy as np
import pytest
from scipy.stats import multivariate_normal

from tests.diagnostics.regression import normal
from tfp_ibnn import diagnostics


@pytest.mark.once
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_report_compares_with_a_reference(linear):
    exact = multivariate_normal(linear.mean, linear.covariance)
    samples = exact.rvs((4, 1000), random_state=0)
    wide = normal(linear.mean, 1.5**2 * linear.covariance)
    reference = types.SimpleNamespace(samples=samples, target=linear.target)
    report = diagnostics.report(wide, reference, evidence=(linear.evidence, 0.01))
    gap, _ = report.scores["log evidence - ELBO"]
    assert abs(gap.value - linear.kl(1.5**2)) < 4 * gap.error
    assert gap.error > 0.01
    assert report.scores["k-hat, good below 0.7"][0] < 0.5
    assert report.scores["largest error of a deviation"][0] == pytest.approx(0.5, abs=0.1)
    for name in ("MMD, squared", "sliced Wasserstein distance"):
        found, floor = (getattr(x, "value", x) for x in report.scores[name])
        assert found > 5 * abs(floor)
    assert isinstance(report, diagnostics.Comparison)
    assert diagnostics.Report is diagnostics.Comparison
    lines = str(report).splitlines()
    assert len(lines) == 1 + len(report.scores) == 9
    assert lines[1].startswith("ELBO, nats")
    # A mean that is off by two standard deviations, of samples alone.
    shift = 2 * np.sqrt(np.diagonal(linear.covariance)) * [0, 1, 0]
    scores = diagnostics.report(samples + shift, samples).scores
    assert len(scores) == 4
    assert scores["largest error of a mean"][0] == pytest.approx(2, abs=0.1)
    assert scores["largest error of a mean"][1] < 0.1
    # The `target` of a posterior such as `LastLayerHMC` is a method, not a density.
    posterior = types.SimpleNamespace(samples=lambda: samples[:, :100], target=lambda x, y: x)
    assert len(diagnostics.report(wide, posterior).scores) == 4
    with pytest.raises(ValueError, match="`posterior` has 2 numbers, `reference` 3"):
        diagnostics.report(samples[..., :2], samples)


@pytest.mark.once
def test_the_figure_shows_marginals_and_pairs():
    rng = np.random.default_rng(0)
    report = diagnostics.report(rng.normal(size=(500, 5)), rng.normal(3, 1, size=(2, 500, 5)))
    figure = report.plot(count=3)
    shown = [ax for ax in figure.axes if ax.get_visible()]
    assert len(shown) == 6
    assert [ax.get_xlabel() for ax in shown] == ["w[0]", "w[0]", "w[1]", "w[0]", "w[1]", "w[2]"]
    below = shown[1].collections
    centers = [np.concatenate([p.vertices for p in x.get_paths()]).mean(axis=0) for x in below]
    np.testing.assert_allclose(centers, [[3, 3], [0, 0]], atol=0.5)
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {"posterior", "reference"}
    plt.close(figure)
