"""Tables of an experiment: mean and standard deviation over the seeds."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from experiments._markdown import markdown_table

__all__ = ["SCORES", "margins", "markdown", "paired", "summarise"]

SCORES = ("accuracy", "nll", "brier", "ece")
"""What every row of a table has."""

_KEYS = ("dataset", "model", "method", "budget", "epochs", "samples")
_TITLES = {"accuracy": "accuracy", "nll": "NLL", "brier": "Brier", "ece": "ECE"}


def summarise(rows: Iterable[dict[str, Any]], **common: Any) -> list[dict[str, Any]]:
    """Return one row for each method, budget and data set, over its seeds.

    Args:
        rows: one a run, with `dataset`, `model`, `method`, `budget`, `epochs`, `samples`, `seed`,
            the scores, and anything else that does not depend on the seed.
        **common: what is the same in all rows, such as the command.

    Example:
        >>> from experiments import summary
        >>> run = {
        ...     "dataset": "digits",
        ...     "model": "mlp",
        ...     "method": "flow",
        ...     "budget": "equal",
        ...     "epochs": 5,
        ...     "samples": 8,
        ...     "nll": 0.5,
        ...     "brier": 0.2,
        ...     "ece": 0.1,
        ... }
        >>> rows = [{**run, "seed": 0, "accuracy": 0.8}, {**run, "seed": 1, "accuracy": 0.9}]
        >>> summary.summarise(rows, backend="jax")[0]["accuracy"]
        {'mean': 0.85, 'std': 0.0707}
    """
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in _KEYS), []).append(row)
    table = []
    for keys, group in groups.items():
        extra = {
            key: value
            for key, value in group[0].items()
            if key not in (*_KEYS, *SCORES, "seed") and all(row.get(key) == value for row in group)
        }
        for key in ("backend", "hardware"):
            # Seeds may have been run in different places, and all are named.
            if places := dict.fromkeys(row[key] for row in group if key in row):
                extra[key] = " | ".join(places)
        scores = {key: _spread([row[key] for row in group]) for key in SCORES}
        seeds = [row["seed"] for row in group]
        table.append(
            {**dict(zip(_KEYS, keys, strict=True)), "seeds": seeds, **scores, **extra, **common}
        )
    return table


def markdown(
    table: Sequence[dict[str, Any]],
    columns: Sequence[str] = ("method",),
    scores: Sequence[str] = SCORES,
) -> str:
    """Return rows of a summary as a Markdown table, `mean ± std`, or the score of a single seed.

    Args:
        table: rows from `summarise`.
        columns: keys that stand before the scores.
        scores: some of `SCORES`.
    """
    lines = [[*columns, *(_TITLES[key] for key in scores)]]
    for row in table:
        several = len(row["seeds"]) > 1
        cells = [
            f"{row[key]['mean']:.4f}" + (f" ± {row[key]['std']:.4f}" if several else "")
            for key in scores
        ]
        lines.append([*(str(row[key]) for key in columns), *cells])
    return markdown_table(lines)


def paired(
    rows: Iterable[dict[str, Any]], first: str, second: str, score: str
) -> dict[str, float | int]:
    """Return the mean difference `second - first` of a score over the seeds both have.

    Args:
        rows: one a run, of one data set and budget.
        first: a method.
        second: another method.
        score: which score.

    Returns:
        `mean`, `error` (the standard error of the mean) and `seeds`.
    """
    by_seed: dict[int, dict[str, float]] = {}
    for row in rows:
        by_seed.setdefault(row["seed"], {})[row["method"]] = row[score]
    changes = [
        both[second] - both[first] for both in by_seed.values() if {first, second} <= both.keys()
    ]
    if len(changes) < 2:
        raise ValueError(f"{first!r} and {second!r} need at least two seeds in common.")
    error = float(np.std(changes, ddof=1)) / len(changes) ** 0.5
    return {"mean": float(np.mean(changes)), "error": error, "seeds": len(changes)}


def margins(groups: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return for each method by how much its distance from the first one's mean is uncertain.

    That is half of a 95 % interval for the difference of two means. The variance is taken to be the
    same for all methods, and estimated from all: a few seeds of two methods say little of it.

    Args:
        groups: the score of each seed, by method; some method has two or more.
    """
    freedom = sum(len(values) - 1 for values in groups.values())
    if not freedom:
        raise ValueError("A variance takes at least two seeds of some method.")
    squares = sum(np.var(values) * len(values) for values in groups.values())
    scale = (squares / freedom) ** 0.5 * stats.t.ppf(0.975, freedom)
    first = len(next(iter(groups.values())))
    return {
        method: float(scale * (1 / len(values) + 1 / first) ** 0.5)
        for method, values in groups.items()
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Return mean and standard deviation, 0 for a single value."""
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return {"mean": round(float(np.mean(values)), 6), "std": round(deviation, 6)}
