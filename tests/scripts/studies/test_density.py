"""The study of densities in the plane: its data, and a run from end to end."""

import numpy as np
import pytest

from studies.density import run as study
from studies.density import tables as density_tables

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    "name", ["moons", pytest.param("rings", marks=pytest.mark.slow), "checkerboard"]
)
def test_true_densities_are_those_of_the_points(name):
    x = study.draw(name, 4000, np.random.default_rng(0))
    # Cells of a grid hold as many points as their probability says, by a chi-squared statistic.
    edges = np.linspace(-3, 3, 13)
    middles = [(edges[:-1, None] + (np.arange(5) + 0.5) / 10).ravel()] * 2
    points = np.stack(np.meshgrid(*middles, indexing="ij"), axis=-1).reshape(-1, 2)
    values = np.exp(study.log_density(name, points))
    if name == "checkerboard":
        column, row = np.floor(points + 2).T
        values *= (np.abs(points).max(axis=1) < 2) * ((column + row) % 2 == 0)
    expected = values.reshape(12, 5, 12, 5).mean(axis=(1, 3)) / 4
    np.testing.assert_allclose(expected.sum(), 1, atol=2e-3)
    counts = np.histogram2d(*x.T, bins=edges)[0]
    assert counts.sum() == 4000
    enough = expected > 1e-3
    assert counts[~enough].sum() < 80
    statistic = np.sum((counts - 4000 * expected)[enough] ** 2 / (4000 * expected[enough]))
    assert statistic < enough.sum() + 4 * np.sqrt(2 * enough.sum())


def test_a_pinwheel_has_five_arms():
    x = study.draw("pinwheel", 2000, np.random.default_rng(0))
    assert study.log_density("pinwheel", x) is None
    angle = np.angle(x @ [1, 1j]) - 0.25 * np.exp(np.linalg.norm(x, axis=1) / 2)
    assert abs(np.mean(np.exp(5j * angle))) > 0.8
    assert abs(np.mean(np.exp(1j * angle))) < 0.1


def test_tables():
    scores = {"true": -1.0, "parameters": 1200, "seconds": 8.0}
    records = [
        {"pair": "moons", "seed": seed, "group": "8 affine couplings"}
        | {"scores": {"log-likelihood": value, **scores}}
        for seed, value in enumerate((-1.1, -1.3))
    ]
    found = density_tables.tables(records)["toys"]
    assert "| 8 affine couplings | -1.200 ± 0.141 | - | - | - | 1,200 | 8 |" in found
    assert "| the true density | -1.000 | not known | not known | not known | - | - |" in found
    assert density_tables.tables([])["toys"] == "Not run yet."


def test_the_first_epoch_does_not_count():
    assert study.milliseconds([9.0, 0.02, 0.03, 0.02], 10_000) == 1.0


@pytest.mark.parametrize(
    "flow",
    [
        "1 affine coupling",  # a short chain stands for the others
        pytest.param("8 affine couplings", marks=pytest.mark.slow),
        pytest.param("16 planar", marks=pytest.mark.slow),
    ],
)
def test_a_quick_run_has_finite_scores(monkeypatch, flow):
    monkeypatch.setitem(study.FLOWS, "1 affine coupling", lambda: [study.flows.AffineCoupling()])
    scores = study.run("checkerboard", 0, flow, quick=True)["scores"]
    assert np.isfinite(scores["log-likelihood"])
    np.testing.assert_allclose(scores["true"], -np.log(8))
    np.testing.assert_allclose(scores["gap"], scores["true"] - scores["log-likelihood"], rtol=1e-6)
