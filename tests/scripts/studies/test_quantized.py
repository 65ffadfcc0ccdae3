"""The study of quantized files: a run from end to end, and its tables."""

import keras
import numpy as np
import pytest

from studies.quantized import run as study
from studies.quantized import tables as quantized_tables

pytestmark = pytest.mark.once


def test_the_table_has_a_row_for_each_file():
    scores = {"accuracy": 0.5, "nll": 1.0, "ece": 0.25, "auroc": 0.75}
    kinds = ["one", *study.FILES]
    records = [
        {"pair": "digits", "files": {kind: {**scores, "megabytes": size} for kind in kinds}}
        for size in (1.0, 2.0)
    ]
    lines = quantized_tables.table(records, "digits").splitlines()
    assert len(lines) == 2 + len(kinds)
    cells = [cell.strip() for cell in lines[2].split("|")[1:-1]]
    assert cells[:4] == [study.ONE[0], "2", "1.500 ± 0.707", "0.5000 ± 0.0000"]
    assert quantized_tables.table([], "digits").startswith("Not run yet: digits")


@pytest.mark.slow
def test_a_quick_run_scores_every_file(tmp_path):
    found = study.run("digits", 0, quick=True, models=tmp_path)
    rows = found["files"]
    assert rows.keys() == {"one", *study.FILES}
    for row in rows.values():
        assert all(np.isfinite(value) for value in row.values())
    assert rows["int8"]["megabytes"] < rows["float16"]["megabytes"] < rows["litert"]["megabytes"]
    assert rows["onnx"]["nll"] == pytest.approx(rows["litert"]["nll"], rel=1e-4)
    assert rows["int8"]["nll"] == pytest.approx(rows["litert"]["nll"], rel=0.05)
    (model,) = tmp_path.iterdir()  # is there the next time
    before = model.stat().st_mtime_ns
    _, network = study.trained("digits", 0, quick=True, models=tmp_path)
    assert isinstance(network, keras.Model)
    assert model.stat().st_mtime_ns == before
