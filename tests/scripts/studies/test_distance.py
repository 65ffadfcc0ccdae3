"""The study of the distance to HMC: its reference, its chains, its tables, and quick runs."""

import json

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from lib import data, tasks
from lib.networks import resnet20
from studies.distance import STUDY
from studies.distance import run as study
from studies.distance import tables as distance_tables
from studies.methods import run as methods
from tests.layer_checklist import numpy

pytestmark = pytest.mark.once

LABELS = np.random.default_rng(0).integers(0, 10, 10_000)


def predictions(wrong):
    """Probabilities that are right but for the first so many images."""
    classes = np.where(np.arange(10_000) < wrong, (LABELS + 1) % 10, LABELS)
    return 0.5 * np.eye(10)[classes] + 0.05


def test_the_reference_is_asked_for(monkeypatch):
    monkeypatch.delenv("TFP_IBNN_HMC", raising=False)
    with pytest.raises(ValueError, match="--reference PATH.*TFP_IBNN_HMC.*starter kit"):
        study.load_reference(None, LABELS)


def test_the_reference_is_checked(tmp_path, monkeypatch):
    path = tmp_path / "hmc.npz"
    np.savez(path, probabilities=predictions(10_000 - 9144))
    np.testing.assert_allclose(study.load_reference(path, LABELS), predictions(856))
    monkeypatch.setenv("TFP_IBNN_HMC", str(path))
    assert study.load_reference(None, LABELS).shape == (10_000, 10)
    with pytest.raises(ValueError, match="another order.*accuracy 0"):
        study.load_reference(path, LABELS[::-1])
    np.savez(path, probabilities=predictions(857))
    with pytest.raises(ValueError, match="accuracy 0.9143"):
        study.load_reference(path, LABELS)


def test_scores_are_those_of_each_half():
    found = study.scores(predictions(600), predictions(100), LABELS)
    assert found["choice"] == pytest.approx(0.9)  # 500 of the first 5,000 differ
    assert found["choice, TV"] == pytest.approx(0.1 * 0.5)
    assert (found["agreement"], found["TV"], found["accuracy"]) == (1.0, 0.0, 1.0)
    assert found["NLL"] == pytest.approx(-np.log(0.55))
    assert found["ECE"] == pytest.approx(0.45)


def test_filters_of_the_priors_length_compute_the_same(eagerly):
    keras.utils.set_random_seed(0)
    model = resnet20((8, 8, 3))
    for v in model.weights:
        v.assign(np.random.default_rng(0).normal(0, 0.3, v.shape))
    x = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype("float32")
    before = numpy(model(x))
    study.start_at_prior(model)
    np.testing.assert_allclose(numpy(model(x)), before, rtol=1e-3, atol=1e-3)
    for layer in model.layers:
        if isinstance(layer, keras.layers.Conv2D):
            square = np.sum(layer.get_weights()[0] ** 2, axis=(0, 1, 2))
            np.testing.assert_allclose(square, 0.2 * np.prod(layer.kernel.shape[:3]), rtol=1e-4)


def test_rates_by_filter_leave_the_target_as_it_is(eagerly):
    """Without data the chain samples the prior, whatever the factor of a kernel."""
    inputs = keras.Input((3, 3, 8))
    x = keras.layers.Conv2D(12, 3, name="conv")(inputs)
    model = keras.Model(inputs, keras.layers.Flatten()(x))
    optimizer = study.Filters(0.02, train_size=5, prior_scale=study.PRIOR, seed=1)
    optimizer.build(model.trainable_variables)
    squares, zeros = [], [np.zeros(v.shape, "float32") for v in model.trainable_variables]
    for step in range(100):
        optimizer.apply([keras.ops.convert_to_tensor(x) for x in zeros])
        if step >= 30:
            squares.append(np.mean(numpy(model.get_layer("conv").kernel) ** 2))
    # The bias of a finite rate: 1 + a third of rate * curvature / (1 + momentum), about.
    assert np.mean(squares) == pytest.approx(study.PRIOR**2, rel=0.1)
    assert study.squared_length((3, 3, 8, 12)) == pytest.approx(0.2 * 72)


def test_the_rate_falls_and_then_goes_in_cycles():
    schedule = study.BurnIn(0.02, burn_in=40, cycle=10)
    rates = [float(schedule(step)) for step in (0, 4, 20, 40, 45, 49, 50)]
    assert rates[:5] == pytest.approx([0, 0.098, 0.06, 0.02, 0.01], abs=1e-4)
    assert rates[5] < 0.001
    assert rates[6] == pytest.approx(0.02)


def test_snapshots_are_the_ends_of_cycles_after_the_burn_in(monkeypatch):
    taken = []
    monkeypatch.setattr(ibnn.Snapshots, "on_epoch_end", lambda self, epoch, _: taken.append(epoch))
    ends = study.Ends(burn_in=10, cycle=5, kept=2)
    for epoch in range(20):
        ends.on_epoch_end(epoch)
    assert taken == [13, 14, 18, 19]


