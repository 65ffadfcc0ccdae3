"""Each figure against the picture of it in `baseline/`.

After a change that is meant, look at the new pictures before you keep them:

    RENEW_BASELINES=1 python -m pytest tests/plots/test_all_baseline.py

writes all of them anew. Where a test fails, the picture it drew and the difference stay in pytest's
temporary folder, whose path is in the message.
"""

import os
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.testing.compare import compare_images

import tfp_ibnn as ibnn
from tfp_ibnn import plots

pytestmark = pytest.mark.once

BASELINE = Path(__file__).parent / "baseline"
DPI = 45
# Root mean square over all pixels, of 255. Leaving out any one part makes 0.9 or more.
TOLERANCE = 0.8
MOST_BYTES = 40_000


def probabilities(rng, size=400, classes=10):
    labels = rng.integers(classes, size=size)
    score = rng.normal(size=(size, classes)) + 3 * np.eye(classes)[labels]
    score = np.exp(score - score.max(axis=1, keepdims=True))
    return score / score.sum(axis=1, keepdims=True), labels


def reliability(rng):
    return plots.reliability_diagram(*probabilities(rng), title="name")


def moons(rng):
    angle, labels = np.pi * rng.random(60), np.arange(60) % 2
    sign = 1 - 2 * labels
    x = np.stack([np.cos(angle) * sign + labels, np.sin(angle) * sign + 0.5 * labels], axis=1)
    return x + 0.1 * rng.normal(size=x.shape), labels


def boundary_size(rng):
    bend = rng.normal(1.5, 0.2)

    def predict(points):
        score = 3 * (0.3 - points[:, 1] + 0.4 * np.sin(bend * points[:, 0]))
        return 1 / (1 + np.exp(-score[:, None]))

    return plots.decision_boundary(predict, *moons(rng), title="two classes")


def boundary_shade(rng):
    centers = np.array([[0.0, 1.5], [-1.5, -1.0], [1.5, -1.0]]) + 0.3 * rng.normal(size=(3, 2))
    labels = np.arange(45) % 3

    def predict(points):
        distance = np.linalg.norm(points[:, None] - centers, axis=-1)
        score = np.exp(-(distance**2))
        mean = (score + 1e-9) / (score + 1e-9).sum(axis=1, keepdims=True)
        return {"mean": mean, "epistemic": distance.min(axis=1)}

    x = centers[labels] + 0.4 * rng.normal(size=(45, 2))
    return plots.decision_boundary(predict, x, labels, style="shade", uncertainty="epistemic")


def posterior(rng):
    built = ibnn.MixturePosterior(components=3, prior_scale=0.5)
    built.build((7,))
    built.loc.assign(1 + 0.5 * rng.normal(size=(3, 7)))
    built.raw_scale.assign(rng.uniform(-3, -1, size=(3, 7)))
    return built


def marginals(rng):
    return plots.posterior_marginals(posterior(rng), count=5)


def pairs(rng):
    return plots.posterior_pairs(posterior(rng), draws=1000)


def bands(rng):
    x = np.linspace(-3, 3, 80)
    data = rng.uniform(-1.5, 1.5, 25)
    prediction = {
        "mean": np.sin(2 * x) * np.exp(-0.2 * x**2),
        "aleatoric": np.full(80, 0.03),
        "epistemic": 0.02 * np.maximum(np.abs(x) - 1, 0.3) ** 2,
    }
    noisy = np.sin(2 * data) + 0.2 * rng.normal(size=25)
    return plots.regression_bands(x, prediction, data=(data, noisy), truth=np.sin(2 * x))


def selective(rng):
    uncertainty = rng.random(200)
    loss = (rng.random(200) < uncertainty**2).astype(float)
    both = {"flow": uncertainty, "chance": rng.random(200)}
    return plots.risk_coverage({k: ibnn.metrics.risk_coverage(x, loss) for k, x in both.items()})


def novelty(rng):
    known, unknown = rng.beta(1, 6, 400), rng.beta(4, 4, 300)
    return plots.entropy_histograms(known, unknown, auroc=0.95, title="name")


def draws(rng):
    samples = rng.dirichlet([6, 3, 1, 0.5, 0.5], size=(2, 60))
    images = rng.random((2, 5, 5))
    names = ["boot", "sneaker", "bag", "coat", "dress"]
    return plots.draws({"name": samples}, images, labels=[1, None], class_names=names)


FIGURES = (
    reliability,
    boundary_size,
    boundary_shade,
    marginals,
    pairs,
    bands,
    selective,
    novelty,
    draws,
)


def save(draw, seed, path):
    drawn = draw(np.random.default_rng(seed))
    figure = drawn if isinstance(drawn, plt.Figure) else drawn.figure
    # Without the version of Matplotlib, which would make the same picture another file.
    figure.savefig(path, dpi=DPI, metadata={"Software": None}, pil_kwargs={"optimize": True})
    return path


@pytest.mark.parametrize("draw", FIGURES)
def test_a_figure_looks_as_it_did(draw, tmp_path):
    expected = BASELINE / f"{draw.__name__}.png"
    if os.environ.get("RENEW_BASELINES"):
        save(draw, 0, expected)
    actual = save(draw, 0, tmp_path / expected.name)
    difference = compare_images(expected, actual, TOLERANCE)
    assert difference is None, difference


@pytest.mark.parametrize("draw", FIGURES)
def test_other_data_look_otherwise(draw, tmp_path):
    expected = BASELINE / f"{draw.__name__}.png"
    actual = save(draw, 1, tmp_path / expected.name)
    assert compare_images(expected, actual, TOLERANCE) is not None


def test_baselines_are_small_and_each_belongs_to_a_figure():
    found = {path.stem: path.stat().st_size for path in BASELINE.iterdir()}
    assert set(found) == {draw.__name__ for draw in FIGURES}
    assert max(found.values()) < MOST_BYTES
