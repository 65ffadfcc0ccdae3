import dataclasses

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from experiments import RunError, figures, frozen, write_results
from experiments.tables import fill
from tests.experiments.test_reproduce import check
from tests.layer_checklist import numpy

pytestmark = pytest.mark.once


class OnlyGaussian(frozen.Settings):
    def posteriors(self):
        return {"gaussian": super().posteriors()["gaussian"]}


SMALL = OnlyGaussian(**dataclasses.asdict(frozen.Settings.quick()))


def test_every_budget_has_every_method(monkeypatch, tmp_path):
    monkeypatch.setattr(frozen, "_PASSES", 2)
    rows = frozen.run_kept(tmp_path / "seed0", 0, SMALL, log=print)
    epochs = {(row["budget"], row["method"]): row["epochs"] for row in rows}
    assert len(epochs) == len(rows) == 2 * 2
    assert epochs.pop(("frozen", "deterministic")) == 2
    assert set(epochs.values()) == {4}
    for row in rows:
        assert ("negative_elbo" in row) == (row["method"] != "deterministic")
        # At the start, log 10 nats for each of 100 images, and the KL of a narrow posterior.
        assert 150 < row.get("negative_elbo", 200) < 400
        assert row["backend"] == keras.backend.backend()

    # A seed that is finished is not trained again, and is not taken for another.
    monkeypatch.delattr(frozen, "run")
    assert frozen.run_kept(tmp_path / "seed0", 0, SMALL, log=print) == rows
    other = dataclasses.replace(SMALL, prior_scale=0.4)
    with pytest.raises(RunError, match=r"holds another run \(prior_scale 0.5, not 0.4\)"):
        frozen.run_kept(tmp_path / "seed0", 0, other, log=print)


def test_some_images_must_be_left_to_test_on():
    with pytest.raises(ValueError, match="leave some of 1797"):
        frozen.run(0, dataclasses.replace(SMALL, images=1797))


def test_posteriors_start_alike():
    found = frozen.Settings().posteriors()
    assert list(found) == ["gaussian", "flow_planar", "flow_iaf", "flow_sylvester"]
    for posterior in found.values():
        assert (posterior.prior_scale, posterior.initial_scale) == (0.5, 0.1)


@pytest.mark.parametrize("budget", frozen.BUDGETS)
def test_what_is_frozen_stays(budget):
    (x, y), _ = frozen._split(0, 100, None)
    keras.utils.set_random_seed(0)
    start = ibnn.models.mlp(x.shape[1:], hidden=(4,))
    fresh = ibnn.to_stochastic(start, SMALL.posteriors()["gaussian"], 100)
    model = frozen._Training(0, SMALL, x, y).trained(start, budget, "gaussian")
    for name in ("fc1", "fc2"):
        before, after = fresh.get_layer(name), model.get_layer(name)
        same = np.array_equal(numpy(before.layer.kernel), numpy(after.layer.kernel))
        assert same == (budget == "frozen")
        moved = [
            not np.array_equal(numpy(old), numpy(new))
            for old, new in zip(
                before.posterior.trainable_weights, after.posterior.trainable_weights, strict=True
            )
        ]
        assert moved == [True, True]


def test_seeds_choose_other_images_and_test_on_the_rest():
    (first, _), (rest, labels) = frozen._split(0, 100, None)
    (second, _), _ = frozen._split(1, 100, None)
    assert len(first) + len(rest) == 1797 == 100 + len(labels)
    assert not np.array_equal(first, second)
    everything = np.concatenate([part for part, _ in ibnn.data.load("digits")])
    together = np.concatenate([first, rest])
    assert sorted(map(bytes, together)) == sorted(map(bytes, everything))


def test_tables_and_figure(tmp_path):
    rng = np.random.default_rng(0)
    numbers = ("accuracy", "nll", "brier", "ece", "negative_elbo")
    rows = [
        {"dataset": "digits", "model": "mlp", "method": method, "budget": budget, "epochs": 4}
        | {"samples": 4, "seed": seed, **{key: float(rng.uniform()) for key in numbers}}
        for budget in frozen.BUDGETS
        for seed in (3, 4, 5)
        for method in frozen.Settings().posteriors()
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
    (path,) = figures.save(figures.frozen(rows), tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
