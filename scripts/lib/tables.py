"""Tables of an experiment's runs, by kind: read from the results, grouped, and made text.

The kinds:

- `table`, all scores, means and standard deviations over the seeds; `scores`, without Brier.
- `paired`: differences between methods over the seeds, with their standard errors.
- `pooled`: differences from the first method that is named, with 95 % margins from the variance of
  all that are, or of each pair where spreads differ; `pooled_shifts`, the same on shifted images.
- `cost`: parameters and time. `ablations` and `draws`: single runs.
- `elbo`: the negative ELBO. `kl`: NLL, ECE, and the KL with which training ends.
- `shifts`: accuracy, NLL and ECE on shifted images. `ood`: AUROC of the total and of the epistemic
  uncertainty.
- `post_hoc`: NLL and ECE of predictions as they are, at a temperature, averaged over the seeds, and
  both. `baselines`: the same with a row for each, and the accuracy.
- `errors`: test errors in %, NLL, ECE, parameters and seconds, beside published numbers. `pruned`:
  test errors after pruning. `unknown`: error, NLL, ECE and AUROC of unseen classes, with the
  ensemble of the deterministic networks. `turned`: the entropy of rotated images.
- `grid`: NLL and accuracy of the settings of `defaults`, a row for each part and data set.
"""

import json
import re

import numpy as np
import pandas as pd
from scipy import stats

from lib import store
from lib.scoring import HELD_OUT, SCORES

_MAIN = {key: SCORES[key] for key in ("accuracy", "nll", "ece")}


def of_experiment(folder, kind, wanted):
    """Return a table of the runs of an experiment, as a frame of text.

    Args:
        folder: of the experiment's results.
        kind: one of `KINDS`.
        wanted: conditions on the runs: for each column, the values that a row may have.
    """
    source, make = KINDS[kind]
    rows = source(store.read(folder)[0])
    for key, values in wanted.items():
        known = set(rows[key].astype(str)) if key in rows else set()
        if absent := set(values) - known:
            raise ValueError(f"{folder} has no run of {wanted} with {key} {', '.join(absent)}.")
        rows = rows[rows[key].astype(str).isin(values)]
    takes_folder = make in (_pooled, _post_hoc, _baselines, _unknown)
    more = {"wanted": wanted, "folder": folder} if takes_folder else {}
    return make(rows, **more)


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


def alike(groups):
    """Whether methods may have one variance: by Bartlett's test, which doubts it below 20 %."""
    several = [values for values in groups.values() if len(values) > 1]
    if len(several) < 2:
        return True
    with np.errstate(divide="ignore", invalid="ignore"):  # a method whose seeds are all the same
        return not stats.bartlett(*several).pvalue < 0.2


def margins(groups):
    """Return for each method by how much its distance from the first one's mean is uncertain.

    That is half of a 95 % interval for the difference of two means. The variance is estimated from
    all methods: a few seeds of two methods say little of it. If they are not `alike`, a pair whose
    Welch interval is wider has that; a narrower one would rest on spreads that are small by chance.
    """
    freedom = sum(len(values) - 1 for values in groups.values())
    if not freedom:
        raise ValueError("A variance takes at least two seeds of some method.")
    squares = sum(np.var(values) * len(values) for values in groups.values())
    scale = (squares / freedom) ** 0.5 * stats.t.ppf(0.975, freedom)
    first = next(iter(groups.values()))
    found = {name: scale * (1 / len(v) + 1 / len(first)) ** 0.5 for name, v in groups.items()}
    for name, values in groups.items() if not alike(groups) else ():
        pair = [(np.var(v, ddof=1) / len(v), len(v) - 1) for v in (values, first) if len(v) > 1]
        if len(pair) == 2 and (variance := sum(part for part, _ in pair)):
            freedom = variance**2 / sum(part**2 / count for part, count in pair)
            found[name] = max(found[name], variance**0.5 * stats.t.ppf(0.975, freedom))
    return {name: float(margin) for name, margin in found.items()}


