"""Tables in Markdown files, filled from the results they show.

A table stands between two comments. The first says which one it is: an experiment, and conditions
on its rows, in which commas separate alternatives.

    <!-- table: lenet dataset=cifar10 budget=equal method=gaussian,flow -->
    <!-- end -->

The kinds of tables:

- `table`, all scores, means and standard deviations over the seeds; `scores`, without Brier.
- `paired`: differences between methods over the seeds, with their standard errors.
- `pooled`: differences from the first method that is named, with 95 % margins from the variance of
  all that are; `pooled_shifts`, the same on shifted and foreign images.
- `cost`: parameters and time.
- `elbo`: the negative ELBO. `kl`: NLL, ECE, and the KL with which training ends.
- `ablations` and `draws`: single runs.
- `shifts`: accuracy, NLL and ECE on shifted images. `foreign`: AUROC of the total and of the
  epistemic uncertainty.
- `afterwards`: NLL and ECE of predictions as they are, at a temperature, averaged over the seeds.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments import summary
from experiments._markdown import markdown_table
from experiments.robustness import HELD_OUT

__all__ = ["PAGES", "fill"]

PAGES = ("README.md", "results/README.md", "docs/choosing.md")
"""Texts of the repository that have such tables."""

_BEGIN = r"<!-- (\w+): (\w+)([^>]*?) -->\n"
_TABLE = re.compile(rf"({_BEGIN})(?:(?!<!--).)*(<!-- end -->)", re.DOTALL)
_PAIRS = (
    ("deterministic", "mc_dropout"),
    ("deterministic", "gaussian"),
    ("deterministic", "fixed_inner"),
    ("deterministic", "mixture"),
    ("deterministic", "flow"),
    ("mc_dropout", "gaussian"),
    ("gaussian", "flow"),
    ("gaussian", "mixture_4"),
    ("gaussian", "mixture_16"),
    ("gaussian", "mixture_16_ibnn"),
    ("gaussian", "flow_first"),
    ("gaussian", "flow_last"),
    ("gaussian", "flow_over_mixture"),
    ("mixture_4", "flow_over_mixture"),
    ("gaussian", "flow_planar"),
    ("gaussian", "flow_iaf"),
    ("gaussian", "flow_sylvester"),
    ("gaussian", "gaussian_inner"),
    ("gaussian", "fixed_inner"),
    ("gaussian_inner", "fixed_inner"),
    ("gaussian", "gaussian_elbo"),
    ("gaussian_elbo", "flow_elbo"),
)


def fill(text: str, results: str | os.PathLike) -> str:
    """Return a Markdown text with its tables filled from a folder of results.

    Args:
        text: with comments as the module describes them.
        results: folder with a folder for each experiment.
    """

    def table(match: re.Match) -> str:
        begin, kind, experiment, conditions, end = match.groups()
        if kind not in _KINDS:
            raise ValueError(f"{begin.strip()} is no kind of table: known are {', '.join(_KINDS)}.")
        if not all(re.fullmatch("[^=]+=[^=]+", part) for part in conditions.split()):
            raise ValueError(f"Conditions have the form key=value, not as in {begin.strip()}.")
        wanted = dict(part.split("=") for part in conditions.split())
        return f"{begin}{_KINDS[kind](Path(results) / experiment, wanted)}\n{end}"

    filled, count = _TABLE.subn(table, text)
    if begun := len(re.findall(_BEGIN, text)) - count:
        raise ValueError(f"Of {begun + count} tables {begun} have no end.")
    return filled


def _rows(path: Path, wanted: dict[str, str], part: str = "runs") -> list[dict[str, Any]]:
    content = _content(path)
    rows = content if isinstance(content, list) else content.get(part, content.get("rows"))
    found = _matching(rows, wanted)
    for key, value in wanted.items():
        if absent := set(value.split(",")) - {str(row.get(key)) for row in found}:
            raise ValueError(f"{path} has no row of {wanted} with {key} {', '.join(absent)}.")
    return found


def _matching(rows: list[dict[str, Any]], wanted: dict[str, str]) -> list[dict[str, Any]]:
    return [
        row
        for row in rows
        if all(str(row[key]) in value.split(",") for key, value in wanted.items() if key in row)
    ]


def _named(wanted: dict[str, str]) -> list[str]:
    """Return the methods in the order in which a comment names them."""
    if "method" not in wanted:
        raise ValueError("Differences need methods, method=first,second: those from the first.")
    return wanted["method"].split(",")


def _content(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _full(folder: Path, wanted: dict[str, str]) -> str:
    rows = _rows(folder / "summary.json", wanted)
    counted = [{**row, "runs": len(row["seeds"])} for row in rows]
    return summary.markdown(counted, ("method", "epochs", "runs"))


def _scores(folder: Path, wanted: dict[str, str]) -> str:
    rows = _rows(folder / "summary.json", wanted)
    return summary.markdown(rows, ("method",), ("accuracy", "nll", "ece"))


def _paired(folder: Path, wanted: dict[str, str]) -> str:
    rows = _rows(folder / "runs.json", wanted)
    lines = [["from", "to", "seeds", "accuracy", "NLL", "ECE"]]
    for first, second in _PAIRS:
        common = set.intersection(*(_seeds(rows, method) for method in (first, second)))
        if len(common) > 1:
            found = [summary.paired(rows, first, second, key) for key in ("accuracy", "nll", "ece")]
            cells = [f"{change['mean']:+.4f} ± {change['error']:.4f}" for change in found]
            lines.append([first, second, str(len(common)), *cells])
    return markdown_table(lines)


def _pooled(folder: Path, wanted: dict[str, str]) -> str:
    rows = _rows(folder / "runs.json", wanted)
    columns = {"accuracy": "accuracy", "NLL": "nll", "ECE": "ece"}
    return _differences(
        {
            title: {
                method: [row[key] for row in rows if row["method"] == method]
                for method in _named(wanted)
            }
            for title, key in columns.items()
        },
        digits=4,
    )


def _pooled_shifts(folder: Path, wanted: dict[str, str]) -> str:
    rows = _rows(folder / "robustness.json", wanted)
    columns = {
        "corrupted: accuracy": ("accuracy", "shift", "corruption"),
        "corrupted: NLL": ("nll", "shift", "corruption"),
        "rotated: accuracy": ("accuracy", "shift", "rotation"),
        "rotated: NLL": ("nll", "shift", "rotation"),
        f"AUROC: {HELD_OUT}": ("entropy_auroc", "name", HELD_OUT),
        "AUROC: fashion-mnist": ("entropy_auroc", "name", "fashion_mnist"),
        "AUROC: mnist": ("entropy_auroc", "name", "mnist"),
    }
    values = {}
    for title, (score, key, value) in columns.items():
        if not any(row[key] == value for row in rows):
            continue
        values[title] = {}
        for method in _named(wanted):
            found = [row for row in rows if (row["method"], row[key]) == (method, value)]
            values[title][method] = [
                float(np.mean([row[score] for row in found if row["seed"] == seed]))
                for seed in sorted(_seeds(found, method))
            ]
    return _differences(values, digits=3)


def _differences(columns: dict[str, dict[str, list[float]]], digits: int) -> str:
    """Return a table of the first method's means, and how far the others' are from them."""
    lines = [["method", *columns]]
    first, *others = next(iter(columns.values()))
    means = {title: np.mean(groups[first]) for title, groups in columns.items()}
    lines.append([first, *(f"{mean:.{digits}f}" for mean in means.values())])
    for method in others:
        cells = [
            f"{np.mean(groups[method]) - means[title]:+.{digits}f}"
            f" ± {summary.margins(groups)[method]:.{digits}f}"
            for title, groups in columns.items()
        ]
        lines.append([method, *cells])
    return markdown_table(lines)


def _elbo(folder: Path, wanted: dict[str, str]) -> str:
    rows = [row for row in _rows(folder / "runs.json", wanted) if "negative_elbo" in row]
    lines = [["method", "negative ELBO (nats)", "change from the Gaussian"]]
    for method in dict.fromkeys(row["method"] for row in rows):
        mean = np.mean([row["negative_elbo"] for row in rows if row["method"] == method])
        cell = "-"
        if method != "gaussian" and len(_seeds(rows, method) & _seeds(rows, "gaussian")) > 1:
            change = summary.paired(rows, "gaussian", method, "negative_elbo")
            cell = f"{change['mean']:+.2f} ± {change['error']:.2f}"
        lines.append([method, f"{mean:.2f}", cell])
    return markdown_table(lines)


def _kl(folder: Path, wanted: dict[str, str]) -> str:
    rows = _rows(folder / "runs.json", wanted)
    lines = [["method", "NLL", "ECE", "KL in the end (nats)"]]
    for method in dict.fromkeys(row["method"] for row in rows):
        found = [row for row in rows if row["method"] == method]
        scores = [f"{np.mean([row[key] for row in found]):.3f}" for key in ("nll", "ece")]
        kls = [row["train_kl"] for row in found if "train_kl" in row]
        lines.append([method, *scores, f"{np.mean(kls):,.0f}" if kls else "-"])
    return markdown_table(lines)


def _seeds(rows: list[dict[str, Any]], method: str) -> set[int]:
    return {row["seed"] for row in rows if row["method"] == method}


def _cost(folder: Path, wanted: dict[str, str]) -> str:
    rows = _rows(folder / "runs.json", wanted)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    least = min(row["parameters"] for row in rows if row["method"] == "deterministic")
    lines = [["method", "parameters", "more", "training beside other runs (s)"]]
    for method in methods:
        found = [row for row in rows if row["method"] == method]
        count = found[0]["parameters"]
        seconds = np.mean([row["seconds"] for row in found])
        lines.append([method, f"{count:,}", f"{count / least - 1:.2%}", f"{seconds:.0f}"])
    return markdown_table(lines)


def _ablations(folder: Path, wanted: dict[str, str]) -> str:
    rows = _rows(folder / "runs.json", wanted, "ablations")
    return _single(rows, "changed", lambda row: f"`{row['method']}`")


def _draws(folder: Path, wanted: dict[str, str]) -> str:
    rows = _rows(folder / "runs.json", wanted, "draws")
    return _single(rows, "draws", lambda row: str(row["samples"]))


def _single(rows: list[dict[str, Any]], title: str, name: Callable[[dict[str, Any]], str]) -> str:
    """Return a table of single runs."""
    keys = ("accuracy", "nll", "brier", "ece")
    lines = [[title, "accuracy", "NLL", "Brier", "ECE"]]
    lines += [[name(row), *(f"{row[key]:.4f}" for key in keys)] for row in rows]
    return markdown_table(lines)


def _shifts(folder: Path, wanted: dict[str, str]) -> str:
    rows = _rows(folder / "robustness.json", wanted)
    columns = {
        "clean": ("clean", (0,)),
        "corrupted, 1 and 2": ("corruption", (1, 2)),
        "3 and 4": ("corruption", (3, 4)),
        "5": ("corruption", (5,)),
        "rotated by 30°": ("rotation", (30,)),
    }
    lines = [["method", *columns]]
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for shift, levels in columns.values():
            found = [
                row
                for row in rows
                if (row["method"], row["shift"]) == (method, shift) and row["level"] in levels
            ]
            means = [
                np.mean([row[key] for row in found] or 0) for key in ("accuracy", "nll", "ece")
            ]
            cells.append(" / ".join(f"{mean:.3f}" for mean in means) if found else "-")
        lines.append([method, *cells])
    return markdown_table(lines)


def _foreign(folder: Path, wanted: dict[str, str]) -> str:
    rows = _rows(folder / "robustness.json", {**wanted, "shift": "foreign"})
    names = list(dict.fromkeys(row["name"] for row in rows))
    lines = [["method", *(name.replace("_", "-") for name in names)]]
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for name in names:
            found = [row for row in rows if (row["method"], row["name"]) == (method, name)]
            kinds = [[row[f"{kind}_auroc"] for row in found] for kind in ("entropy", "epistemic")]
            cells.append(" / ".join("-" if None in kind else _spread(kind) for kind in kinds))
        lines.append([method, *cells])
    return markdown_table(lines)


def _afterwards(folder: Path, wanted: dict[str, str]) -> str:
    rows, content = _rows(folder / "runs.json", wanted), _content(folder / "runs.json")
    head = ["method", "seeds", "as it is", "temperature", "at the temperature", "seeds averaged"]
    lines = [head]
    for method in dict.fromkeys(row["method"] for row in rows):
        alone, scaled, averaged = (
            [row for row in _matching(all_, wanted) if row["method"] == method]
            for all_ in (rows, content["scaled"], content["averaged"])
        )
        temperature = f"{np.mean([row['temperature'] for row in scaled]):.2f}" if scaled else "-"
        if any(row["crosswise"] for row in scaled):
            temperature += ", crosswise"
        cells = [_means(alone), temperature, _means(scaled), _means(averaged)]
        lines.append([method, str(len(alone)), *cells])
    columns = [column for column in zip(*lines, strict=True) if set(column[1:]) != {"-"}]
    return markdown_table([list(line) for line in zip(*columns, strict=True)])


def _means(rows: list[dict[str, Any]]) -> str:
    """Return mean NLL and ECE."""
    means = [f"{np.mean([row[key] for row in rows]):.4f}" for key in ("nll", "ece") if rows]
    return " / ".join(means) or "-"


def _spread(values: list[float]) -> str:
    deviation = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{deviation}"


_KINDS: dict[str, Callable[[Path, dict[str, str]], str]] = {
    "table": _full,
    "scores": _scores,
    "paired": _paired,
    "pooled": _pooled,
    "pooled_shifts": _pooled_shifts,
    "cost": _cost,
    "elbo": _elbo,
    "kl": _kl,
    "ablations": _ablations,
    "draws": _draws,
    "shifts": _shifts,
    "foreign": _foreign,
    "afterwards": _afterwards,
}
