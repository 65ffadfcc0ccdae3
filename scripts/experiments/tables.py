"""Tables of results: summaries over the seeds, and Markdown pages filled from stored results.

A table in a page stands between two comments. The first says which one it is: an experiment, and
conditions on its rows, in which commas separate alternatives.

    <!-- table: lenet dataset=cifar10 budget=equal method=gaussian,flow -->
    <!-- end -->

The kinds of tables:

- `table`, all scores, means and standard deviations over the seeds; `scores`, without Brier.
- `paired`: differences between methods over the seeds, with their standard errors.
- `pooled`: differences from the first method that is named, with 95 % margins from the variance of
  all that are; `pooled_shifts`, the same on shifted and OOD images.
- `cost`: parameters and time.
- `elbo`: the negative ELBO. `kl`: NLL, ECE, and the KL with which training ends.
- `ablations` and `draws`: single runs.
- `shifts`: accuracy, NLL and ECE on shifted images. `ood`: AUROC of the total and of the epistemic
  uncertainty.
- `post_hoc`: NLL and ECE of predictions as they are, at a temperature, averaged over the seeds.
"""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from experiments import files
from experiments.provenance import provenance

__all__ = ["PAGES", "SCORES", "fill", "margins", "markdown", "paired", "summarise", "write_results"]

PAGES = ("README.md", "results/README.md", "docs/choosing.md")
"""Texts of the repository that have such tables."""
SCORES = {"accuracy": "accuracy", "nll": "NLL", "brier": "Brier", "ece": "ECE"}
"""What every run has, and how tables call it."""
HELD_OUT = "held-out classes"
"""Name of the OOD images that are of the model's own dataset."""

_KEYS = ["dataset", "model", "method", "budget", "epochs", "samples"]
_MAIN = {key: SCORES[key] for key in ("accuracy", "nll", "ece")}
_BEGIN = r"<!-- (\w+): (\w+)([^>]*?) -->\n"
_TABLE = re.compile(rf"({_BEGIN})(?:(?!<!--).)*(<!-- end -->)", re.DOTALL)
# From the first method to the second.
_PAIRS = [
    pair.split(">")
    for pair in """
    deterministic>mc_dropout deterministic>gaussian deterministic>fixed_inner deterministic>mixture
    deterministic>flow mc_dropout>gaussian gaussian>flow gaussian>mixture_4 gaussian>mixture_16
    gaussian>mixture_16_ibnn gaussian>flow_first gaussian>flow_last gaussian>flow_over_mixture
    mixture_4>flow_over_mixture gaussian>flow_planar gaussian>flow_iaf gaussian>flow_sylvester
    gaussian>gaussian_inner gaussian>fixed_inner gaussian_inner>fixed_inner gaussian>gaussian_elbo
    gaussian_elbo>flow_elbo
    """.split()
]
_SHIFTS = {
    "clean": ("clean", (0,)),
    "corrupted, 1 and 2": ("corruption", (1, 2)),
    "3 and 4": ("corruption", (3, 4)),
    "5": ("corruption", (5,)),
    "rotated by 30°": ("rotation", (30,)),
}
_POOLED_SHIFTS = {
    "corrupted: accuracy": ("accuracy", "shift", "corruption"),
    "corrupted: NLL": ("nll", "shift", "corruption"),
    "rotated: accuracy": ("accuracy", "shift", "rotation"),
    "rotated: NLL": ("nll", "shift", "rotation"),
    f"AUROC: {HELD_OUT}": ("entropy_auroc", "name", HELD_OUT),
    "AUROC: fashion-mnist": ("entropy_auroc", "name", "fashion_mnist"),
    "AUROC: mnist": ("entropy_auroc", "name", "mnist"),
}


