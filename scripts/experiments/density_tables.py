"""The tables of the study of densities."""

from pathlib import Path

import numpy as np
import pandas as pd

from experiments import files
from experiments.calibrate_study import read
from experiments.density_study import FLOWS, PAIRS
from experiments.tables import markdown_table


def spread(values, digits=3):
    """Return the mean of values and their deviation, if they are several."""
    deviation = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{deviation}"


def toys(records):
    """Return a Markdown table of test log-likelihoods in nats: mean and deviation over seeds."""
    found = {}
    for record in records:
        found.setdefault((record["group"], record["pair"]), []).append(record["scores"])
    lines = []
    for flow in (name for name in FLOWS if any(key[0] == name for key in found)):
        line = {"flow": flow}
        for pair, (title,) in PAIRS.items():
            own = [row["log-likelihood"] for row in found.get((flow, pair), ())]
            line[title] = spread(own) if own else "-"
        every = [row for pair in PAIRS for row in found.get((flow, pair), ())]
        line["parameters"] = f"{max(row['parameters'] for row in every):,}"
        line["seconds"] = f"{np.median([row['seconds'] for row in every]):.0f}"
        lines.append(line)
    if not lines:
        return "Not run yet."
    truth = {"flow": "the true density"}
    for pair, (title,) in PAIRS.items():
        own = [x["scores"]["true"] for x in records if x["pair"] == pair and x["scores"]["true"]]
        truth[title] = spread(sorted(set(own))) if own else "not known"
    lines.append(truth | {"parameters": "-", "seconds": "-"})
    return markdown_table(pd.DataFrame(lines))


def tables(records):
    """Return the Markdown of all tables, by name."""
    return {"toys": toys(records)}


def write_tables(folder, *pages):
    """Write `table.md` into a folder with runs, and fill the tables of pages from them."""
    found = tables(read(folder))
    parts = [f"## {name}\n\n{text}\n" for name, text in found.items()]
    files.write_text(Path(folder) / "table.md", "\n".join(parts))
    files.fill_tables(pages, "density", found)
