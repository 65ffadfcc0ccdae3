"""The tables of the study of few data."""

import numpy as np
import pandas as pd

from lib.markdown import change, markdown_table, spread
from studies.few.run import GRIDS, METHODS, PAIRS, chosen

PLAIN, T = "deterministic", ", T"
COLUMNS = {  # digits
    "accuracy": 4,
    "NLL": 4,
    "NLL, T": 4,
    "Brier": 4,
    "Brier, T": 4,
    "ECE": 4,
    "ECE, T": 4,
    "ECE floor, T": 4,
    "T": 2,
    "draws": 0,
    "fit (s)": 1,
    "prediction (s)": 1,
}
PLANNED = [  # beside all less the deterministic network at a temperature
    ("flow", "Gaussian"),
    ("joint flow", "Gaussian"),
    ("low-rank Gaussian", "Gaussian"),
    ("mixture", "Gaussian"),
    ("fixed noise", "Gaussian"),
    ("mean-field", "Gaussian"),
    ("MNF", "mean-field"),
]
OTHERS = [*METHODS[1:], "ensemble"]
NUMBER = 2 * (len(OTHERS) + len(PLANNED))
"""Of contrasts for a pair: with and without a temperature."""


def frame(records, pair):
    """Return the scores of a pair: a row for each method and seed, without single members."""
    rows = [
        {"method": record["method"], "seed": record["seed"], **record["scores"]}
        for record in sorted(records, key=lambda record: record["seed"])
        if record["pair"] == pair and "scores" in record
    ]
    rows = [row for row in rows if row["method"] in (PLAIN, *OTHERS)]
    return pd.DataFrame(rows, columns=["method", "seed", *COLUMNS])


def table(records, pair):
    """Return a Markdown table of means and standard deviations over seeds, the best first."""
    data = frame(records, pair)
    if data.empty:
        return "Not run yet."
    lines = []
    for name, group in data.groupby("method", sort=False):
        line = {"method": name, "seeds": len(group)}
        for key, digits in COLUMNS.items():
            line[key] = spread(group[key], digits, deviation=digits == 4)
        lines.append((group["NLL, T"].mean(), line))
    lines.sort(key=lambda pair: pair[0])
    return markdown_table(pd.DataFrame([line for _, line in lines]))


def contrasts(records, pair):
    """Return a Markdown table of the planned differences of the NLL, paired by seed."""
    data = frame(records, pair)
    if data.empty:
        return "Not run yet."
    by_seed = {
        key: data.pivot(index="seed", columns="method", values=key).reindex(
            columns=[PLAIN, *OTHERS]
        )
        for key in ("NLL", "NLL, T")
    }

    def less(name, key, other, other_key):
        both = (by_seed[key][name] - by_seed[other_key][other]).dropna()
        return len(both), change(np.asarray(both))

    lines = []
    for name in OTHERS:
        (seeds, scaled), (_, plain) = (less(name, f"NLL{at}", PLAIN, "NLL, T") for at in (T, ""))
        lines.append((f"{name} - {PLAIN} at a temperature", seeds, scaled, plain))
    for name, other in PLANNED:
        (seeds, scaled), (_, plain) = (less(name, f"NLL{at}", other, f"NLL{at}") for at in (T, ""))
        lines.append((f"{name} - {other}", seeds, scaled, plain))
    run = [line for line in lines if line[1]]
    columns = ["contrast", "seeds", "at a temperature", "without"]
    found = markdown_table(pd.DataFrame(run, columns=columns))
    chance = f"about {2 * len(run) / 20:.1f} of which leave their margin by chance"
    count = f"{2 * len(run)} of {NUMBER} planned contrasts"
    return f"{found}\n\n{count}, {chance} if there is no difference."


def shown(settings):
    return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in settings.items())


def settings(records, pair):
    """Return a Markdown table of all trials; bold ones were chosen."""
    found = {(r["method"], r["trial"]): r for r in records if r["pair"] == pair}
    lines = []
    for method, grid in GRIDS[pair].items():
        best = chosen(records, pair, method)
        for number, options in enumerate(grid):
            if record := found.get((method, number)):
                scores = record["validation"]
                cells = [f"{scores[key]:.4f}" if scores[key] else "-" for key in ("NLL, T", "NLL")]
                mark = "**" if options == best else ""
                lines.append((method, f"{mark}{shown(options)}{mark}", *cells))
    columns = ["method", "settings", "validation NLL at a temperature", "without"]
    return markdown_table(pd.DataFrame(lines, columns=columns)) if lines else "Not run yet."


def tables(records):
    """Return the Markdown of all tables, by name."""
    found = {pair: table(records, pair) for pair in PAIRS}
    found |= {f"{pair} contrasts": contrasts(records, pair) for pair in PAIRS}
    return found | {f"{pair} trials": settings(records, pair) for pair in PAIRS}
