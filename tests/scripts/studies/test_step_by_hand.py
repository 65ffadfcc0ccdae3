"""The training step by hand, beside which the library's is measured."""

import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from studies import step_by_hand, transformer_by_hand  # noqa: E402

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script():
    return importlib.import_module("studies.step_by_hand.run")


@pytest.mark.slow
def test_every_kind_is_trained_and_timed(script):
    rows = script.execute(step_by_hand.STUDY.parse(["--quick", "--batch-sizes", "4"]))
    assert [row["kind"] for row in rows] == list(script.KINDS)
    assert rows[0]["ratio"] == 1
    assert all(row["ms"] > 0 for row in rows)


@pytest.mark.slow
def test_every_place_of_a_transformer_is_trained_and_timed():
    script = importlib.import_module("studies.transformer_by_hand.run")
    rows = script.execute(transformer_by_hand.STUDY.parse(["--quick"]))
    assert [row["place"] for row in rows] == list(script.PLACES)
    assert rows[0]["ratio"] == 1
    action = script.compiled("both", 8, 20)
    first = action()[1]
    assert [action()[1] for _ in range(3)][-1] < first  # the same batches again


def test_the_kl_of_a_flow_is_that_of_its_density(script):
    """By the Jacobian, whose determinant the script never computes."""
    rng, width = np.random.default_rng(1), 5
    flow = {name: jax.numpy.asarray(rng.normal(size=(4, width))) for name in ("v", "w")}
    flow |= {"b": rng.normal(size=4), "factors": rng.normal(size=(3, width, width))}
    mean, scale, noise = (rng.normal(size=width) for _ in range(3))
    scale = np.exp(scale)

    def z(noise):
        return script.through_flow(noise[None], mean, scale, flow, 3)[0][0]

    _, log_det = np.linalg.slogdet(np.asarray(jax.jacobian(z)(noise)))
    log_q = script.log_normal(noise[None])[0] - log_det
    log_p = script.log_normal((z(noise)[None] - 1) / 0.5)[0] - width * np.log(0.5)
    _, kl = script.through_flow(noise[None], mean, scale, flow, 3)
    np.testing.assert_allclose(kl, log_q - log_p, rtol=1e-3)


def test_the_page_has_the_stored_ratios():
    page = (ROOT / "results" / "benchmark" / "README.md").read_text(encoding="utf-8")
    stored = json.loads((ROOT / "results" / "benchmark" / "by_hand.json").read_text())
    for row in stored["rows"]:
        if row["kind"] != "none":
            assert f"{row['ratio']:.3f}" in page


def test_the_page_of_places_has_the_stored_ratios():
    page = (ROOT / "results" / "places" / "README.md").read_text(encoding="utf-8")
    stored = json.loads((ROOT / "results" / "places" / "by_hand.json").read_text())
    one, two, three = (f"{row['ratio']:.2f}" for row in stored["rows"][1:])
    assert re.search(rf"{two}, {one}\s+and {three}", page)