def summarise(rows, **common):
    """Return one row for each method, budget and data set, over its seeds."""
    groups, table = {}, []
    for row in rows:
        groups.setdefault(tuple(row[key] for key in _KEYS), []).append(row)
    for keys, group in groups.items():
        same = {
            key: value
            for key, value in group[0].items()
            if key not in (*_KEYS, *SCORES, "seed") and all(row.get(key) == value for row in group)
        }
        for key in ("backend", "hardware"):  # of seeds that were run in different places, all
            if places := dict.fromkeys(row[key] for row in group if key in row):
                same[key] = " | ".join(places)
        found = pd.DataFrame(group)[list(SCORES)].agg(["mean", "std"], skipna=False)
        if len(group) == 1:
            found.loc["std"] = 0.0
        scores = found.round(6).to_dict()
        seeds = [row["seed"] for row in group]
        table.append(
            {**dict(zip(_KEYS, keys, strict=True)), "seeds": seeds, **scores, **same, **common}
        )
    return table


def write_results(folder, rows, options, **more):
    """Write `summary.json` and `runs.json`, with more entries; return the rows of the summary."""
    # A run that says where it was made was made there, not where the table is.
    known = rows[0] if rows else {}
    record = {key: value for key, value in provenance(options).items() if key not in known}
    common = {key: record[key] for key in ("command", "backend", "hardware") if key in record}
    table = summarise(rows, **common)
    files.write_json(Path(folder) / "summary.json", table)
    files.write_json(Path(folder) / "runs.json", {"runs": list(rows), **more, **record})
    return table


def markdown(table, columns=("method",), scores=tuple(SCORES)):
    """Return rows of a summary as a Markdown table, `mean ± std`, or the score of a single seed."""
    lines = [[*columns, *(SCORES[key] for key in scores)]]
    for row in table:
        several = len(row["seeds"]) > 1
        spreads = [f" ± {row[key]['std']:.4f}" if several else "" for key in scores]
        cells = [f"{row[key]['mean']:.4f}{s}" for key, s in zip(scores, spreads, strict=True)]
        lines.append([*(str(row[key]) for key in columns), *cells])
    return markdown_table(lines)


