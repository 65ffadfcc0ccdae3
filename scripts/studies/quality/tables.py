"""The tables of the study of how right posteriors are."""

import numpy as np
import pandas as pd

from lib.markdown import change, listed, spread
from studies.quality.run import BY_DRAWS, BY_LAYER, FLOWS, JOINT, PAIRS

GAP = "log evidence - ELBO"
CONTRASTS = {  # the Gaussian that others are compared with, of last layers and of z
    False: ("full-covariance VI", [f"+ {flow}" for flow in (*FLOWS, BY_DRAWS)]),
    True: ("Gaussian", [*list(BY_LAYER)[1:], *(f"joint {name}" for name in JOINT)]),
}
COLUMNS = {
    GAP: ("gap (nats)", 2),
    "k-hat, good below 0.7": ("k-hat", 2),
    "MMD, squared": ("MMD²", 4),
    "sliced Wasserstein distance": ("Wasserstein", 3),
    "total variation": ("total variation", 4),
    "agreement": ("agreement", 3),
    "NLL": ("test NLL", 4),
    "seconds": ("seconds", 0),
}
DISTANCES = [*COLUMNS][2:6]


def frame(records, pair):
    """Return the scores of a problem: a row for each method and seed."""
    rows = [
        {"method": name, "seed": record["seed"], **row}
        for record in sorted(records, key=lambda record: record["seed"])
        if record["pair"] == pair
        for name, row in record["methods"].items()
    ]
    return pd.DataFrame(rows)


def table(records, pair):
    """Return a Markdown table of means and standard deviations over seeds."""
    data = frame(records, pair)
    lines = []
    for name, group in () if data.empty else data.groupby("method", sort=False):
        line = {"method": name}
        for key, (title, digits) in COLUMNS.items():
            if key in data:
                # A flow that was fitted to the reference's draws is not compared with these.
                is_own = name == f"+ {BY_DRAWS}" and key in DISTANCES
                line[title] = "-" if is_own else spread(group[key], digits, deviation=digits > 0)
        lines.append(line)
    return listed(lines)


def contrasts(records):
    """Return a Markdown table of what others close of the gap of a Gaussian, and differences."""
    lines = []
    for pair, (title, _) in PAIRS.items():
        data = frame(records, pair)
        if data.empty:
            continue
        scores = {
            key: data.pivot(index="seed", columns="method", values=key) for key in (GAP, "NLL")
        }
        best, names = CONTRASTS[pair.startswith("z_")]
        error = max(x["reference"]["evidence"][1] for x in records if x["pair"] == pair)
        for name in (name for name in names if name in scores[GAP]):
            both = {key: each[[name, best]].dropna() for key, each in scores.items()}
            whole = both[GAP][best].mean()
            # A share of what the evidence does not resolve means nothing.
            closed = f"{1 - both[GAP][name].mean() / whole:.0%}" if whole > error else "-"
            less = {key: np.asarray(each[name] - each[best]) for key, each in both.items()}
            line = {"problem": title, "posterior": name, "gap closed": closed}
            line |= {"gap (nats)": change(less[GAP]), "test NLL": change(less["NLL"])}
            lines.append(line)
    return listed(lines)


def references(records):
    """Return a Markdown table of what NUTS says of itself, the worst of the seeds."""
    lines = []
    for pair, (title, _) in PAIRS.items():
        found = [record["reference"] for record in records if record["pair"] == pair]
        if found:
            evidence = [error for _, error in (row["evidence"] for row in found)]
            lines.append(
                {"problem": title, "seeds": len(found)}
                | {"R-hat, largest": f"{max(row['R-hat, largest'] for row in found):.3f}"}
                | {"effective draws": f"{min(row['effective draws, fewest'] for row in found):.0f}"}
                | {"divergences": f"{max(row['divergences'] for row in found):.0f}"}
                | {"error of the evidence": f"{max(evidence):.3f}"}
                | {"test NLL": f"{np.mean([row['NLL'] for row in found]):.4f}"}
            )
    return listed(lines)


def tables(records):
    """Return the Markdown of all tables, by name."""
    found = {pair: table(records, pair) for pair in PAIRS}
    return found | {"contrasts": contrasts(records), "references": references(records)}
