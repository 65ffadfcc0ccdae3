"""The tables of the study of where the noise should sit."""

from pathlib import Path

import pandas as pd

from experiments import files
from experiments.calibrate_study import read
from experiments.method_tables import table
from experiments.place_study import PAIRS
from experiments.tables import markdown_table


def steps(records, pair):
    """Return a Markdown table of what a training step costs, to that of the network."""
    found = [record["steps"] for record in records if record["pair"] == pair and "steps" in record]
    if not found:
        return "Not run yet."
    plain = found[0]["network"]
    rows = [
        {"noise": name, "step (ms)": f"{1e3 * seconds:.2f}", "ratio": f"{seconds / plain:.2f}"}
        for name, seconds in found[0].items()
    ]
    return markdown_table(pd.DataFrame(rows))


def write_tables(folder, *pages):
    """Write `table.md` into a folder with runs, and fill the tables of pages from them."""
    records = read(folder)
    tables = {pair: table(records, pair, title) for pair, (title, *_) in PAIRS.items()}
    tables |= {f"{pair} steps": steps(records, pair) for pair in PAIRS}
    parts = [f"## {name}\n\n{text}\n" for name, text in tables.items()]
    files.write_text(Path(folder) / "table.md", "\n".join(parts))
    files.fill_tables(pages, "places", tables)
