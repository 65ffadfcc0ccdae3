"""The study of novelty: its data, its scores and tables, and a run from end to end."""

import numpy as np
import pytest

import reproduce
from lib import tasks
from studies.novelty import STUDY
from studies.novelty import run as study
from studies.novelty import tables as novelty_tables

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def digits(monkeypatch):
    """A problem that is small enough for tests."""
    monkeypatch.setitem(study.PAIRS, "digits-7", ("digits", (7,), 30, 32, 200, "float32"))


def test_a_class_is_left_out_everywhere_but_in_the_unknown():
    problem = study.Novelty("digits-7", 0)
    (_, y), (_, y_held), (x_test, y_test) = problem.train, problem.validation, problem.test
    assert [len(y_held), len(y_test) + len(problem.unknown["left out"])] == [200, 500]
    for labels in (y, y_held, y_test):
        assert set(labels) == set(range(9))
    assert (problem.classes, problem.build(0).output_shape) == (9, (None, 9))
    assert not (x_test[:, None] == problem.unknown["left out"][None]).all((2, 3, 4)).any()


def test_decisions_by_hand():
    known, unknown = np.array([0.1, 0.2, 0.3, 0.9]), np.array([0.25, 0.8])
    wrong = np.array([False, False, True, False])
    found = study.decisions(known, unknown, held=np.linspace(0, 0.5, 101), wrong=wrong)
    # By rising score: right, right, unknown, wrong, unknown, right.
    assert found["answered"] == pytest.approx([2 / 3, 2 / 3, 1 / 2, 1 / 2, 2 / 5, 1 / 2], abs=1e-5)
    assert (found["found"], found["refused"]) == (0.5, 0.25)
    assert found["accuracy"] == pytest.approx(3 / 6)  # 0.1 and 0.2 are answered, 0.8 is new


def test_things_are_out_of_place(monkeypatch):
    clothes = np.zeros((3, 28, 28, 1), "uint8")
    clothes[:, 8:20, 8:20] = 255
    monkeypatch.setattr(study.data, "load", lambda *_: (None, (clothes, None)))
    backgrounds, objects = np.full((3, 32, 32, 3), 0.5, "float32"), np.ones((3, 32, 32, 3))
    found = study.out_of_place(backgrounds, objects)
    for name, side in {"small image inside": 16, "clothing inside": 6}.items():
        changed = (found[name] != 0.5).all(axis=-1).sum(axis=(1, 2))
        np.testing.assert_array_equal(changed, side**2)
    assert (backgrounds == 0.5).all()


def made(pair, seed, method, auroc):
    sets = {"left out": [auroc, 0.5, 0.5]}
    row = {"accuracy": 0.9, "OOD": {"-log p_max": sets, "entropy": {"left out": [0.9, 0.5, 0.5]}}}
    decisions = {"answered": [0.9] * 6, "found": 0.5, "refused": 0.05, "accuracy": 0.8}
    row["decisions"] = {"entropy": decisions}
    return {"pair": pair, "seed": seed, "methods": {method: row}}


def test_contrasts_are_paired_by_class():
    records = [
        made(f"fashion-{number}", seed, name, 0.5 + change + 0.1 * number)
        for number, changes in enumerate([(0.0, 0.1), (0.0, 0.2)])
        for name, change in zip(("deterministic", "flow"), changes, strict=True)
        for seed in range(2)
    ]
    tables = novelty_tables.tables(records)
    # Differences 0.1 and 0.2: the standard error is 0.05, and t of one degree of freedom 12.706.
    assert "| flow | +0.150 ± 0.635 |" in tables["to one network"]
    # Of the entropy, whose AUROC is 0.9: 0.4 and 0.3 less than that.
    assert "| deterministic | +0.000 ± 0.000 | +0.350 ± 0.635 |" in tables["to -log p_max"]


@pytest.mark.slow
def test_a_quick_run_is_stored_and_not_repeated(eagerly, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tasks, "apart", lambda function, *task: function(*task))
    monkeypatch.setattr(study, "groups", lambda pair: ["gaussian"])
    monkeypatch.setattr(study, "FEATURE_SCORES", ("knn",))
    monkeypatch.setattr(study, "posterior_map", lambda *_: study.ibnn.NormalAffine())
    command = ["--quick", "--pairs", "digits-7", "--seeds", "0", "--output", str(tmp_path)]
    assert reproduce.main(["novelty", *command]) == 0
    (record,) = tasks.read(tmp_path)
    scores = record["methods"]["Gaussian"]["OOD"]
    kinds = ("noise off", "averaged features", "averaged scores")
    assert [*scores][4:] == [f"knn, {kind}" for kind in kinds]
    assert all(0 <= value <= 1 for values in scores.values() for value in values["left out"])
    assert STUDY.main(command) == 0
    assert "0 runs to do, 1 are there" in capsys.readouterr().out


def test_a_pair_must_be_known(capsys):
    with pytest.raises(SystemExit):
        STUDY.main(["--pairs", "nonsense"])
    assert "--pairs must be some of cifar_vgg16" in capsys.readouterr().err