def _runs(records):
    return pd.DataFrame(record for record in records if store.is_shown(record))


def _single(records):
    rows = pd.DataFrame(record for record in records if record["budget"] in ("ablations", "draws"))
    return rows.iloc[(rows["method"] != "reference").argsort(kind="stable")]


def _shifted(records):
    return store.evaluated(records).query("budget != 'draws'")


def _draws(records):
    return store.evaluated(records).query("budget == 'draws' and shift == 'clean'")


# Tables, as frames of text. Of a group of rows, a cell is a column and a function of its values.


def _by_method(rows, **cells):
    return rows.groupby("method", sort=False).agg(**cells).reset_index()


def _mean(form=".4f"):
    return lambda values: "-" if values.isna().any() else f"{values.mean():{form}}"


def _spread(digits=4):
    def cell(values):
        if values.isna().any():
            return "-"
        mean, std = (round(number, 6) for number in (values.mean(), values.std()))
        return f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if len(values) > 1 else "")

    return cell


def _joined(rows, columns, cell):
    if rows.empty:
        return {}
    return rows.groupby("method")[list(columns)].agg(cell).agg(" / ".join, axis=1).to_dict()


def _summary(scores, *columns):
    cells = {SCORES[key]: (key, _spread()) for key in scores} | {"runs": ("seed", "size")}
    shown = ["method", *columns, *(SCORES[key] for key in scores)]
    return lambda rows: rows.groupby(store.KEYS, sort=False).agg(**cells).reset_index()[shown]


def _single_runs(title, name):
    cells = {title: name} | {
        SCORES[key]: lambda rows, key=key: rows[key].map("{:.4f}".format) for key in SCORES
    }
    return lambda rows: rows.assign(**cells)[list(cells)]


def _paired(rows):
    lines = []
    for first, second in store.METHODS["pairs"]:
        try:
            found = [paired(rows, first, second, key) for key in _MAIN]
        except ValueError:  # too few seeds in common
            continue
        cells = [f"{change['mean']:+.4f} ± {change['error']:.4f}" for change in found]
        lines.append([first, second, found[0]["seeds"], *cells])
    return pd.DataFrame(lines, columns=["from", "to", "seeds", *_MAIN.values()])


def _pooled(rows, wanted, folder):
    if "method" not in wanted:
        raise ValueError("Differences need methods, method=first,second: those from the first.")
    (first, *others), table = wanted["method"], {"method": wanted["method"]}
    runs = {title: (key, "seed", rows["seed"].unique()) for key, title in _MAIN.items()}
    shown, digits = (store.METHODS["pooled_shifts"], 3) if "shift" in rows else (runs, 4)
    for title, (score, key, value) in shown.items():
        if (chosen := rows[rows[key].isin(np.atleast_1d(value))]).empty:
            continue
        values = chosen.groupby(["method", "seed"])[score].mean()
        groups = {method: values[method].to_list() for method in wanted["method"]}
        mean, margin = np.mean(groups[first]), margins(groups)
        title += "" if alike(groups) else " (Welch)"
        table[title] = [f"{mean:.{digits}f}"] + [
            f"{np.mean(groups[method]) - mean:+.{digits}f} ± {margin[method]:.{digits}f}"
            for method in others
        ]
    return pd.DataFrame(table)


def _elbo(rows):
    rows = rows.dropna(subset="negative_elbo")
    table = _by_method(rows, **{"negative ELBO (nats)": ("negative_elbo", _mean(".2f"))})
    change = rows.pivot(index="seed", columns="method", values="negative_elbo")
    change = change.sub(change["gaussian"], axis=0)
    cells = change.mean().map("{:+.2f}".format) + " ± " + change.sem().map("{:.2f}".format)
    cells["gaussian"] = "-"
    return table.assign(**{"change from the Gaussian": table["method"].map(cells)})


