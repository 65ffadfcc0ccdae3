"""The VGG16 experiment: does a posterior earn its cost on CIFAR-10, and does a flow?"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfp_ibnn._core import checks
from tfp_ibnn.experiments import vgg16_plan as plan
from tfp_ibnn.experiments.afterwards import crosswise, scaled
from tfp_ibnn.experiments.comparison import planned, row
from tfp_ibnn.experiments.fleet import run_all
from tfp_ibnn.experiments.folder import RunError
from tfp_ibnn.experiments.report import history
from tfp_ibnn.experiments.settings import Settings
from tfp_ibnn.experiments.vgg16_plan import METHODS, PARTS
from tfp_ibnn.experiments.vgg16_results import Results, joined

__all__ = ["METHODS", "PARTS", "vgg16"]

Row = dict[str, Any]
Say = Callable[[str], None]


def vgg16(
    folder: str | os.PathLike,
    seeds: Sequence[int],
    *,
    parts: Sequence[str] = PARTS,
    methods: Sequence[str] = METHODS,
    quick: bool = False,
    train: bool = True,
    jobs: int = 1,
    data_dir: str | os.PathLike | None = None,
    kept: Results | None = None,
    missing: dict[str, str] | None = None,
    say: Say = print,
) -> Results:
    """Run the experiment.

    Settings are chosen by the NLL of 5,000 training images that the trials did not see, with the
    first seed, or that of the trials in `kept`. Then each method is trained on all training images
    with every seed, and tested once. A run that fails is named as missing, and the others go on.

    Args:
        folder: for the runs; what is there already is not run again.
        seeds: of the runs.
        parts: some of `PARTS`.
        methods: some of `METHODS`, of the equal budgets, the long runs and the half of the classes.
        quick: a few steps on a few images, to see that all of it works.
        train: run what is not finished; else it is left out, and named as missing.
        jobs: processes at once.
        data_dir: where the data is cached.
        kept: what was found before. Runs that it has are not run again, whether or not their
            folders are still there, and are part of what is returned.
        missing: gets the names of what was not run or failed, and why.
        say: called with lines of progress.

    Raises:
        RunError: if no trial of a method is finished, so that its settings are not known.
    """
    for part in parts:
        checks.one_of("parts", part, PARTS)
    for method in methods:
        checks.one_of("methods", method, METHODS)
    runs: dict[str, Settings] = {}
    found: dict[str, Row] = {}
    missing = {} if missing is None else missing
    known: dict[str, Row] = {}
    before = {_key(row): row for row in (*kept.rows, *kept.trials, *kept.ablations)} if kept else {}

    def take(new: Mapping[str, Settings]) -> None:
        evaluations = {name: plan.evaluations_of(name) for name in new}
        if quick:
            new = plan.quick_runs(new)
            evaluations = {name: plan.quick_evaluations(of) for name, of in evaluations.items()}
        options = {"jobs": jobs, "data_dir": data_dir, "train": train, "say": say}
        runs.update(new)
        keys = {name: _key(planned(name, settings)) for name, settings in new.items()}
        known.update({name: before[key] for name, key in keys.items() if key in before})
        left = {name: settings for name, settings in new.items() if name not in known}
        found.update(run_all(left, folder, evaluations=evaluations, missing=missing, **options))

    chosen, held_out = {}, {}
    if set(plan.NEEDS_TRIALS) & set(parts):
        first = kept.trials[0]["seed"] if kept and kept.trials else seeds[0]
        trials = plan.trials(first, methods)
        take(trials)
        tried = {name: runs[name] for name in trials if name in runs}
        if not train and not known.keys() | found.keys():
            raise RunError(f"{folder} holds none of the trials by which settings are chosen.")
        chosen = plan.choose(tried, known | found)
        held_out = {
            method: Path(folder) / name
            for method, settings in chosen.items()
            for name in tried
            if name in found and runs[name] == settings
        }
    everything: dict[str, Settings] = {}
    for part in parts:
        everything |= plan.runs_of(part, seeds, methods, chosen)
    take(everything)
    results = _results(folder, runs, found, missing)
    rows = [row for row in results.rows if row["budget"] == "equal"]
    others = [row for row in rows if row["method"] not in held_out]
    results = results._replace(scaled=scaled(rows, folder, held_out) + crosswise(others, folder))
    changed = everything.keys() - known.keys()
    return joined(results, kept, list(everything), changed) if kept else results


def _key(row: Row) -> tuple:
    return tuple(row[key] for key in ("budget", "method", "seed", "training"))


def _results(
    folder: str | os.PathLike,
    runs: Mapping[str, Settings],
    found: Mapping[str, Row],
    missing: Mapping[str, str],
) -> Results:
    rows: dict[str, list[Row]] = {}
    shifted, draws = [], []
    for name, settings in runs.items():
        if name not in found:
            continue
        budget, _, method, _ = name.split("/")
        stages = found[name]["seconds"]
        seconds = sum(stages.get(stage, 0.0) for stage in ("pretraining", "training"))
        logged = history(Path(folder) / name)
        last = {key: values[-1] for key, values in logged.items() if values}
        more = {"seconds": seconds, "train_nll": last.get("nll", last["loss"])}
        if "kl" in last:
            more["train_kl"] = last["kl"]
            more["z_std"] = {
                key.removesuffix("/z_std"): round(value, 4)
                for key, value in last.items()
                if key.endswith("/z_std")
            }
        rows.setdefault(budget, []).append(row(name, settings, found[name]) | more)
        known = {"budget": budget, "method": method, "seed": settings.seed}
        for evaluation, measured in found[name]["evaluations"].items():
            if budget == "draws":
                draws.append(
                    {**known, "samples": int(evaluation.removeprefix("draws")), **measured[0]}
                )
            else:
                shifted += [known | one for one in measured]
    return Results(
        rows=[
            one for budget in ("equal", "long", "report", "half") for one in rows.get(budget, [])
        ],
        trials=rows.get("trials", []),
        # The model of the draws is a second run of the reference; both come first.
        ablations=sorted(
            [*rows.get("ablations", []), *rows.get("draws", [])],
            key=lambda row: row["method"] != "reference",
        ),
        draws=draws,
        robustness=shifted,
        scaled=[],
        missing=[f"{name}: {why}" for name, why in missing.items()],
    )
