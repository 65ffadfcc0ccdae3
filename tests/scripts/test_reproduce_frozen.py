import dataclasses

import keras
import numpy as np
import pytest

from lib import Settings, data, figures, run, write_results
from lib.markdown import fill
from lib.plan import PLANS
from lib.run import _arrays
from tests.scripts.test_reproduce import check

pytestmark = pytest.mark.once

FROZEN = PLANS["frozen"]
METHODS = ("deterministic", "gaussian", "flow_planar", "flow_iaf", "flow_sylvester")


def planned(part, method):
    return FROZEN.runs(part, [0])[f"{part}/digits/{method}/seed0"]


@pytest.mark.parametrize("part", FROZEN.parts)
def test_every_part_has_every_method(part):
    assert tuple(FROZEN.parts[part].runs) == METHODS
    for method in METHODS:
        settings = planned(part, method)
        as_it_was = (part, method) == ("frozen", "deterministic")
        assert settings.pretrain_epochs + settings.epochs == (100 if as_it_was else 400)
        assert settings.freeze_network == (part == "frozen" and method != "deterministic")
        assert (settings.train_size, settings.batch_size) == (300, 50)


def test_posteriors_start_alike():
    for method in METHODS[1:]:
        (posterior,) = planned("joint", method).posteriors().values()
        assert (posterior.prior_scale, posterior.initial_scale) == (0.5, 0.1)


@pytest.mark.slow
def test_the_elbo_is_estimated(eagerly, tmp_path):
    """At the start, log 10 nats for each of 100 images, and the KL of a narrow posterior."""
    small = {"train_size": 100, "model": "mlp_8", "epochs": 1, "pretrain_epochs": 1, "samples": 4}
    settings = dataclasses.replace(planned("frozen", "gaussian"), **small, elbo_passes=2)
    metrics = run(settings, tmp_path / "run", keep_models=False, log=print)
    assert 150 < metrics["negative_elbo"] < 400
    assert metrics["backend"] == keras.backend.backend()
    assert (metrics["train_size"], metrics["test_size"]) == (100, 1697)


def test_some_images_must_be_left_to_test_on():
    with pytest.raises(ValueError, match="leave some of 1797"):
        dataclasses.replace(planned("joint", "gaussian"), train_size=1797)


def test_seeds_choose_other_images_and_test_on_the_rest():
    settings = Settings(dataset="digits", model="mlp", train_size=100)
    (first, _), (rest, labels) = _arrays(settings, None)
    (second, _), _ = _arrays(dataclasses.replace(settings, seed=1), None)
    assert len(first) + len(rest) == 1797 == 100 + len(labels)
    assert not np.array_equal(first, second)
    everything = np.concatenate([part for part, _ in data.load("digits")])
    together = np.concatenate([first, rest])
    assert sorted(map(bytes, together)) == sorted(map(bytes, everything))


def test_tables_and_figure(tmp_path):
    rng = np.random.default_rng(0)
    numbers = ("accuracy", "nll", "brier", "ece", "negative_elbo")
    made = {"dataset": "digits", "model": "mlp", "epochs": 4, "samples": 4, "key": "k"}
    made |= {"backend": "jax", "hardware": "none"}
    rows = [
        {
            **made,
            "method": method,
            "budget": budget,
            "seed": seed,
            "name": f"{budget}{method}{seed}",
        }
        | {key: float(rng.uniform()) for key in numbers}
        for budget in FROZEN.parts
        for seed in (3, 4, 5)
        for method in METHODS[1:]
    ]
    (tmp_path / "frozen").mkdir()
    write_results(tmp_path / "frozen", rows, {})
    assert len(check(tmp_path / "frozen")) == 8
    table = fill("<!-- elbo: frozen budget=joint -->\n<!-- end -->", tmp_path).splitlines()
    assert len(table) == 2 + 2 + 4
    joint = [row for row in rows if row["budget"] == "joint"]
    gaussian, planar = (
        np.array([row["negative_elbo"] for row in joint if row["method"] == method])
        for method in ("gaussian", "flow_planar")
    )
    error = np.std(planar - gaussian, ddof=1) / 3**0.5
    assert table[4].endswith(f"| {np.mean(planar - gaussian):+.2f} ± {error:.2f} |")
    (path,) = figures.save(figures.frozen(rows, tmp_path, tmp_path), tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
