"""The tables of the study of densities."""

import numpy as np

from lib.markdown import listed, spread
from studies.density.run import FLOWS, PAIRS


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
    return listed(lines)


def tables(records):
    """Return the Markdown of all tables, by name."""
    return {"toys": toys(records)}
