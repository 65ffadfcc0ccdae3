"""The numbers of an evaluation, as tables to be printed."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments._markdown import markdown_table

__all__ = ["table"]

Row = dict[str, Any]

_SCORES = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "brier": "Brier",
    "ece": "ECE",
    "entropy": "entropy",
    "epistemic": "epistemic",
}
_DETECTION = {"auroc": "AUROC", "aupr": "AUPR", "fpr95": "FPR95"}


def table(rows: Sequence[Row]) -> str:
    """Return rows of `robustness.json` as Markdown tables.

    One has the labelled images, of the corruptions their mean at each severity; the other, if there
    are any, the foreign datasets.
    """
    tables = [[["images", *_SCORES.values()], *map(_labelled, _averaged(rows))]]
    if strangers := [row for row in rows if row["shift"] == "foreign"]:
        head = ["foreign", "by", *_DETECTION.values(), "mean known", "mean foreign"]
        kinds = ("entropy", "epistemic")
        cells = [_foreign(row, kind, rows[0]) for row in strangers for kind in kinds]
        tables.append([head, *cells])
    return "\n\n".join(markdown_table(cells, aligned=True) for cells in tables)


def _averaged(rows: Sequence[Row]) -> list[Row]:
    """Return the labelled rows; of the corruptions of one severity, the mean."""
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        if row["shift"] != "foreign":
            groups.setdefault((row["shift"], row["level"]), []).append(row)
    return [
        {
            "shift": shift,
            "name": group[0]["name"] if len(group) == 1 else f"mean of {len(group)}",
            "level": level,
            **{key: float(np.mean([row[key] for row in group])) for key in _SCORES},
        }
        for (shift, level), group in groups.items()
    ]


def _labelled(row: Row) -> list[str]:
    label = {
        "clean": "clean",
        "corruption": f"corrupted ({row['name']}), severity {row['level']}",
        "rotation": f"rotated by {row['level']:g} degrees",
        "fgsm": f"FGSM, epsilon {row['level']:g}",
    }[row["shift"]]
    return [label, *(_number(row[key]) for key in _SCORES)]


def _foreign(row: Row, kind: str, clean: Row) -> list[str]:
    scores = [row[f"{kind}_{score}"] for score in _DETECTION]
    return [row["name"], kind, *map(_number, [*scores, clean[kind], row[kind]])]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
