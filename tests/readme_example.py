"""The README's example: `python -m tests.readme_example` runs it and records the table it prints.

The record is results/digits/calibrate.json; the README shows a part of it.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RECORD = ROOT / "results" / "digits" / "calibrate.json"
PLACE = re.compile(r"(<!-- recorded -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def code():
    """Return the one block of Python in the README."""
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    return block


def run():
    """Run it; return the names it has defined."""
    names = {"__name__": "__main__"}
    exec(compile(code(), "README.md", "exec"), names)
    return names


def methods():
    """Return the names of the methods that `calibrate` tries by default."""
    from tfp_ibnn.calibration import efforts

    return [method.__name__ for method in efforts.METHODS["seconds"]]


def table(record):
    """Return the README's table of a record: the model as it is, and all with a temperature."""
    columns = ("accuracy", "NLL", "ECE", "ECE floor", _cost(record))
    lines = [f"| candidate | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for place, (name, row) in enumerate(record["test"].items()):
        if place and not name.endswith("+ temperature"):
            continue
        cells = [f"{row[key]:.4f}" for key in columns[:-1]]
        cells.append(f"{row[columns[-1]]:.3g}")
        shown = f"**{name}**" if name == record["chosen"] else name
        lines.append(f"| {shown} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cost(record):
    """Return the column of what a prediction costs; older records count draws."""
    row = record["test"]["as it is"]
    return "passes" if "passes" in row else "draws"


def filled(text, record):
    """Return the README's text with the table of a record."""
    return PLACE.sub(lambda match: match[1] + table(record) + match[2], text)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "scripts"))
    from lib import provenance

    names = run()
    report, x, y = (names[name] for name in ("report", "x", "y"))
    record = {
        "test": report.evaluate((x[1000:], y[1000:])).rows,
        "validation": report.table().rows,
        "chosen": report.chosen.name,
        "methods": methods(),
        **provenance({"seed": 0}),
        "command": "python -m tests.readme_example",
    }
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
    README.write_text(filled(README.read_text(), record))
