"""Tables in Markdown files, filled from the results they show.

A table stands between two comments. The first says which one it is: an experiment, and what its
rows have in common.

    <!-- table: lenet dataset=cifar10 budget=equal -->
    <!-- end -->

`scores` in place of `table` leaves out the Brier score; `paired` gives differences between methods
over the seeds, with their standard errors.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfp_ibnn.experiments import summary

__all__ = ["fill"]

_TABLE = re.compile(
    r"(<!-- (table|scores|paired): (\w+)([^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL
)
_PAIRS = (
    ("deterministic", "mc_dropout"),
    ("deterministic", "gaussian"),
    ("deterministic", "mixture"),
    ("deterministic", "flow"),
    ("gaussian", "flow"),
)


def fill(text: str, results: str | os.PathLike) -> str:
    """Return a Markdown text with its tables filled from a folder of results.

    Args:
        text: with comments as the module describes them.
        results: folder with a folder for each experiment.
    """

    def table(match: re.Match) -> str:
        begin, kind, experiment, conditions, end = match.groups()
        wanted = dict(part.split("=") for part in conditions.split())
        return f"{begin}{_KINDS[kind](Path(results) / experiment, wanted)}\n{end}"

    return _TABLE.sub(table, text)


def _rows(path: Path, wanted: dict[str, str]) -> list[dict[str, Any]]:
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = content if isinstance(content, list) else content["runs"]
    rows = [row for row in rows if all(str(row[key]) == value for key, value in wanted.items())]
    if not rows:
        raise ValueError(f"{path} has no row with {wanted}.")
    return rows


def _full(folder: Path, wanted: dict[str, str]) -> str:
    return summary.markdown(_rows(folder / "summary.json", wanted), ("method", "epochs"))


def _scores(folder: Path, wanted: dict[str, str]) -> str:
    rows = _rows(folder / "summary.json", wanted)
    return summary.markdown(rows, ("method",), ("accuracy", "nll", "ece"))


def _paired(folder: Path, wanted: dict[str, str]) -> str:
    rows = _rows(folder / "runs.json", wanted)
    methods = {row["method"] for row in rows}
    lines = ["| from | to | accuracy | NLL | ECE |", "|---|---|---|---|---|"]
    for first, second in _PAIRS:
        if {first, second} <= methods:
            found = [summary.paired(rows, first, second, key) for key in ("accuracy", "nll", "ece")]
            cells = [f"{change['mean']:+.4f} ± {change['error']:.4f}" for change in found]
            lines.append("| " + " | ".join([first, second, *cells]) + " |")
    return "\n".join(lines)


_KINDS: dict[str, Callable[[Path, dict[str, str]], str]] = {
    "table": _full,
    "scores": _scores,
    "paired": _paired,
}