def _kl(rows):
    kl = {"KL in the end (nats)": ("train_kl", _mean(",.0f"))}
    return _by_method(rows, NLL=("nll", _mean(".3f")), ECE=("ece", _mean(".3f")), **kl)


def _cost(rows):
    least = rows["parameters"][rows["method"] == "deterministic"].min()  # NaN if there is none
    return _by_method(
        rows,
        parameters=("parameters", lambda counts: f"{counts.iloc[0]:,}"),
        more=("parameters", lambda n: f"{n.iloc[0] / least - 1:.2%}".replace("nan%", "-")),
        **{"training beside other runs (s)": ("seconds", _mean(".0f"))},
    )


def _shifts(rows):
    table = pd.DataFrame({"method": rows["method"].unique()})
    for title, (shift, levels) in store.METHODS["shifts"].items():
        chosen = rows[(rows["shift"] == shift) & rows["level"].isin(levels)]
        found = _joined(chosen, _MAIN, _mean(".3f"))
        table[title] = [found.get(method, "-") for method in table["method"]]
    return table


def _ood(rows):
    rows = rows[rows["shift"] == "foreign"]
    table = pd.DataFrame({"method": rows["method"].unique()})
    for name in rows["name"].unique():
        chosen = rows[rows["name"] == name]
        found = _joined(chosen, ["entropy_auroc", "epistemic_auroc"], _spread(3))
        table[name.replace("_", "-")] = table["method"].map(found)
    return table


def _variants(rows, folder):
    """Return frames of runs and of averages over the seeds, each as they are and scaled."""
    averaged = pd.DataFrame(json.loads((folder / "summary.json").read_text())["averaged"])
    if len(averaged):
        of_rows = averaged["budget"].isin(rows["budget"]) & averaged["method"].isin(rows["method"])
        averaged = averaged[of_rows]
    found = []
    for part in (rows, averaged):
        records = part.to_dict("records")
        both = [r for r in records if isinstance(r.get("scaled"), dict)]
        scaled = [{"method": r["method"], **r["scaled"], "ece_floor": r["ece_floor"]} for r in both]
        for form, runs in {"as it is": records, "scaled": scaled}.items():
            floors = [r["ece_floor"][form] if both else None for r in runs]
            found.append(pd.DataFrame(runs).assign(ece_floor=floors))
    return found


def _post_hoc(rows, wanted, folder):
    table, variants = _by_method(rows, seeds=("seed", "size")), _variants(rows, folder)
    found = [table["method"].map(_joined(part, ["nll", "ece"], _mean())) for part in variants]
    _, scaled, _, both = variants
    table["as it is"] = found[0]
    if len(scaled):
        cross = scaled.groupby("method")["crosswise"].any().map({True: ", cross-fitted", False: ""})
        warm = scaled.groupby("method")["temperature"].agg(_mean(".2f")) + cross
        table["temperature"] = table["method"].map(warm).fillna("-")
    table["at the temperature"], table["seeds averaged"] = found[1:3]
    if len(both):
        hot = both.set_index("method")["temperature"].map("{:.2f}".format)
        table["their temperature"] = table["method"].map(hot)
    table["averaged, at the temperature"] = found[3]
    table = table.astype(object).fillna("-")
    return table.loc[:, (table != "-").any()]


def _baselines(rows, wanted, folder):
    names = ("{}", "{} + temperature", "{} x {}", "{} x {} + temperature")
    variants, lines = list(zip(names, _variants(rows, folder), strict=True)), []
    for method in rows["method"].unique():
        for name, part in variants:
            chosen = part[part["method"] == method] if len(part) else part
            if len(chosen):
                cells = [_spread()(chosen[key]) for key in _MAIN]
                count = (rows["method"] == method).sum()
                lines.append([name.format(method, count), *cells, _mean()(chosen["ece_floor"])])
    return pd.DataFrame(lines, columns=["", *_MAIN.values(), "ECE floor"])


