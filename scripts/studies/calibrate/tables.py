"""The tables of the study of `calibrate`."""

from collections import Counter

import numpy as np
import pandas as pd

from lib.markdown import change, markdown_table
from studies.calibrate.run import PAIRS, TUNED, UNSEEN, same_cost, scores_of
from tfp_ibnn.calibration.efforts import METHODS

SUFFIX = " + temperature"
BASE = f"as it is{SUFFIX}"


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


def by_effort(records, schedule="own"):
    """Return a Markdown table of what each effort chose, against others of the same cost.

    Differences are of NLLs on test data, over all pairs and seeds; costs are means.
    """
    runs = [x for x in records if "choices" in x and x["options"]["schedule"] == schedule]
    lines = []
    for effort in METHODS:
        gains = {"temperature": [], "fine-tuned": [], "same trainings": [], "same passes": []}
        costs = []
        for record in runs:
            name = record["choices"].get(effort)
            if name is None:
                continue
            rows = record["candidates"]
            row = rows[name]
            others = ["as it is + temperature", "fine-tuned + temperature"]
            others += same_cost(record, name)
            for key, other in zip(gains, others, strict=True):
                gains[key].append(row["NLL"] - rows.get(other, {}).get("NLL", np.nan))
            costs.append((row["passes"], row["trainings"]))
        if not costs:
            continue
        cells = {"effort": effort, "runs": len(costs)}
        for key, values in gains.items():
            known = np.array(values)[~np.isnan(values)]
            cells[f"chosen - {key}"] = change(known) if len(known) > 1 else "-"
        passes, trainings = np.mean(costs, axis=0)
        cells |= {"passes": f"{passes:.3g}", "trainings": f"{trainings:.3g}"}
        lines.append(cells)
    return markdown_table(pd.DataFrame(lines)) if lines else "Not run yet."


def by_method(records, schedule):
    """Return a Markdown table of each method at a temperature, against the temperature alone.

    Differences are of NLLs on test data, over all pairs and seeds that have the method.
    """
    runs = [x for x in records if "choices" in x and x["options"]["schedule"] == schedule]
    gains = {}
    costs = {}
    for record in runs:
        rows = record["candidates"]
        base = rows.get(BASE)
        for name, row in rows.items() if base else ():
            if name.endswith(SUFFIX) and name != BASE:
                method = name.removesuffix(SUFFIX)
                gains.setdefault(method, {}).setdefault(record["pair"], []).append(
                    row["NLL"] - base["NLL"]
                )
                costs.setdefault(method, []).append((row["passes"], row["trainings"]))
    lines = []
    for method, by_pair in gains.items():
        every = np.concatenate([np.array(values) for values in by_pair.values()])
        passes, trainings = np.mean(costs[method], axis=0)
        cells = {
            "method, at a temperature": method,
            "runs": len(every),
            "NLL - temperature": change(every),
            "median": f"{np.median(every):+.4f}",
            "better by 0.001 / worse": f"{np.sum(every < -0.001)} / {np.sum(every > 0.001)}",
            "passes": f"{passes:.3g}",
            "trainings": f"{trainings:.3g}",
        }
        lines.append(cells)
    return markdown_table(pd.DataFrame(lines)) if lines else "Not run yet."


def tables(records):
    """Return the tables of pages: pairs that `calibrate` was tuned on, others, and all by effort.

    Runs with another schedule have a table of their own.
    """
    own = [x for x in records if x.get("options", {}).get("schedule", "own") == "own"]
    return {
        "tuned": table(own, TUNED),
        "unseen": table(own, UNSEEN),
        "efforts": by_effort(records),
        "methods": by_method(records, "own"),
        "cosine": by_effort(records, "cosine"),
        "cosine_methods": by_method(records, "cosine"),
    }
