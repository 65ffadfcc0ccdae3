"""Tables in Markdown pages, filled from stored results.

A table in a page stands between two comments. The first says which one it is: an experiment, and
conditions on its runs, in which commas separate alternatives.

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

from experiments import store
from experiments.robustness import HELD_OUT
from experiments.scoring import SCORES

__all__ = ["PAGES", "fill", "margins", "markdown", "markdown_table", "paired"]

PAGES = ("README.md", "results/README.md", "docs/choosing.md")
"""Texts of the repository that have such tables."""

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


def markdown(summary, columns=("method",), scores=tuple(SCORES)):
    """Return rows of a summary as a Markdown table, `mean ± std`, or the score of a single seed."""
    table = pd.DataFrame(summary)[list(columns)]
    for key in scores:
        table[SCORES[key]] = [
            f"{row[key]['mean']:.4f}" + f" ± {row[key]['std']:.4f}" * (len(row["seeds"]) > 1)
            for row in summary
        ]
    return markdown_table(table)


def markdown_table(table, aligned=False):
    """Return a frame as a Markdown table."""
    cells = [list(table.columns), *table.astype(str).to_numpy().tolist()]
    rule = ["---"] * len(cells[0])
    if aligned:
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        rule = ["-" * (width + 2) for width in widths]
        cells = [[one[0].ljust(widths[0]), *map(str.rjust, one[1:], widths[1:])] for one in cells]
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
        wanted = {key: v.split(",") for key, v in (part.split("=") for part in conditions.split())}
        folder, (rows, make) = Path(results) / experiment, _KINDS[kind]
        made = make(_matching(rows(store.read(folder)[0]), wanted, folder), wanted, folder)
        return f"{begin}{markdown_table(made)}\n{end}"

    filled, count = _TABLE.subn(table, text)
    if begun := len(re.findall(_BEGIN, text)) - count:
        raise ValueError(f"Of {begun + count} tables {begun} have no end.")
    return filled


def _matching(rows, wanted, folder=None):
    """Return the rows that match all conditions; of a folder, each must match some."""
    for key, values in wanted.items():
        known = rows[key].astype(str) if key in rows else pd.Series(dtype=str)
        if folder and (absent := set(values) - set(known)):
            raise ValueError(f"{folder} has no run of {wanted} with {key} {', '.join(absent)}.")
        rows = rows[known.isin(values)] if key in rows else rows
    return rows


# What the kinds are made from: frames of runs, of shifted images, of numbers of draws.


def _runs(records):
    return pd.DataFrame(record for record in records if store.is_shown(record))


def _single(records):
    rows = pd.DataFrame(record for record in records if record["budget"] in ("ablations", "draws"))
    return rows.iloc[(rows["method"] != "reference").argsort(kind="stable")]


def _draws(records):
    rows = store.evaluated(record for record in records if record["budget"] == "draws")
    return rows.assign(draws=rows["evaluation"].str.removeprefix("draws"))


def _shifted(records):
    return store.evaluated(record for record in records if record["budget"] != "draws")


def _foreign(records):
    rows = _shifted(records)
    return rows[rows["shift"] == "foreign"]


# The kinds: functions of such a frame, the conditions, and the folder.


def _by(rows, columns, by="method", titles=None):
    """Return a table with a line for each group of rows; columns are functions of its rows."""
    groups = [rows.iloc[place] for place in rows.groupby(by, sort=False).indices.values()]
    lines = [[cell(group) for cell in columns.values()] for group in groups]
    return pd.DataFrame(lines, columns=list(columns))


def _first(key, form="{}"):
    return lambda rows: form.format(rows[key].iloc[0])


def _mean(key, form=".4f"):
    return lambda rows: f"{rows[key].mean():{form}}"


def _spread(key, digits=4):
    def cell(rows):
        if rows[key].isna().any():
            return "-"
        mean, std = (round(x, 6) for x in (rows[key].mean(), rows[key].std()))
        return f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if len(rows) > 1 else "")

    return cell


_METHOD = {"method": _first("method")}


def _table(rows, wanted, folder):
    about = {**_METHOD, "epochs": _first("epochs"), "runs": len}
    return _by(rows, about | {SCORES[key]: _spread(key) for key in SCORES}, store.KEYS)


def _scores(rows, wanted, folder):
    return _by(rows, _METHOD | {title: _spread(key) for key, title in _MAIN.items()}, store.KEYS)


def _paired(rows, wanted, folder):
    lines = []
    for first, second in _PAIRS:
        seeds = [set(rows["seed"][rows["method"] == method]) for method in (first, second)]
        if len(both := set.intersection(*seeds)) > 1:
            found = [paired(rows, first, second, key) for key in _MAIN]
            cells = [f"{change['mean']:+.4f} ± {change['error']:.4f}" for change in found]
            lines.append([first, second, len(both), *cells])
    return pd.DataFrame(lines, columns=["from", "to", "seeds", *_MAIN.values()])


def _pooled(rows, wanted, folder):
    found = {title: rows.set_index("method")[key] for key, title in _MAIN.items()}
    return _differences(found, wanted, digits=4)


def _pooled_shifts(rows, wanted, folder):
    columns = {}
    for title, (score, key, value) in _POOLED_SHIFTS.items():
        if len(chosen := rows[rows[key] == value]):
            columns[title] = chosen.groupby(["method", "seed"])[score].mean().droplevel("seed")
    return _differences(columns, wanted, digits=3)


def _differences(columns, wanted, digits):
    """Return a table of the first method's means, and how far the others' are from them."""
    if "method" not in wanted:
        raise ValueError("Differences need methods, method=first,second: those from the first.")
    first, *others = wanted["method"]
    table = {"method": wanted["method"]}
    for title, values in columns.items():
        groups = {method: values[[method]].to_list() for method in wanted["method"]}
        mean, margin = np.mean(groups[first]), margins(groups)
        table[title] = [f"{mean:.{digits}f}"] + [
            f"{np.mean(groups[method]) - mean:+.{digits}f} ± {margin[method]:.{digits}f}"
            for method in others
        ]
    return pd.DataFrame(table)


def _elbo(rows, wanted, folder):
    rows = rows.dropna(subset="negative_elbo")

    def change(found):
        if (method := found["method"].iloc[0]) == "gaussian":
            return "-"
        change = paired(rows, "gaussian", method, "negative_elbo")
        return f"{change['mean']:+.2f} ± {change['error']:.2f}"

    mean = {"negative ELBO (nats)": _mean("negative_elbo", ".2f")}
    return _by(rows, {**_METHOD, **mean, "change from the Gaussian": change})


def _kl(rows, wanted, folder):
    def kl(found):
        mean = found["train_kl"].mean() if "train_kl" in found else np.nan
        return "-" if np.isnan(mean) else f"{mean:,.0f}"

    scores = {"NLL": _mean("nll", ".3f"), "ECE": _mean("ece", ".3f")}
    return _by(rows, {**_METHOD, **scores, "KL in the end (nats)": kl})


def _cost(rows, wanted, folder):
    least = rows["parameters"][rows["method"] == "deterministic"].min()
    columns = {
        "parameters": _first("parameters", "{:,}"),
        "more": lambda found: f"{found['parameters'].iloc[0] / least - 1:.2%}",
        "training beside other runs (s)": _mean("seconds", ".0f"),
    }
    return _by(rows, _METHOD | columns)


def _each(title, key, form):
    """Return a kind of table with a line for each row."""
    columns = {title: _first(key, form)} | {SCORES[key]: _mean(key) for key in SCORES}
    return lambda rows, wanted, folder: _by(rows.reset_index(), columns, rows.reset_index().index)


def _shifts(rows, wanted, folder):
    def means(shift, levels):
        def cell(found):
            chosen = found[(found["shift"] == shift) & found["level"].isin(levels)]
            means = [f"{mean:.3f}" for mean in chosen[list(_MAIN)].mean()]
            return "-" if chosen.empty else " / ".join(means)

        return cell

    return _by(rows, _METHOD | {title: means(*which) for title, which in _SHIFTS.items()})


def _ood(rows, wanted, folder):
    def aurocs(name):
        cells = [_spread(f"{kind}_auroc", 3) for kind in ("entropy", "epistemic")]
        return lambda found: " / ".join(cell(found[found["name"] == name]) for cell in cells)

    return _by(
        rows, _METHOD | {name.replace("_", "-"): aurocs(name) for name in rows["name"].unique()}
    )


def _post_hoc(rows, wanted, folder):
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    averaged = _matching(pd.DataFrame(summary.get("averaged", ())), wanted)

    def scaled(found):
        cells = found["scaled"].dropna() if "scaled" in found else []
        return pd.DataFrame(list(cells))

    def temperature(found):
        if (part := scaled(found)).empty:
            return "-"
        cross = ", cross-fitted" if part["crosswise"].any() else ""
        return f"{part['temperature'].mean():.2f}{cross}"

    def means(part):
        if not len(part):
            return "-"
        return " / ".join(f"{part[key].mean():.4f}" for key in ("nll", "ece"))

    def ensemble(found):
        of = found["method"].iloc[0]
        return means(averaged[averaged["method"] == of] if len(averaged) else averaged)

    columns = {"seeds": len, "as it is": means, "temperature": temperature}
    columns |= {
        "at the temperature": lambda found: means(scaled(found)),
        "seeds averaged": ensemble,
    }
    table = _by(rows, _METHOD | columns)
    return table[[name for name in table if set(table[name]) != {"-"}]]


_KINDS = {
    "table": (_runs, _table),
    "scores": (_runs, _scores),
    "paired": (_runs, _paired),
    "pooled": (_runs, _pooled),
    "pooled_shifts": (_shifted, _pooled_shifts),
    "cost": (_runs, _cost),
    "elbo": (_runs, _elbo),
    "kl": (_runs, _kl),
    "ablations": (_single, _each("changed", "method", "`{}`")),
    "draws": (_draws, _each("draws", "draws", "{}")),
    "shifts": (_shifted, _shifts),
    "ood": (_foreign, _ood),
    "post_hoc": (_runs, _post_hoc),
}
