"""The tables of the study of quantized files."""

import pandas as pd

from lib.markdown import markdown_table, spread
from studies.quantized.run import FILES, ONE, PAIRS

SCORES = {"accuracy": "accuracy", "NLL": "nll", "ECE": "ece", "AUROC": "auroc"}


def table(records, pair):
    """Return a Markdown table of a pair: its files, with their sizes and scores over the seeds."""
    runs = [record["files"] for record in records if record["pair"] == pair]
    if not runs:
        return f"Not run yet: {PAIRS[pair][0]}."
    lines = []
    for name, (title, _) in {"one": ONE, **FILES}.items():
        rows = [files[name] for files in runs]
        line = {"file": title, "seeds": len(rows), "MB": spread([x["megabytes"] for x in rows], 3)}
        for score, key in SCORES.items():
            line[score] = spread([row[key] for row in rows], 4)
        lines.append(line)
    return markdown_table(pd.DataFrame(lines))


def tables(records):
    """Return the Markdown of all tables, by name."""
    return {pair: table(records, pair) for pair in PAIRS}
