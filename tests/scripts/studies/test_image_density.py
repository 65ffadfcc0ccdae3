"""The study of densities of MNIST images: what pixels pass, and a run from end to end."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy import special, stats

from studies.image_density import run as study
from studies.image_density import tables as image_density_tables

pytestmark = pytest.mark.once


def test_the_logit_and_its_log_determinant():
    y = np.linspace(0, 1, 11).reshape(1, 11).astype("float32")
    flow = study.Logit()
    flow.build((None, 11))
    x, log_det = map(np.asarray, flow.inverse_and_log_det(y))
    expected = 1e-6 + (1 - 2e-6) * y.astype("float64")
    np.testing.assert_allclose(x, special.logit(expected), rtol=1e-4)
    slopes = (1 - 2e-6) / (expected * (1 - expected))
    np.testing.assert_allclose(log_det, np.log(slopes).sum(axis=-1), rtol=1e-4)
    np.testing.assert_allclose(flow.forward_and_log_det(x)[0], y, atol=1e-6)


def test_bits_are_those_of_grey_levels(eagerly):
    train, _, test = (x.reshape(len(x), -1) for x in study.load(0, quick=True))
    model = study.density("MADE", train, quick=True)
    bits = -model.log_prob(test).mean() / (784 * np.log(2))
    # A new flow is the identity, so each logit is normal, with the mean and deviation of its pixel.
    rng = np.random.default_rng(1)

    def logits(x):
        y = 1e-6 + (1 - 2e-6) * (x + rng.uniform(size=x.shape)) / 256
        return special.logit(y), -np.log(y * (1 - y)) - np.log(256)

    many = np.repeat(train, 30, axis=0)
    known = logits(many)[0]
    z, log_slopes = logits(np.repeat(test, 30, axis=0))
    log_p = stats.norm.logpdf(z, known.mean(axis=0), known.std(axis=0)) + log_slopes
    np.testing.assert_allclose(bits, -log_p.mean() / np.log(2), atol=0.1)


def test_masks_halve_blocks_in_three_ways():
    assert study.masks(4)[0] == [True, False, False, True]  # a checkerboard of pixels
    for channels in (4, 8):
        found = study.masks(channels)
        assert {sum(mask) for mask in found} == {channels // 2}
        assert len({tuple(mask) for mask in found}) == 3


def test_the_clock_lets_the_rate_fall_and_stops(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(study.time, "perf_counter", lambda: now[0])
    clock = study.Clock(1.0, begun=0.0, minutes=1.0)
    clock.set_model(SimpleNamespace(optimizer=SimpleNamespace(), stop_training=False))
    rates = []
    while not clock.model.stop_training:
        clock.on_epoch_begin(len(rates))
        rates.append(clock.model.optimizer.learning_rate)
        now[0] += 7
        clock.on_epoch_end(len(rates) - 1)
    assert len(rates) == 8  # a ninth would end after 63 s
    np.testing.assert_allclose(rates[0], 1 / 3)
    np.testing.assert_allclose(rates[4], np.cos(np.pi / 2 * 31.5 / 60) ** 2)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] < 0.05


def test_tables():
    scores = {"bits": 1.9, "validation": 1.91, "training": 1.8, "parameters": 1200}
    scores |= {"epochs": 20, "best epoch": 18, "seconds": 600.0}
    found = image_density_tables.tables([{"group": "MAF", "scores": scores}])["bits"]
    assert "| MAF | 1.89 | 1.900 | 1.910 | 1.800 | 1,200 | 20 | 18 | 10.0 | 1 |" in found
    assert image_density_tables.tables([])["bits"] == "Not run yet."


@pytest.mark.parametrize(
    "method",
    [
        "MAF",
        *(pytest.param(name, marks=pytest.mark.slow) for name in study.METHODS if name != "MAF"),
    ],
)
def test_a_quick_run_has_finite_scores(eagerly, method):
    record = study.run("mnist", 0, method, quick=True)
    scores = record["scores"]
    assert np.isfinite(scores["bits"])
    assert scores["validation"] == pytest.approx(min(record["curve"]), abs=1e-4)
    assert scores["epochs"] == 2


def test_unknown_methods_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="must be some of MADE, .*; got RealNPV"):
        study.run_all(["mnist"], [0], tmp_path, minutes=1.0, methods=["RealNPV"])
