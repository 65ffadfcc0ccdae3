"""The table of densities beside FlowJAX's."""

import numpy as np
import pandas as pd

from lib.markdown import markdown_table, spread
from studies.density.run import PAIRS


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


def tables(records):
    """Return the Markdown of all tables, by name."""
    return {"peers": peers(records)}
