"""The tables of the study of all methods."""

import pandas as pd

from lib.markdown import markdown_table, spread
from studies.methods.run import PAIRS

SCORES = ("accuracy", "NLL", "NLL, T", "ECE", "AUROC", "NLL corrupted")
OVERVIEW = ("NLL", "NLL, T", "AUROC")
SHORT = {"fashion_lenet": "Fashion", "cifar_lenet": "CIFAR", "cifar_vgg16": "VGG16"}


def table(records, pair, title=None):
    """Return a Markdown table of all methods of a pair: means and standard deviations."""
    records = [record for record in records if record["pair"] == pair]
    rows = [
        {"method": name, **row}
        for record in records
        for name, row in record.get("methods", {}).items()
    ]
    if not rows:
        return f"Not run yet: {title or PAIRS[pair][0]}."
    cells = []
    for name, group in pd.DataFrame(rows).groupby("method", sort=False):
        line = {"method": name}
        for key in SCORES:
            line[key] = spread(group[key], 4)
        for key in ("draws", "fit (s)", "prediction (s)"):
            line[key] = f"{group[key].mean():.{0 if key == 'draws' else 1}f}"
        cells.append((group["NLL"].mean(), line))
    cells.sort(key=lambda cell: cell[0])
    return markdown_table(pd.DataFrame([line for _, line in cells]))


def overview(records):
    """Return a Markdown table of the means of all methods on all pairs that were run."""
    rows = [
        {"method": name, "pair": SHORT[record["pair"]], **row}
        for record in records
        if record["pair"] in SHORT
        for name, row in record["methods"].items()
    ]
    means = pd.DataFrame(rows).groupby(["method", "pair"])[list(OVERVIEW)].mean().unstack("pair")
    means = means.loc[means["NLL"].rank().mean(axis=1).sort_values(kind="stable").index]
    cells = {"method": means.index}
    for pair in [name for name in SHORT.values() if name in means["NLL"]]:
        for key in OVERVIEW:
            cells[f"{pair} {key}"] = [f"{value:.3f}" for value in means[key, pair]]
    return markdown_table(pd.DataFrame(cells))


def tables(records):
    """Return the Markdown of all tables, by name."""
    return {"all": overview(records), **{pair: table(records, pair) for pair in PAIRS}}
