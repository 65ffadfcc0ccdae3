"""The study of distillation: a run from end to end, and its tables."""

import keras
import numpy as np
import pytest

from studies.distill import run as study
from studies.distill import tables as distill_tables

pytestmark = pytest.mark.once


def record(kind, seed, **nll):
    methods = {
        name: {"NLL": value, "NLL, T": value - 0.1, "passes": 1} for name, value in nll.items()
    }
    names = {"single": "single network", "student": "ibnn.distill"}
    methods = {names.get(name, name): row for name, row in methods.items()}
    return {"pair": "digits", "seed": seed, "group": kind, "methods": methods}


def test_share_of_the_gain_is_that_of_the_means():
    records = [
        record("ensemble of 5", 0, single=0.6, teacher=0.3, student=0.4),
        record("ensemble of 5", 1, single=0.7, teacher=0.4, student=0.4),
    ]
    found = distill_tables.table(records, "digits")
    # The gains of the teacher are .2 and .2 (the temperature gives .1), of the student .1 and .2.
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in found.splitlines()]
    rows = {line[1]: line for line in lines[2:]}
    assert lines[0] == [
        "teacher",
        "method",
        "seeds",
        "NLL",
        "NLL, T",
        "share of the gain",
        "passes",
    ]
    assert rows["ibnn.distill"][2:4] == ["2", "0.4000 ± 0.0000"]
    assert rows["ibnn.distill"][5] == "75%"
    assert rows["teacher"][5] == rows["single network"][5] == "-"
    assert distill_tables.table([], "digits") == "Not run yet: digits 1,000, MLP 64-64."


def test_mixed_inputs_are_between_two():
    x = np.float32([[0.0, 0], [1, 10]])
    mixed = keras.ops.convert_to_numpy(study.Mixed(0.5)(x))
    share = mixed[0, 0]
    assert 0 < share < 0.5
    np.testing.assert_allclose(mixed[0], share * x[1], rtol=1e-6)
    assert 0.5 < mixed[1, 0] < 1
    assert mixed[1, 1] == pytest.approx(10 * mixed[1, 0])


@pytest.mark.parametrize(
    ("pair", "kind"),
    [
        ("digits", "Gaussian over z"),
        pytest.param("diabetes", "ensemble of 5", marks=pytest.mark.slow),
    ],
)
def test_a_quick_run_has_finite_scores(eagerly, pair, kind):
    methods = study.run(pair, 0, kind, quick=True)["methods"]
    assert {"single network", "teacher", "mean distilled", "ibnn.distill"} <= methods.keys()
    for row in methods.values():
        assert all(np.isfinite(value) for value in row.values())
    assert methods["ibnn.distill"]["passes"] == 1 < methods["teacher"]["passes"]
    assert "AUROC, epistemic" in methods["ibnn.distill"]
    assert "AUROC, epistemic" not in methods["single network"]
