"""The tables of the study of distillation."""

import numpy as np
import pandas as pd

from lib.markdown import markdown_table, spread
from studies.distill.run import PAIRS, TEACHERS, gain

SCORES = ("accuracy", "RMSE", "NLL", "NLL, T", "ECE", "AUROC, total", "AUROC, epistemic")


def table(records, pair):
    """Return a Markdown table of a pair: each teacher, its students and baselines over the seeds.

    The share of the gain is that of the mean gains; a gain that is not seen has none.
    """
    lines = []
    for kind in TEACHERS:
        runs = [x["methods"] for x in records if (x["pair"], x["group"]) == (pair, kind)]
        lines += [_line(runs, kind, name) for name in (runs[0] if runs else ())]
    if not lines:
        return f"Not run yet: {PAIRS[pair][0]}."
    cells = pd.DataFrame(lines)
    return markdown_table(cells.loc[:, (cells != "-").any()])


def _line(runs, kind, name):
    rows = [methods[name] for methods in runs]
    line = {"teacher": kind, "method": name, "seeds": len(runs)}
    for score in SCORES:
        values = [row[score] for row in rows if score in row]
        line[score] = spread(values, 4) if values else "-"
    gains = [[gain(methods, method) for methods in runs] for method in (name, "teacher")]
    own, of_teacher = map(np.mean, gains)
    is_learned = name not in ("single network", "teacher") and of_teacher > 0
    line["share of the gain"] = f"{own / of_teacher:.0%}" if is_learned else "-"
    line["passes"] = rows[0]["passes"]
    return line


def tables(records):
    """Return the Markdown of all tables, by name."""
    return {pair: table(records, pair) for pair in PAIRS}