def record(pair, seed, group, agreement, **more):
    names = ("choice", "choice, TV", "agreement", "TV", "accuracy", "NLL", "ECE")
    found = dict.fromkeys([*names, "draws", "epochs", "seconds"], 1.0)
    found |= {"choice": agreement, "agreement": agreement - 0.1}
    return {"pair": pair, "seed": seed, "group": group, "scores": found, **more}


RECORDS = [
    record("map", 0, "rate 0.03", 0.8),
    record("map", 0, "rate 0.1", 0.9),
    record("map", 1, "rate 0.1", 0.7),
    record("filters", 0, "rate 0.01", 0.85),
    record("filters", 0, study.LONG, 0.99),
]


def test_the_better_trial_is_repeated():
    assert study.best(RECORDS, "map") == "rate 0.1"
    assert study.best(RECORDS, "filters") == "rate 0.01"
    assert study.best(RECORDS, "flow") is None
    tasks = study.second_phase(["map", "filters", "flow", "swag"], range(3), RECORDS, 3)
    assert tasks == [
        ("filters", 0, study.LONG),
        *(("map", seed, "rate 0.1") for seed in (1, 2)),
        *(("filters", seed, "rate 0.01") for seed in (1, 2)),
        *(("swag", 0, trial) for trial in ("rate 0.01", "rate 0.03")),
    ]


def test_averages_are_those_of_the_stored_predictions(tmp_path):
    records = [record("map", seed, "rate 0.1", 0.5 + seed / 10) for seed in range(3)]
    (tmp_path / "predictions").mkdir()
    each = [predictions(wrong).astype("float16") for wrong in (5500, 6000, 6500)]
    for seed, p in enumerate(each):
        path = study.kept(tmp_path, "predictions", "map", seed, "rate 0.1")
        np.savez(path, probabilities=p)
    (found,) = study.averages(tmp_path, records, LABELS, predictions(0))
    assert found["group"] == "3 of map"
    assert found["of"] == ["map", "rate 0.1", [0, 1, 2]]
    # Of images 5,000 on, 500 are wrong in all three, 500 in two, 500 in one.
    assert found["scores"]["agreement"] == pytest.approx(0.8)
    assert found["scores"]["TV"] == pytest.approx(0.1 * 0.5 * (1 + 2 / 3 + 1 / 3), rel=5e-3)
    assert found["scores"]["epochs"] == 3
    assert not list(study.averages(tmp_path, [*records, found], LABELS, predictions(0)))


def test_tables_show_the_better_trial():
    average = record("average", 0, "3 of map", 0.95, of=["map", "rate 0.1", [0, 1, 2]])
    found = distance_tables.tables([*RECORDS, average])
    rows = [line.split(" | ") for line in found["methods"].splitlines()]
    assert rows[2][0] == f"| SGHMC, rates by filter, {study.LONG}"
    assert rows[3][:2] == ["| MAP, rate 0.1, 3 averaged", "0.8500"]
    assert ["| MAP, rate 0.1, 2 seeds", "0.7000 ± 0.1414"] in [row[:2] for row in rows]
    assert "published: ensemble | 0.917 | 0.104 |" in found["methods"]
    assert found["trials"].count("| yes |") == 2
    assert distance_tables.tables([]) == dict.fromkeys(("methods", "trials"), "Not run yet.")


@pytest.fixture
def random_images(monkeypatch):
    """Few random images instead of CIFAR-10, and tasks in this process."""
    images = np.random.default_rng(0).integers(0, 256, (64, 32, 32, 3), "uint8")
    pair = images, np.arange(64) % 10
    monkeypatch.setattr(data, "load", lambda *_: (pair, pair))
    monkeypatch.setattr(tasks, "apart", lambda function, *task: function(*task))


@pytest.mark.slow
def test_a_quick_run_is_stored_and_not_repeated(random_images, tmp_path, capsys):
    command = ["--quick", "--output", str(tmp_path), "--seeds", "0", "1", "2"]
    assert STUDY.main(command) == 0
    records = tasks.read(tmp_path)
    assert {x["pair"] for x in records} == {*study.PAIRS, "average"}
    assert all(np.isfinite([*x["scores"].values()]).all() for x in records)
    costs = {(x["pair"], x["group"]): x["scores"]["epochs"] for x in records}
    assert costs["csghmc", "plain"] == costs["filters", study.LONG] == 5 * costs["map", "rate 0.1"]
    table = (tmp_path / "table.md").read_text()
    assert "3 averaged" in table
    assert json.dumps(records[0])
    assert STUDY.main(command) == 0
    assert "0 runs to do, 10 are there" in capsys.readouterr().out
    assert len(tasks.read(tmp_path)) == len(records)


@pytest.mark.slow
def test_one_chain_keeps_what_it_says(random_images):
    """Four epochs: a burn-in of two, then a cycle of two, both of which are kept."""
    problem = study.Problem(0, quick=True, epochs=4)
    found = study.chain(problem, 0.01, problem.epochs)
    assert found.count == 2
    mean, draws = problem.predict(found)
    assert draws == 2
    np.testing.assert_allclose(mean.sum(axis=-1), 1, rtol=1e-5)
    assert isinstance(problem, methods.Problem)
