import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

README = Path(__file__).parents[1] / "README.md"


def test_the_example_works_when_pasted(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert 12 <= len(code.splitlines()) <= 18
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    error = float(re.search(r"'ece': ([0-9.]+)", capsys.readouterr().out)[1])
    assert error < 0.1


def test_the_table_is_that_of_the_recorded_run():
    recorded = README.parent / "results" / "digits" / "metrics.json"
    text = README.read_text()
    for name, row in json.loads(recorded.read_text())["results"].items():
        numbers = [f"{row[key]:.4f}" for key in ("accuracy", "nll", "ece")]
        cells = " | ".join([name, *numbers, f"{row['parameters']:,}"])
        assert f"| {cells} |" in text


def test_links_lead_to_files():
    targets = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    assert targets
    assert [name for name in targets if not (README.parent / name).exists()] == []
