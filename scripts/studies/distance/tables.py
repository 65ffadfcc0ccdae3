"""The tables of the study of the distance to HMC on CIFAR-10."""

import numpy as np
import pandas as pd

from lib.markdown import listed, spread
from studies.distance.run import LONG, PAIRS, best

SCORES = {"agreement": 4, "TV": 4, "accuracy": 4, "NLL": 4, "ECE": 4}
COSTS = {"draws": 0, "epochs": 0, "seconds": 0}
OTHER_MODEL = ("gaussian", "flow")  # posteriors of z
PUBLISHED = {  # agreement and total variation, on all test images
    "ensemble": (0.917, 0.104),
    "SGHMC": (0.922, 0.105),
    "cyclical SGHMC": (0.928, 0.095),
    "the same, preconditioned": (0.928, 0.092),
    "another HMC chain, about": (0.94, 0.07),
}


def title(method):
    """Return how tables name a method; posteriors of z are another model."""
    return PAIRS[method][0] + (" (another model)" if method in OTHER_MODEL else "")


def cells(records):
    """Return the cells of some runs of one setting: means, and standard deviations of several."""
    found = pd.DataFrame([record["scores"] for record in records])
    line = {key: spread(found[key], digits) for key, digits in SCORES.items()}
    return line | {key: f"{found[key].mean():.{digits}f}" for key, digits in COSTS.items()}


def overview(records):
    """Return a Markdown table of every method at its better setting, and of averages."""
    rows = []
    for method in PAIRS:
        trial = best(records, method)
        for group in (trial, LONG):
            chosen = [x for x in records if (x["pair"], x["group"]) == (method, group)]
            if group is not None and chosen:
                seeds = f", {len(chosen)} seeds" if len(chosen) > 1 else ""
                name = f"{title(method)}, {group}{seeds}"
                agreement = np.mean([x["scores"]["agreement"] for x in chosen])
                rows.append((agreement, {"method": name, **cells(chosen)}))
    for record in records:
        if record["pair"] == "average":
            count, _, method = record["group"].split()
            name = f"{title(method)}, {record['of'][1]}, {count} averaged"
            rows.append((record["scores"]["agreement"], {"method": name, **cells([record])}))
    if not rows:
        return "Not run yet."
    lines = [line for _, line in sorted(rows, key=lambda row: -row[0])]
    for name, (agreement, distance) in PUBLISHED.items():
        known = {"agreement": f"{agreement:.3f}", "TV": f"{distance:.3f}"}
        lines.append({"method": f"published: {name}", **known})
    return listed(lines)


def trials(records):
    """Return a Markdown table of both trials of every method, and which one was chosen."""
    rows = []
    for method, (_, options) in PAIRS.items():
        for trial in options:
            key = (method, 0, trial)
            for record in records:
                if (record["pair"], record["seed"], record["group"]) == key:
                    found = record["scores"]
                    line = {"method": title(method), "trial": trial}
                    line["agreement, 0 to 4,999"] = f"{found['choice']:.4f}"
                    line["TV, 0 to 4,999"] = f"{found['choice, TV']:.4f}"
                    line["chosen"] = "yes" if best(records, method) == trial else ""
                    rows.append(line | cells([record]))
    return listed(rows)


def tables(records):
    """Return the Markdown of all tables, by name."""
    return {"methods": overview(records), "trials": trials(records)}
