"""Markdown: cells, tables, and the tables in pages, filled from stored results.

A table in a page stands between two comments. The first says which one it is: a kind that
`lib/tables.py` lists, an experiment, and conditions on its runs, in which commas separate
alternatives.

    <!-- table: lenet dataset=cifar10 budget=equal method=gaussian,flow -->
    <!-- end -->
"""

import re
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from lib import tables
from lib.scoring import SCORES

PAGES = (
    "README.md",
    *(
        f"results/{name}/README.md"
        for name in (
            "vgg16",
            "lenet",
            "mnist_mlp",
            "lenet5",
            "cifar5",
            "frozen",
            "toy2d",
            "defaults",
        )
    ),
)
"""Texts of the repository that have such tables."""

_BEGIN = r"<!-- (\w+): (\w+)([^>]*?) -->\n"
_TABLE = re.compile(rf"({_BEGIN})(?:(?!<!--).)*(<!-- end -->)", re.DOTALL)


def change(values):
    """Return the mean and half of its 95 % interval, by Student's t."""
    if np.isnan(values).any() or len(values) < 2:
        return "-"
    margin = stats.sem(values) * stats.t.ppf(0.975, len(values) - 1)
    return f"{np.mean(values):+.4f} ± {margin:.4f}"


def spread(values, digits=3, deviation=True):
    """Return the mean of values and their deviation, if they are several; - if one is NaN."""
    if pd.isna(values).any():
        return "-"
    more = f" ± {np.std(values, ddof=1):.{digits}f}" if deviation and len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{more}"


def summary_table(summary, columns=("method",), scores=tuple(SCORES)):
    """Return rows of a summary as a Markdown table, `mean ± std`, or the score of a single seed."""
    table = pd.DataFrame({column: [row[column] for row in summary] for column in columns})
    for key in scores:
        table[SCORES[key]] = [
            f"{row[key]['mean']:.4f}" + f" ± {row[key]['std']:.4f}" * (len(row["seeds"]) > 1)
            for row in summary
        ]
    return markdown_table(table)


def markdown_table(table, aligned=False):
    """Return a frame as a Markdown table, whose columns have one width each if `aligned`."""
    cells = [list(table.columns), *table.astype(str).to_numpy().tolist()]
    rule = ["---"] * len(cells[0])
    if aligned:
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        rule = ["-" * (width + 2) for width in widths]
        cells = [[one[0].ljust(widths[0]), *map(str.rjust, one[1:], widths[1:])] for one in cells]
    head, *rest = ["| " + " | ".join(line) + " |" for line in cells]
    return "\n".join([head, "|" + "|".join(rule) + "|", *rest])


def listed(lines):
    """Return lines as a Markdown table, or that there are none."""
    return markdown_table(pd.DataFrame(lines).fillna("-")) if lines else "Not run yet."


def fill(text, results):
    """Return a Markdown text with its tables filled from a folder of results."""
    filled, count = _TABLE.subn(lambda match: _filled(match, Path(results)), text)
    if begun := len(re.findall(_BEGIN, text)) - count:
        raise ValueError(f"Of {begun + count} tables {begun} have no end.")
    return filled


def _filled(match, results):
    """Return the text of a table, with the comments around it, that `_TABLE` has matched."""
    begin, kind, experiment, conditions, end = match.groups()
    if kind not in tables.KINDS:
        raise ValueError(f"{begin.strip()} is not a table: known are {', '.join(tables.KINDS)}.")
    if not all(re.fullmatch("[^=]+=[^=]+", part) for part in conditions.split()):
        raise ValueError(f"Conditions have the form key=value, not as in {begin.strip()}.")
    pairs = [part.split("=") for part in conditions.split()]
    wanted = {key: values.split(",") for key, values in pairs}
    frame = tables.of_experiment(results / experiment, kind, wanted)
    return f"{begin}{markdown_table(frame)}\n{end}"
