"""What a benchmark leaves: rows with their targets, as JSON, as lines and as a Markdown table."""

import datetime
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfp_ibnn._core import files
from tfp_ibnn.experiments._markdown import markdown_table
from tfp_ibnn.experiments.provenance import provenance

__all__ = [
    "Row",
    "compare",
    "fill",
    "line",
    "markdown",
    "other_machine",
    "read",
    "row",
    "write",
]

Row = dict[str, Any]
"""One case: `id`, `group`, `label`, `unit`, `target` (or None), `ratio`, `median`, `noise` and
`seconds`, and what else is worth keeping."""

UNITS = {"x": "", "s": " s", "%": " %", "exponent": ""}

FLOOR = 0.05
"""Share of a stored ratio by which two runs of the same code may differ: processes differ in where
their memory lies and on which core they land, which the rounds of one process do not show."""

CEILING = 0.25
"""Share of a stored ratio that is too much more, however noisy the runs were."""

_NEEDED = {"id", "group", "label", "unit", "target", "ratio", "median", "noise", "seconds"}
_TABLE = re.compile(r"(<!-- benchmark: (\w+) (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def row(
    name: str,
    label: str,
    measured: dict[str, float],
    target: float | None = None,
    unit: str = "x",
    seconds: dict[str, float] | None = None,
    **more: Any,
) -> Row:
    """Return a row.

    Args:
        name: its id, which begins with the group's name and a dot.
        label: for people.
        measured: `ratio`, `median` and `noise`; see `timing.ratio`.
        target: the largest ratio that is wanted.
        unit: "x" for a ratio, "s" for seconds, "%" for a share, "exponent" of growth.
        seconds: absolute times, by name.
        **more: further entries.
    """
    numbers = {key: round(float(value), 6) for key, value in measured.items()}
    times = {key: float(f"{value:.5g}") for key, value in (seconds or {}).items()}
    group = name.partition(".")[0]
    return {
        "id": name,
        "group": group,
        "label": label,
        "unit": unit,
        "target": target,
        **numbers,
        "seconds": times,
        **more,
    }


def line(found: Row) -> str:
    """Return a row for the terminal, target and measured number side by side."""
    noise = f"± {_number(found['noise'], found)}" if found["noise"] else ""
    return (
        f"{found['label']:66}{_target(found):>10}{_number(found['ratio'], found):>10} {noise:10}"
        f"{_verdict(found)}"
    )


def markdown(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table."""
    lines = [["", "target", "measured", "median", ""]]
    for found in rows:
        measured = _number(found["ratio"], found)
        if found["noise"]:
            measured += f" ± {_number(found['noise'], found)}"
        median = _number(found["median"], found)
        lines.append([found["label"], _target(found), measured, median, _verdict(found)])
    return markdown_table(lines)


def write(path: str | os.PathLike, rows: Sequence[Row], options: dict[str, Any]) -> None:
    """Write rows with all that it takes to repeat them.

    Args:
        path: of the JSON file.
        rows: the cases.
        options: of the command.
    """
    record = {
        "rows": list(rows),
        **provenance(options),
        "cores": _cores(),
        "threads": {name: os.environ[name] for name in _THREADS if name in os.environ},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, record)


def read(path: str | os.PathLike) -> dict[str, Any]:
    """Return what `write` has written, or raise `ValueError` if it is something else."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        rows = record["rows"]
        good = all(row.keys() >= _NEEDED and math.isfinite(row["ratio"]) for row in rows)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no record of a benchmark: {error!r}.") from None
    if not good:
        raise ValueError(f"{path} is no record of a benchmark: its rows lack entries.")
    return record


def compare(rows: Sequence[Row], stored: Sequence[Row], factor: float | None = None) -> list[str]:
    """Return a line for each row that is worse than the stored one of its id.

    A row is worse if its ratio is above the stored one by more than twice the noise of both
    together, and by more than `FLOOR` of it; `CEILING` of it is too much on any machine.

    Args:
        rows: of this run.
        stored: of another; rows that only one of them has are left out.
        factor: instead of all this, how many times the stored ratio, or the target, is too much.
    """
    before = {found["id"]: found for found in stored}
    worse = []
    for found in rows:
        old = before.get(found["id"])
        if old is None:
            continue
        noise = 2 * math.hypot(found["noise"], old["noise"])
        size = 1.0 if old["unit"] == "exponent" else abs(old["ratio"])
        limit = old["ratio"] + min(max(noise, FLOOR * size), CEILING * size)
        if factor is not None:
            limit = factor * max(old["ratio"], old["target"] or 0)
        if found["ratio"] > limit:
            numbers = (_number(value, found) for value in (found["ratio"], old["ratio"], limit))
            worse.append("{}: {}, stored {}, limit {}".format(found["label"], *numbers))
    return worse


def other_machine(stored: dict[str, Any]) -> str | None:
    """Return what differs between the machine of a record and this one, or None."""
    here = provenance({})["hardware"], _cores()
    there = stored.get("hardware"), stored.get("cores")
    if here == there:
        return None
    return f"stored on {there[0]} ({there[1]} in use), this is {here[0]} ({here[1]} in use)"


def fill(text: str, results: str | os.PathLike) -> str:
    """Return a Markdown text with its tables filled from a folder of records.

    A table stands between two comments, of which the first names the file and the group. Where
    there is no such file, it stays as it is.

        <!-- benchmark: cpu training -->
        <!-- end -->

    `machine` in place of a group tells where and how the run was made.
    """

    def table(match: re.Match) -> str:
        begin, name, group, end = match.groups()
        path = Path(results) / f"{name}.json"
        if not path.exists():
            return match[0]
        record = read(path)
        if group == "machine":
            return f"{begin}{_machine(record)}\n{end}"
        chosen = [found for found in record["rows"] if found["group"] == group]
        if not chosen:
            raise ValueError(f"{name}.json has no rows of the group {group!r}.")
        return f"{begin}{markdown(chosen)}\n{end}"

    return _TABLE.sub(table, text)


_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "NPROC")


def _machine(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return (
        f"`{record['command']}`, {record['date']}: {record['hardware']}, {record['cores']} in use; "
        f"Python {record['python']}, {versions}."
    )


def _cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _number(value: float, found: Row) -> str:
    digits = 3 if abs(value) < 10 and found["unit"] != "%" else 2
    return f"{value:.{digits}f}{UNITS[found['unit']]}"


def _target(found: Row) -> str:
    return "" if found["target"] is None else f"<= {found['target']:g}{UNITS[found['unit']]}"


def _verdict(found: Row) -> str:
    if found["target"] is None:
        return ""
    return "met" if found["ratio"] <= found["target"] else "missed"
