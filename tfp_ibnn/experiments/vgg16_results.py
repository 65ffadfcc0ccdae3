"""What the VGG16 experiment leaves in its folder of results."""

import os
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfp_ibnn._core import files
from tfp_ibnn.experiments.afterwards import averaged, folder_of
from tfp_ibnn.experiments.fleet import NOT_RUN
from tfp_ibnn.experiments.folder import RunError, read_record
from tfp_ibnn.experiments.results import write_results
from tfp_ibnn.experiments.vgg16_plan import PARTS, evaluations_of, quick_evaluations

__all__ = ["Results", "joined", "probabilities", "read", "write"]

Row = dict[str, Any]

# The least above 0 in float16: the NLL of a probability of 0 is none.
_LEAST = float(np.finfo("float16").smallest_subnormal)
_ENTRIES = ("trials", "ablations", "draws", "scaled", "missing")
# Their seeds are averaged, too.
_AVERAGED = ("equal", "long")
# By what the rows of each kind are told apart.
_KEYS = {
    "rows": ("budget", "method", "seed"),
    "trials": ("method", "seed", "training"),
    "ablations": ("budget", "method", "seed"),
    "draws": ("method", "seed", "samples"),
    "robustness": ("budget", "method", "seed", "shift", "name", "level"),
    "scaled": ("budget", "method", "seed"),
}


class Results(NamedTuple):
    """What the experiment found."""

    rows: list[Row]
    """One for each run of the table, see `summary.summarise`."""
    trials: list[Row]
    """One for each run by which settings were chosen."""
    ablations: list[Row]
    """One for each change, scored on held-out training images."""
    draws: list[Row]
    """One for each number of draws, of one model on the test images."""
    robustness: list[Row]
    """One for each run and set of shifted images."""
    scaled: list[Row]
    """One for each run of equal budgets, at a temperature; see `afterwards`."""
    missing: list[str]
    """What was not run, or failed: names of runs, and of their evaluations."""


def write(
    folder: str | os.PathLike,
    results: Results,
    runs: str | os.PathLike,
    options: dict[str, Any],
    kept: Results | None = None,
) -> list[dict[str, Any]]:
    """Write `summary.json`, `runs.json`, `robustness.json` and probabilities; return the summary.

    `runs.json` also has the scores of the mean prediction of each method's seeds, as "averaged".
    The probabilities of each run go to `probabilities/BUDGET-METHOD-seedN.npz`, in float16, with
    the labels and the epistemic uncertainty. Those of other runs, from a call before, are removed.

    Args:
        folder: of the results; it must exist.
        results: of `vgg16`.
        runs: the folder of the runs.
        options: of the command.
        kept: results in this folder, of which `results` hold rows; the probabilities of these stay.
    """
    folder, runs = Path(folder), Path(runs)
    (folder / "probabilities").mkdir(exist_ok=True)
    old = set((folder / "probabilities").glob("*-*-seed*.npz"))
    for row in results.rows:
        path = _probabilities(row, folder)
        old.discard(path)
        if kept is not None and row in kept.rows:
            continue
        with np.load(folder_of(row, runs) / "probabilities.npz") as found:
            arrays = {
                "probabilities": np.maximum(found["probabilities"], _LEAST).astype("float16"),
                "epistemic": found["epistemic"].astype("float16"),
                "labels": found["labels"].astype("uint8"),
            }
        with files.replacing(path) as temporary:
            np.savez_compressed(temporary, **arrays)
    for path in old:
        path.unlink()
    if results.robustness:
        budgets = dict.fromkeys(row["budget"] for row in results.robustness)
        shifts = {budget: evaluations_of(f"{budget}/cifar10/-/-") for budget in budgets}
        if options.get("quick"):
            shifts = {budget: quick_evaluations(found) for budget, found in shifts.items()}
        options_of = {budget: found["robustness"].as_dict() for budget, found in shifts.items()}
        content = {"options": options_of, "rows": list(map(_rounded, results.robustness))}
        files.write_json(folder / "robustness.json", content)
    more = {name: getattr(results, name) for name in _ENTRIES}
    rows = [row for row in results.rows if row["budget"] in _AVERAGED]
    ensembles = averaged(rows, lambda row: probabilities(row, folder))
    return write_results(folder, results.rows, options, **more, averaged=ensembles)


def probabilities(row: Row, folder: str | os.PathLike) -> tuple[np.ndarray, np.ndarray]:
    """Return a run's class probabilities, (images, classes), and the labels, as `write` left them.

    Args:
        row: of the run.
        folder: of the results.
    """
    with np.load(_probabilities(row, Path(folder))) as found:
        return found["probabilities"].astype("float64"), found["labels"]


def _probabilities(row: Row, folder: Path) -> Path:
    return folder / "probabilities" / f"{row['budget']}-{row['method']}-seed{row['seed']}.npz"


def read(folder: str | os.PathLike) -> Results:
    """Return what `write` left in a folder.

    Raises:
        RunError: if that cannot be read.
    """
    folder = Path(folder)
    record = read_record(folder / "runs.json")
    shifts = folder / "robustness.json"
    try:
        return Results(
            rows=record["runs"],
            robustness=read_record(shifts)["rows"] if shifts.exists() else [],
            **{name: record[name] for name in _ENTRIES},
        )
    except KeyError as error:
        raise RunError(f"{folder} holds results of something else: without {error}.") from error


def joined(new: Results, kept: Results, order: Sequence[str], changed: Container[str]) -> Results:
    """Return all of two results; of what both have, the new.

    Args:
        new: some results.
        kept: those before.
        order: names of runs, as they shall stand in the tables; those of other parts stand as they
            did.
        changed: names of runs which `kept` has with other settings, if at all; it loses them.
    """
    lists = {}
    for name, keys in _KEYS.items():
        stay = (row for row in getattr(kept, name) if _name(row) not in changed)
        rows = (*stay, *getattr(new, name))
        lists[name] = list({tuple(row[key] for key in keys): row for row in rows}.values())
    places = {name: place for place, name in enumerate(order)}

    def place(row: Row) -> int:
        return places.get(_name(row), len(places))

    lists["rows"].sort(key=lambda row: (PARTS.index(row["budget"]), place(row)))
    lists["ablations"].sort(key=lambda row: (row["method"] != "reference", place(row)))
    known = {_name(row) for row in (*lists["rows"], *lists["ablations"])}
    reasons, told = (dict(line.split(": ", 1) for line in one.missing) for one in (kept, new))
    # Why it once failed says more than that it was not tried again.
    reasons |= {name: why for name, why in told.items() if why != NOT_RUN or name not in reasons}
    missing = [f"{name}: {why}" for name, why in reasons.items() if name not in known]
    return Results(**lists, missing=missing)


def _name(row: Row) -> str:
    return f"{row['budget']}/cifar10/{row['method']}/seed{row['seed']}"


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {key: round(v, 5) if isinstance(v, float) else v for key, v in row.items()}
