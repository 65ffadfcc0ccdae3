"""The tables of the study of `calibrate`."""

from collections import Counter

import numpy as np
import pandas as pd

from lib.tables import change, markdown_table
from studies.calibrate.run import PAIRS, TUNED, UNSEEN, scores_of


def table(records, names):
    """Return a Markdown table of pairs: scores before and after, and paired differences."""
    lines, left, scores = [], [], ("NLL", "accuracy", "ECE")
    for name in names:
        if not (runs := [record for record in records if record["pair"] == name]):
            left.append(PAIRS[name][0])
            continue
        nll, *others = (np.array([scores_of(record, key) for record in runs]).T for key in scores)
        cells = {"data, network": PAIRS[name][0], "seeds": len(runs)}
        for key, (before, _, after) in zip(scores[1:], others, strict=True):
            both = f"{before.mean():.3f} → {after.mean():.3f}"
            cells[key] = "-" if np.isnan(before).any() else both
        for key, x in zip(("NLL as it is", "at a temperature", "chosen"), nll, strict=True):
            cells[key] = "-" if np.isnan(x).any() else f"{x.mean():.4f}"
        cells["chosen - as it is"] = change(nll[2] - nll[0])
        cells["chosen - temperature"] = change(nll[2] - nll[1])
        counts = Counter(record["chosen"] for record in runs).most_common()
        cells["what was chosen"] = "; ".join(f"{count} × {key}" for key, count in counts)
        lines.append(cells)
    missing = [f"Not run yet: {'; '.join(left)}."] if left else []
    return "\n\n".join(([markdown_table(pd.DataFrame(lines))] if lines else []) + missing)


def tables(records):
    """Return the tables of pages: pairs that `calibrate` was tuned on, and others."""
    return {"tuned": table(records, TUNED), "unseen": table(records, UNSEEN)}