def markdown_table(cells, aligned=False):
    """Return rows of cells, of which the first is the head, as a Markdown table."""
    rule = ["---"] * len(cells[0])
    if aligned:
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        rule = ["-" * (width + 2) for width in widths]
        cells = [
            [line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in cells
        ]
    head, *rest = ["| " + " | ".join(line) + " |" for line in cells]
    return "\n".join([head, "|" + "|".join(rule) + "|", *rest])


def paired(rows, first, second, score):
    """Return `mean`, standard `error` and number of `seeds` of the difference of two methods.

    That is `second - first`, over the seeds that both have, of rows of one data set and budget.
    """
    values = pd.DataFrame(rows).pivot_table(index="seed", columns="method", values=score)
    values = values.reindex(columns=[first, second])
    change = (values[second] - values[first]).dropna()
    if len(change) < 2:
        raise ValueError(f"{first!r} and {second!r} need at least two seeds in common.")
    return {"mean": change.mean(), "error": change.sem(), "seeds": len(change)}


def margins(groups):
    """Return for each method by how much its distance from the first one's mean is uncertain.

    That is half of a 95 % interval for the difference of two means. The variance is taken to be the
    same for all methods, and estimated from all: a few seeds of two methods say little of it.
    """
    freedom = sum(len(values) - 1 for values in groups.values())
    if not freedom:
        raise ValueError("A variance takes at least two seeds of some method.")
    squares = sum(np.var(values) * len(values) for values in groups.values())
    scale = (squares / freedom) ** 0.5 * stats.t.ppf(0.975, freedom)
    first = len(next(iter(groups.values())))
    return {name: float(scale * (1 / len(v) + 1 / first) ** 0.5) for name, v in groups.items()}


def fill(text, results):
    """Return a Markdown text with its tables filled from a folder of results."""

    def table(match):
        begin, kind, experiment, conditions, end = match.groups()
        if kind not in _KINDS:
            raise ValueError(f"{begin.strip()} is not a table: known are {', '.join(_KINDS)}.")
        if not all(re.fullmatch("[^=]+=[^=]+", part) for part in conditions.split()):
            raise ValueError(f"Conditions have the form key=value, not as in {begin.strip()}.")
        wanted = dict(part.split("=") for part in conditions.split())
        cells = _KINDS[kind](Path(results) / experiment, wanted)
        return f"{begin}{cells if isinstance(cells, str) else markdown_table(cells)}\n{end}"

    filled, count = _TABLE.subn(table, text)
    if begun := len(re.findall(_BEGIN, text)) - count:
        raise ValueError(f"Of {begun + count} tables {begun} have no end.")
    return filled


def _rows(path, wanted, part="runs"):
    """Return the rows of a stored file that match all conditions, as a frame."""
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = content if isinstance(content, list) else content.get(part, content.get("rows"))
    found = _matching(rows, wanted)
    for key, value in wanted.items():
        known = set(found[key].astype(str)) if key in found else set()
        if absent := set(value.split(",")) - known:
            raise ValueError(f"{path} has no row of {wanted} with {key} {', '.join(absent)}.")
    return found


def _matching(rows, wanted):
    found = pd.DataFrame(rows)
    for key, value in wanted.items():
        if key in found:
            found = found[found[key].astype(str).isin(value.split(","))]
    return found


def _by_method(rows):
    return rows.groupby("method", sort=False) if len(rows) else ()


def _named(wanted):
    """Return the methods in the order in which a comment names them."""
    if "method" not in wanted:
        raise ValueError("Differences need methods, method=first,second: those from the first.")
    return wanted["method"].split(",")


def _summary(folder, wanted, columns, scores):
    rows = _rows(folder / "summary.json", wanted).to_dict("records")
    return markdown([{**row, "runs": len(row["seeds"])} for row in rows], columns, scores)


def _paired(folder, wanted):
    rows = _rows(folder / "runs.json", wanted)
    lines = [["from", "to", "seeds", *_MAIN.values()]]
    for first, second in _PAIRS:
        seeds = [set(rows["seed"][rows["method"] == method]) for method in (first, second)]
        if len(set.intersection(*seeds)) > 1:
            found = [paired(rows, first, second, key) for key in _MAIN]
            cells = [f"{change['mean']:+.4f} ± {change['error']:.4f}" for change in found]
            lines.append([first, second, str(found[0]["seeds"]), *cells])
    return lines


def _pooled(folder, wanted):
    groups = _by_method(_rows(folder / "runs.json", wanted))
    columns = {
        title: {method: groups.get_group(method)[key].to_list() for method in _named(wanted)}
        for key, title in _MAIN.items()
    }
    return _differences(columns, digits=4)


def _pooled_shifts(folder, wanted):
    rows = _rows(folder / "robustness.json", wanted)
    columns = {}
    for title, (score, key, value) in _POOLED_SHIFTS.items():
        if (chosen := rows[rows[key] == value]).empty:
            continue
        means = chosen.groupby(["method", "seed"])[score].mean()
        columns[title] = {method: means[method].to_list() for method in _named(wanted)}
    return _differences(columns, digits=3)


def _differences(columns, digits):
    """Return a table of the first method's means, and how far the others' are from them."""
    first, *others = next(iter(columns.values()))
    means = {title: np.mean(groups[first]) for title, groups in columns.items()}
    lines = [["method", *columns], [first, *(f"{mean:.{digits}f}" for mean in means.values())]]
    for method in others:
        cells = [
            f"{np.mean(groups[method]) - means[title]:+.{digits}f}"
            f" ± {margins(groups)[method]:.{digits}f}"
            for title, groups in columns.items()
        ]
        lines.append([method, *cells])
    return lines


def _elbo(folder, wanted):
    rows = _rows(folder / "runs.json", wanted).dropna(subset="negative_elbo")
    lines = [["method", "negative ELBO (nats)", "change from the Gaussian"]]
    for method, found in _by_method(rows):
        cell = "-"
        if method != "gaussian":
            change = paired(rows, "gaussian", method, "negative_elbo")
            cell = f"{change['mean']:+.2f} ± {change['error']:.2f}"
        lines.append([method, f"{found['negative_elbo'].mean():.2f}", cell])
    return lines


def _kl(folder, wanted):
    lines = [["method", "NLL", "ECE", "KL in the end (nats)"]]
    for method, found in _by_method(_rows(folder / "runs.json", wanted)):
        kl = found["train_kl"].mean() if "train_kl" in found else np.nan
        scores = [f"{found[key].mean():.3f}" for key in ("nll", "ece")]
        lines.append([method, *scores, "-" if np.isnan(kl) else f"{kl:,.0f}"])
    return lines


def _cost(folder, wanted):
    rows = _rows(folder / "runs.json", wanted)
    least = rows["parameters"][rows["method"] == "deterministic"].min()
    lines = [["method", "parameters", "more", "training beside other runs (s)"]]
    for method, found in _by_method(rows):
        count, seconds = found["parameters"].iloc[0], found["seconds"].mean()
        lines.append([method, f"{count:,}", f"{count / least - 1:.2%}", f"{seconds:.0f}"])
    return lines


def _single(folder, wanted, part, title, name):
    """Return a table of single runs."""
    rows = _rows(folder / "runs.json", wanted, part).to_dict("records")
    scores = [[f"{row[key]:.4f}" for key in SCORES] for row in rows]
    names = [name.format(**row) for row in rows]
    return [[title, *SCORES.values()], *([n, *s] for n, s in zip(names, scores, strict=True))]


def _shifts(folder, wanted):
    lines = [["method", *_SHIFTS]]
    for method, found in _by_method(_rows(folder / "robustness.json", wanted)):
        cells = []
        for shift, levels in _SHIFTS.values():
            chosen = found[(found["shift"] == shift) & found["level"].isin(levels)]
            means = [f"{mean:.3f}" for mean in chosen[list(_MAIN)].mean()]
            cells.append("-" if chosen.empty else " / ".join(means))
        lines.append([method, *cells])
    return lines


def _ood(folder, wanted):
    rows = _rows(folder / "robustness.json", {**wanted, "shift": "foreign"})
    names = rows["name"].unique()
    lines = [["method", *(name.replace("_", "-") for name in names)]]
    for method, found in _by_method(rows):
        cells = []
        for name in names:
            chosen = found[found["name"] == name][["entropy_auroc", "epistemic_auroc"]]
            cells.append(" / ".join(_spread(chosen[key]) for key in chosen))
        lines.append([method, *cells])
    return lines


def _spread(values):
    if values.isna().any():
        return "-"
    deviation = f" ± {values.std():.3f}" if len(values) > 1 else ""
    return f"{values.mean():.3f}{deviation}"


def _post_hoc(folder, wanted):
    content = json.loads((folder / "runs.json").read_text(encoding="utf-8"))
    rows = _rows(folder / "runs.json", wanted)
    parts = [rows, *(_matching(content[name], wanted) for name in ("scaled", "averaged"))]
    lines = [["method", "seeds", "as it is", "temperature", "at the temperature", "seeds averaged"]]
    for method in rows["method"].unique():
        alone, scaled, averaged = (
            part[part["method"] == method] if len(part) else part for part in parts
        )
        temperature = "-"
        if len(scaled):
            cross = ", cross-fitted" if scaled["crosswise"].any() else ""
            temperature = f"{scaled['temperature'].mean():.2f}{cross}"
        cells = [_means(alone), temperature, _means(scaled), _means(averaged)]
        lines.append([method, str(len(alone)), *cells])
    columns = [column for column in zip(*lines, strict=True) if set(column[1:]) != {"-"}]
    return list(zip(*columns, strict=True))


def _means(rows):
    """Return mean NLL and ECE."""
    return " / ".join(f"{rows[key].mean():.4f}" for key in ("nll", "ece")) if len(rows) else "-"


_KINDS = {
    "table": lambda *of: _summary(*of, ("method", "epochs", "runs"), tuple(SCORES)),
    "scores": lambda *of: _summary(*of, ("method",), tuple(_MAIN)),
    "paired": _paired,
    "pooled": _pooled,
    "pooled_shifts": _pooled_shifts,
    "cost": _cost,
    "elbo": _elbo,
    "kl": _kl,
    "ablations": lambda *of: _single(*of, "ablations", "changed", "`{method}`"),
    "draws": lambda *of: _single(*of, "draws", "draws", "{samples}"),
    "shifts": _shifts,
    "ood": _ood,
    "post_hoc": _post_hoc,
}
