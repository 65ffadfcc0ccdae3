"""The study of how right posteriors are: its data, its tables, and a run from end to end."""

import numpy as np
import pytest

from lib import tasks
from studies.quality import STUDY
from studies.quality import run as study
from studies.quality import tables as quality_tables

pytestmark = pytest.mark.once


def records():
    """Made-up runs: flows close half of the gap."""
    gaps = {"full-covariance VI": 4.0} | {f"+ {flow}": 2.0 for flow in study.FLOWS}
    reference = {"R-hat, largest": 1.01, "effective draws, fewest": 900, "divergences": 0}
    reference |= {"evidence": [-3.0, 0.02], "NLL": 0.5}
    return [
        {"pair": "diabetes_40", "seed": seed, "reference": reference}
        | {"methods": {k: {"log evidence - ELBO": v + seed, "NLL": v} for k, v in gaps.items()}}
        for seed in (1, 0)
    ]


def test_tables():
    found = quality_tables.tables(records())
    assert found["fashion_50"] == "Not run yet."
    assert "| full-covariance VI | 4.50 ± 0.71 | 4.0000 ± 0.0000 |" in found["diabetes_40"]
    row = next(line for line in found["contrasts"].splitlines() if "10 planar" in line)
    assert "| 44% | -2.0000 ± 0.0000 | -2.0000 ± 0.0000 |" in row
    assert "| 1.010 | 900 | 0 | 0.020 | 0.5000 |" in found["references"]
    assert quality_tables.tables([])["contrasts"] == "Not run yet."


def test_a_gap_within_the_error_of_the_evidence_has_no_share():
    made = records()
    for record in made:
        record["reference"]["evidence"] = (-10.0, 5.0)
    found = quality_tables.tables(made)["contrasts"]
    row = next(line for line in found.splitlines() if "10 planar" in line)
    assert "| - | -2.0000 ± 0.0000 | -2.0000 ± 0.0000 |" in row


def test_flows_are_not_compared_with_the_draws_they_were_fitted_to():
    scores = {"log evidence - ELBO": 1.0, "MMD, squared": 0.5, "NLL": 2.0}
    made = [{"pair": "diabetes_40", "seed": 0, "methods": {}}]
    made[0]["methods"] = {f"+ {name}": scores for name in ("8 couplings", study.BY_DRAWS)}
    found = quality_tables.table(made, "diabetes_40")
    assert "| + 8 couplings | 1.00 | 0.5000 | 2.0000 |" in found
    assert f"| + {study.BY_DRAWS} | 1.00 | - | 2.0000 |" in found


def test_patients_are_in_one_part_only():
    problem = study.Problem("diabetes_40", 0, quick=True)
    assert [len(y) for _, y in (problem.others, problem.train, problem.test)] == [80, 40, 80]
    rows = np.concatenate([x for x, _ in (problem.others, problem.train, problem.test)])
    assert len(np.unique(rows, axis=0)) == 200
    kernel, bias = problem.last.get_weights()
    w = np.concatenate([kernel.ravel(), bias])[None].astype("float64")
    scores, _ = problem.scores(w)
    by_keras = problem.model.evaluate(*problem.test, verbose=0)
    assert scores["NLL"] == pytest.approx(by_keras, rel=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The chains do not agree")
def test_the_z_of_a_network_are_scored_by_the_network():
    problem = study.Noise("z_moons", 0, quick=True)
    problem.reference(0, sampler="hmc", draws=4, warmup=4, verbose=0)
    scores, mean = problem.scores(np.ones((1, 34)))
    by_keras = problem.model.evaluate(*problem.test, verbose=0)
    assert scores["NLL"] == pytest.approx(by_keras, rel=1e-4)
    assert problem.scores(np.ones((2, 34)), mean)[0]["total variation"] < 1e-6
    assert not problem.noisy(study.ibnn.NormalAffine()).layers[-1].layer.trainable


@pytest.mark.slow
@pytest.mark.parametrize(("pair", "count"), [("diabetes_40", 9), ("z_moons", 12)])
def test_a_quick_run_is_stored_and_not_repeated(pair, count, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tasks, "apart", lambda function, *task: function(*task))
    command = ["--quick", "--pairs", pair, "--seeds", "0", "--output", str(tmp_path)]
    assert STUDY.main(command) == 0
    (record,) = tasks.read(tmp_path)
    assert len(record["methods"]) == count
    assert all(np.isfinite(row["NLL"]) for row in record["methods"].values())
    assert STUDY.main(command) == 0
    assert "0 runs to do, 1 are there" in capsys.readouterr().out
