"""The tables of the study of novelty."""

import numpy as np
import pandas as pd
from scipy import stats

from lib.markdown import markdown_table
from studies.novelty.run import CIFAR, FEATURE_SCORES, INSIDE, SHARES

PREDICTIONS = ["-log p_max", "entropy", "total variance", "epistemic"]
KINDS = ("features", "noise off", "averaged features", "averaged scores")
SCORES = [*PREDICTIONS, *(f"{score}, {kind}" for score in FEATURE_SCORES for kind in KINDS)]
METHODS = ["deterministic", "mean-field VI", "Gaussian", "flow", "MC dropout", "ensemble of 3"]
METHODS += ["Laplace, last layer", "Laplace, all"]
CLOTHES = "T-shirt trousers pullover dress coat sandal shirt sneaker bag boot".split()


def frame(records):
    """Return the runs as a table: a row for each method, score and OOD set."""
    rows = [
        {"pair": record["pair"], "seed": record["seed"], "method": name, "score": score}
        | {"set": key, **dict(zip(("AUROC", "AUPR", "FPR95"), values, strict=True))}
        for record in records
        for name, row in record["methods"].items()
        for score, sets in row["OOD"].items()
        for key, values in sets.items()
    ]
    data = pd.DataFrame(rows)
    data["method"] = pd.Categorical(data["method"], METHODS, ordered=True)
    data["score"] = pd.Categorical(data["score"], SCORES, ordered=True)
    return data.sort_values(["method", "score"], kind="stable")


def less(data, reference, same):
    """Return the data less the AUROCs of a part of it, of equal values in some columns."""
    both = data.merge(reference[[*same, "AUROC"]], on=same, suffixes=("", " of reference"))
    both["AUROC"] -= both["AUROC of reference"]
    return both


def interval(values, signed=False):
    """Return a mean and half of its 95 % interval, by Student's t."""
    values, sign = np.asarray(values, float), "+" if signed else ""
    margin = stats.sem(values) * stats.t.ppf(0.975, len(values) - 1) if len(values) > 1 else np.nan
    return f"{values.mean():{sign}.3f}" + ("" if np.isnan(margin) else f" ± {margin:.3f}")


def grid(data, rows, columns, unit=None, value="AUROC", signed=False):
    """Return a Markdown table of means, with margins over the values of `unit` if it is given."""
    lines, order = [], [*rows, *data[columns].unique()]
    for name, group in data.groupby(rows, observed=True, sort=False):
        line = dict(zip(rows, name, strict=True))
        for column, cell in group.groupby(columns, observed=True):
            parts = cell.groupby(unit)[value].mean() if unit else [cell[value].mean()]
            line[column] = interval(parts, signed)
        lines.append(line)
    return markdown_table(pd.DataFrame(lines, columns=order).fillna("-"))


def answered(records):
    """Return the accuracy by share answered, and what calling the uncertain a new class does."""
    rows, names = [], [*(f"{share:.0%}" for share in SHARES), "found", "refused", "accuracy"]
    for record in records:
        for name, row in record["methods"].items():
            found = row["decisions"]["entropy"]
            values = [*found["answered"], *(found[key] for key in names[-3:])]
            about = {"method": name, "seed": record["seed"]}
            rows += [{**about, "of": n, "AUROC": x} for n, x in zip(names, values, strict=True)]
    rows.sort(key=lambda row: METHODS.index(row["method"]))
    return grid(pd.DataFrame(rows), ["method"], "of", "seed")


def gains(data):
    """Return AUROCs of feature scores, means over the OOD sets, and what posteriors add to them."""
    data = data[~data["score"].isin(PREDICTIONS)].sort_values("method", kind="stable")
    data[["score", "kind"]] = data["score"].str.split(", ", expand=True).to_numpy()
    plain = data[data["method"] == METHODS[0]]
    change = less(data[data["method"] != METHODS[0]], plain, ["score", "seed", "set"])
    change["kind"] = change["method"].astype(str) + ", " + change["kind"]
    both = (plain, "method", False), (change, "kind", True)
    return "\n\n".join(grid(x, ["score"], of, "seed", signed=sign) for x, of, sign in both)


def tables(records):
    """Return the Markdown of all tables that there are runs for, by name."""
    found = {}
    fashion = [record for record in records if record["pair"].startswith("fashion")]
    if fashion:
        data = frame(fashion)
        first, same = data[data["score"] == PREDICTIONS[0]], ["pair", "seed"]
        plain, row = first[first["method"] == METHODS[0]], ["method"]
        found["classes"] = grid(data, row, "score", "pair")
        found["to one network"] = grid(less(data, plain, same), row, "score", "pair", signed=True)
        change = less(data, first, [*same, "method"])
        found["to -log p_max"] = grid(change, row, "score", "pair", signed=True)
        entropy = data[data["score"] == "entropy"].sort_values(["pair", "method"])
        entropy["class"] = [CLOTHES[int(pair[-1])] for pair in entropy["pair"]]
        found["each class"] = grid(entropy, row, "class")
        if len(sneakers := data[data["pair"] == "fashion-7"]):
            found["case"] = grid(sneakers, row, "score", "seed")
            found["answered"] = answered([x for x in fashion if x["pair"] == "fashion-7"])
    for pair in CIFAR:
        if own := [record for record in records if record["pair"] == pair]:
            data, rows = frame(own).sort_values("score", kind="stable"), ["score", "method"]
            for value in ("AUROC", "AUPR", "FPR95"):
                found[f"{pair} {value}"] = grid(data, rows, "set", value=value)
            found[f"{pair} gains"] = gains(data)
            some = data["score"].str.match("entropy|epistemic|.*, (features|averaged scores)")
            data = data[data["set"].isin(INSIDE) & some]
            found[f"{pair} inside"] = grid(data, rows, "set", "seed")
    return found
