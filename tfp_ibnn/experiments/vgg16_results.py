"""What the VGG16 experiment leaves in its folder of results."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from tfp_ibnn import _files
from tfp_ibnn.experiments.afterwards import folder_of
from tfp_ibnn.experiments.results import write_results
from tfp_ibnn.experiments.vgg16 import Results
from tfp_ibnn.experiments.vgg16_plan import evaluations_of, quick_evaluations

__all__ = ["write"]

# The least above 0 in float16: the NLL of a probability of 0 is none.
_LEAST = float(np.finfo("float16").smallest_subnormal)


def write(
    folder: str | os.PathLike, results: Results, runs: str | os.PathLike, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Write `summary.json`, `runs.json`, `robustness.json` and probabilities; return the summary.

    The probabilities of each run go to `probabilities/BUDGET-METHOD-seedN.npz`, in float16, with
    the labels and the epistemic uncertainty. Those of other runs, from a call before, are removed.

    Args:
        folder: of the results; it must exist.
        results: of `vgg16`.
        runs: the folder of the runs.
        options: of the command.
    """
    folder, runs = Path(folder), Path(runs)
    (folder / "probabilities").mkdir(exist_ok=True)
    old = set((folder / "probabilities").glob("*-*-seed*.npz"))
    for row in results.rows:
        budget, method, seed = row["budget"], row["method"], f"seed{row['seed']}"
        with np.load(folder_of(row, runs) / "probabilities.npz") as found:
            arrays = {
                "probabilities": np.maximum(found["probabilities"], _LEAST).astype("float16"),
                "epistemic": found["epistemic"].astype("float16"),
                "labels": found["labels"].astype("uint8"),
            }
        path = folder / "probabilities" / f"{budget}-{method}-{seed}.npz"
        with _files.replacing(path) as temporary:
            np.savez_compressed(temporary, **arrays)
        old.discard(path)
    for path in old:
        path.unlink()
    if results.robustness:
        budgets = dict.fromkeys(row["budget"] for row in results.robustness)
        shifts = {budget: evaluations_of(f"{budget}/cifar10/-/-") for budget in budgets}
        if options.get("quick"):
            shifts = {budget: quick_evaluations(found) for budget, found in shifts.items()}
        options_of = {budget: found["robustness"].as_dict() for budget, found in shifts.items()}
        content = {"options": options_of, "rows": list(map(_rounded, results.robustness))}
        _files.write_json(folder / "robustness.json", content)
    names = ("trials", "ablations", "draws", "scaled", "averaged", "missing")
    more = {name: getattr(results, name) for name in names}
    return write_results(folder, results.rows, options, **more)


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {key: round(v, 5) if isinstance(v, float) else v for key, v in row.items()}
