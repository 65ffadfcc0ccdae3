"""What a benchmark leaves: rows with their targets, as JSON, as lines and as a Markdown table.

A row is a case: `id`, `group`, `label`, `unit`, `target` (or None), `ratio`, `median`, `noise` and
`seconds`, and what else is worth keeping.
"""

import datetime
import json
import math
import os
import re
from pathlib import Path

import pandas as pd

from lib import files
from lib.markdown import markdown_table
from lib.store import provenance

UNITS = {"x": "", "s": " s", "%": " %", "exponent": ""}
# Share of a stored ratio by which two runs of the same code may differ: processes differ in where
# their memory lies and on which core they land, which the rounds of one process do not show.
FLOOR = 0.05
CEILING = 0.25  # what is too much more, however noisy the runs were
_NEEDED = {"id", "group", "label", "unit", "target", "ratio", "median", "noise", "seconds"}
_TABLE = re.compile(r"(<!-- benchmark: (\w+) (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "NPROC")


def row(name, label, measured, target=None, unit="x", seconds=None, **more):
    """Return a row; its name begins with that of the group and a dot, `timing.ratio` measures."""
    about = {"id": name, "group": name.partition(".")[0], "label": label, "unit": unit}
    numbers = {key: round(float(value), 6) for key, value in measured.items()}
    times = {key: float(f"{value:.5g}") for key, value in (seconds or {}).items()}
    return {**about, "target": target, **numbers, "seconds": times, **more}


def line(found):
    """Return a row for the terminal, target and measured number side by side."""
    target, measured, noise, _, _, verdict = _cells(found)
    return f"{found['label']:66}{target:>10}{measured:>10} {noise:10}{verdict}"


def _cells(found):
    """Return target, ratio, noise, median and milliseconds as texts, and the verdict."""
    noise = f"± {_number(found['noise'], found)}" if found["noise"] else ""
    ratio, median = (_number(found[key], found) for key in ("ratio", "median"))
    times = [1000 * seconds for seconds in list(found["seconds"].values())[:2]]
    times = [f"{time:,.0f}" if time >= 1000 else f"{time:.3g}" for time in times]
    target = "" if found["target"] is None else f"<= {found['target']:g}{UNITS[found['unit']]}"
    return target, ratio, noise, median, " / ".join(times), verdict(found)


def verdict(found):
    """Return whether a row's target is "met", "missed" or, within the noise, "unresolved"."""
    if found["target"] is None:
        return ""
    if abs(found["ratio"] - found["target"]) < found["noise"]:
        return "unresolved"
    return "met" if found["ratio"] <= found["target"] else "missed"


def _number(value, found):
    digits = 3 if abs(value) < 10 and found["unit"] != "%" else 2
    return f"{value:.{digits}f}{UNITS[found['unit']]}"


def write(path, rows, options):
    """Write rows, and the options of the command, with all that it takes to repeat them."""
    threads = {name: os.environ[name] for name in _THREADS if name in os.environ}
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    record = {"rows": list(rows), **provenance(options), "cores": _cores(), "threads": threads}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, {**record, "date": date})


def read(path):
    """Return what `write` has written, or raise `ValueError` if it is something else."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        rows = record["rows"]
        good = all(row.keys() >= _NEEDED and math.isfinite(row["ratio"]) for row in rows)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a record of a benchmark: {error!r}.") from None
    if not good:
        raise ValueError(f"{path} is not a record of a benchmark: its rows lack entries.")
    return record


def compare(rows, stored, factor=None):
    """Return a line for each row that is worse than the stored one of its id.

    A row is worse if its ratio is above the stored one by more than twice the noise of both
    together, and by more than `FLOOR` of it; `CEILING` of it is too much on any machine. With a
    `factor`, instead, if it is above so many times the stored ratio, or the target.
    """
    before, worse = {found["id"]: found for found in stored}, []
    for found in (found for found in rows if found["id"] in before):
        old = before[found["id"]]
        noise = 2 * math.hypot(found["noise"], old["noise"])
        size = 1.0 if old["unit"] == "exponent" else abs(old["ratio"])
        limit = old["ratio"] + min(max(noise, FLOOR * size), CEILING * size)
        if factor is not None:
            limit = factor * max(old["ratio"], old["target"] or 0)
        if found["ratio"] > limit:
            numbers = (_number(value, found) for value in (found["ratio"], old["ratio"], limit))
            worse.append("{}: {}, stored {}, limit {}".format(found["label"], *numbers))
    return worse


def other_machine(stored):
    """Return what differs between the machine of a record and this one, or None."""
    here = provenance({})["hardware"], _cores()
    there = stored.get("hardware"), stored.get("cores")
    if here == there:
        return None
    return f"stored on {there[0]} ({there[1]} in use), this is {here[0]} ({here[1]} in use)"


def fill(text, results):
    """Return a Markdown text with its tables filled from a folder of records.

    A table stands between two comments, as in `<!-- benchmark: cpu training -->`: the file, and the
    group, or `machine` for where and how the run was made. Without the file, it stays as it is.
    """

    def table(match):
        begin, name, group, end = match.groups()
        path = Path(results) / f"{name}.json"
        if not path.exists():
            return match[0]
        record = read(path)
        if group == "machine":
            versions = ", ".join(f"{key} {value}" for key, value in record["versions"].items())
            where = f"{record['hardware']}, {record['cores']} in use"
            made = f"`{record['command']}`, {record['date']}: {where}"
            return f"{begin}{made}; Python {record['python']}, {versions}.\n{end}"
        chosen = [
            (found["label"], *_cells(found)) for found in record["rows"] if found["group"] == group
        ]
        if not chosen:
            raise ValueError(f"{name}.json has no rows of the group {group!r}.")
        names = ["", "target", "measured", "noise", "median", "ms / reference", " "]
        shown = pd.DataFrame(chosen, columns=names)
        shown["measured"] = (shown["measured"] + " " + shown.pop("noise")).str.strip()
        sizes = [found.get("mebibytes") for found in record["rows"] if found["group"] == group]
        if all(isinstance(pair, list) for pair in sizes):
            shown.insert(5, "MiB / reference", ["{:.0f} / {:.0f}".format(*pair) for pair in sizes])
        if not shown["ms / reference"].any():
            del shown["ms / reference"]
        return f"{begin}{markdown_table(shown.rename(columns=str.strip))}\n{end}"

    return _TABLE.sub(table, text)


def _cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