def _error_scores(rows, **cells):
    own = {"error (%)": ("error", _spread(2))} | {_MAIN[k]: (k, _spread()) for k in ("nll", "ece")}
    return _by_method(rows.assign(error=100 * (1 - rows["accuracy"])), **own, **cells)


def _errors(rows):
    table = _error_scores(rows).merge(_cost(rows))
    (budget,) = rows["budget"].unique()
    published = table["method"].map(store.METHODS["published"].get(budget, {})).fillna("-")
    return table.assign(published=published)


def _pruned(rows):
    rows = rows[rows["weights"].map(lambda found: isinstance(found, dict) and "pruned" in found)]
    lines = [
        (row["method"], f"{one['removed']:.0%}", 100 - 100 * one["accuracy"])
        for row in rows.to_dict("records")
        for one in row["weights"]["pruned"]
    ]
    table = pd.DataFrame(lines, columns=["method", "removed", "error"])
    table = table.pivot_table("error", "method", "removed", _spread(2), sort=False)
    return table.reset_index().rename(columns={"method": "error (%) without"})


def _unknown(rows, wanted, folder):
    of_ood = store.evaluated(rows.to_dict("records"))
    of_ood = of_ood[of_ood["name"] == HELD_OUT]
    rows = rows.merge(of_ood[["method", "seed", "entropy_auroc"]], on=["method", "seed"])
    averaged = _variants(rows, folder)[2].query("method == 'deterministic'")
    rows = pd.concat([rows, averaged.assign(method="ensemble")])
    table = _error_scores(rows, **{"AUROC of unseen": ("entropy_auroc", _spread())})
    published = table["method"].map(store.METHODS["published"]["equal"]).fillna("-")
    return table.assign(**{"published error (%)": published})


def _turned(rows):
    rows = rows[rows["level"].isin((0, 45, 90, 135, 180))]
    table = rows.pivot_table("entropy", "method", "level", _spread(3), sort=False)
    table.columns = [f"{level:g}°" for level in table.columns]
    return table.reset_index()


def _grid(rows):
    def shown(scores):
        nll, accuracy = pd.DataFrame(list(scores))[["nll", "accuracy"]].mean()
        return f"{nll:.3f} / {accuracy:.3f}"

    cells = {}
    for (part, dataset, method), group in rows.groupby(["budget", "dataset", "method"], sort=False):
        cell = cells.setdefault((part, dataset), {"part": part, "data": dataset})
        name = re.sub(r"prior_(\d+)_start_(\d+)_beta_(\d+)", r"0.\1, 0.\2, \3", method)
        cell[name] = shown(group[["nll", "accuracy"]].to_dict("records"))
        if method == "deterministic":
            cell["+ temperature"] = shown(group["scaled"])
    table = pd.DataFrame(list(cells.values())).fillna("-")
    first = ["part", "data", "untreated", "deterministic", "+ temperature"]
    return table[[*first, *(name for name in table if name not in first)]]


KINDS = {
    "table": (_runs, _summary(SCORES, "epochs", "runs")),
    "scores": (_runs, _summary(_MAIN)),
    "paired": (_runs, _paired),
    "pooled": (_runs, _pooled),
    "pooled_shifts": (_shifted, _pooled),
    "cost": (_runs, _cost),
    "elbo": (_runs, _elbo),
    "kl": (_runs, _kl),
    "ablations": (_single, _single_runs("changed", lambda rows: "`" + rows["method"] + "`")),
    "draws": (_draws, _single_runs("draws", lambda rows: rows["evaluation"].str[5:])),
    "shifts": (_shifted, _shifts),
    "ood": (_shifted, _ood),
    "post_hoc": (_runs, _post_hoc),
    "baselines": (_runs, _baselines),
    "errors": (_runs, _errors),
    "pruned": (_runs, _pruned),
    "unknown": (_runs, _unknown),
    "turned": (_shifted, _turned),
    "grid": (_runs, _grid),
}
"""For each kind, the function that takes rows from records, and the one that makes their table."""
