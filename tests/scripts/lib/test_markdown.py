import pytest

import lib
from tests.scripts.lib.test_store import row

pytestmark = pytest.mark.once


def test_the_text_is_a_table():
    table = lib.summarise([row(0), row(1), row(0, method="a")])
    lines = lib.summary_table(table, ("dataset", "method")).splitlines()
    assert lines[0] == "| dataset | method | accuracy | NLL | Brier | ECE |"
    assert lines[1] == "|---|---|---|---|---|---|"
    assert len(lines) == 4
    assert all(line.count("|") == 7 for line in lines)
    nll = table[0]["nll"]
    assert f"{nll['mean']:.4f} ± {nll['std']:.4f}" in lines[2]
    assert "±" not in lines[3]  # one seed has no spread
