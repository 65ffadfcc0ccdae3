"""The tables of the study of densities."""

import json
from pathlib import Path

import numpy as np
import pandas as pd

from lib import files
from studies.calibrate.run import read
from studies.density.run import FLOWS, PAIRS
from lib.tables import markdown_table


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


def peers(rows):
    """Return a Markdown table of ours beside FlowJAX's: nats, and milliseconds of a step."""
    lines = []
    for flow in dict.fromkeys(row["group"] for row in rows):
        for name, key in (("ours", "ours"), ("FlowJAX", "peer")):
            own = [row for row in rows if row["group"] == flow]
            line = {"flow": flow, "library": name}
            for pair, (title,) in PAIRS.items():
                found = [row[key]["log-likelihood"] for row in own if row["pair"] == pair]
                line[title] = spread(found) if found else "-"
            line["parameters"] = f"{own[0][key]['parameters']:,}"
            for score, digits in (("milliseconds", 2), ("seconds", 0)):
                line[score] = f"{np.median([row[key][score] for row in own]):.{digits}f}"
            lines.append(line)
    if not lines:
        return "Not run yet."
    names = {"milliseconds": "ms per step", "seconds": "seconds in all"}
    return markdown_table(pd.DataFrame(lines).rename(columns=names))


def tables(records, rows=()):
    """Return the Markdown of all tables, by name."""
    return {"toys": toys(records), "peers": peers(rows)}


def read_peers(path):
    """Return the lines of `peers.jsonl`, if it is there."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else ()
    return [json.loads(line) for line in lines]


def write_tables(folder, *pages):
    """Write `table.md` into a folder with runs, and fill the tables of pages from them."""
    found = tables(read(folder), read_peers(Path(folder) / "peers.jsonl"))
    parts = [f"## {name}\n\n{text}\n" for name, text in found.items()]
    files.write_text(Path(folder) / "table.md", "\n".join(parts))
    files.fill_tables(pages, "density", found)
