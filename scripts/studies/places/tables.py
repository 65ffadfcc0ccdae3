"""The tables of the study of where the noise should sit."""

import numpy as np
import pandas as pd

from lib.markdown import change, listed, markdown_table
from studies.methods.tables import table
from studies.places.run import PAIRS, PLACES, POSTERIORS


def contrasts(records, pair, score="NLL, T"):
    """Return a Markdown table of the planned contrasts: differences, paired by seed."""
    found = {}
    for record in records:
        if record["pair"] == pair:
            for name, row in record.get("methods", {}).items():
                found.setdefault(name, {})[record["seed"]] = row[score]
    if not found:
        return "Not run yet."

    def less(name, other):
        seeds = sorted(found[name].keys() & found[other].keys())
        return change(np.array([found[name][seed] - found[other][seed] for seed in seeds]))

    first, second, _ = places = PLACES["lstm" if pair == "fashion_lstm" else "transformer"]
    rows = [
        {"posterior": kind}
        | {f"{place} - network": less(f"{kind}, {place}", "network") for place in places}
        | {f"{first} - {second}": less(f"{kind}, {first}", f"{kind}, {second}")}
        for kind in POSTERIORS
    ]
    apart = {place: less(f"flow, {place}", f"Gaussian, {place}") for place in places}
    rows.append({"posterior": "flow - Gaussian", **{f"{p} - network": x for p, x in apart.items()}})
    return listed(rows)


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


def tables(records):
    """Return the Markdown of all tables, by name."""
    found = {pair: table(records, pair, title) for pair, (title, *_) in PAIRS.items()}
    found |= {f"{pair} contrasts": contrasts(records, pair) for pair in PAIRS}
    return found | {f"{pair} steps": steps(records, pair) for pair in PAIRS}
