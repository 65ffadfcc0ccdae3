"""Run a plan, choose settings by trials, and make records of what was found."""

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np

from experiments import checks, plan, run_many
from experiments.folder import RunError
from experiments.report import history
from experiments.scoring import SCORES, Scores
from experiments.store import predictions
from tfp_ibnn.prediction import cross_fit, fit_temperature

__all__ = ["Results", "best", "study"]

_MEASURED = (*SCORES, "samples", "parameters", "backend", "hardware", "versions", "python")


class Results(NamedTuple):
    """What an experiment found."""

    records: list
    """One for each run, see `store`."""
    missing: list
    """Run, or its evaluation, that was not made or failed, and why."""
    kept: frozenset = frozenset()
    """Names of the records that were there before."""


def study(
    wanted,
    folder,
    seeds,
    *,
    parts=None,
    methods=None,
    datasets=None,
    quick=False,
    train=True,
    kept=None,
    missing=None,
    **options,
):
    """Run a plan; return the `Results`.

    Settings are chosen by the NLL of training images that the trials did not see, with the first
    seed, or that of the trials in `kept`. Then each method is trained on all training images with
    every seed, and tested once. A run that fails is named as missing, and the others go on.

    Args:
        wanted: the plan.
        folder: for the runs; what is there already is not run again.
        seeds: of the runs.
        parts: some of the plan's; None is all, as for the next two.
        methods: some of the plan's.
        datasets: some of the plan's.
        quick: a few steps on a few images, to see that all of it works.
        train: run what is not finished; else it is left out, and named as missing.
        kept: records that were found before, and what was missing, see `store.read`. Runs that it
            has are not run again, whether or not their folders are still there.
        missing: gets the names of what was not run or failed, and why.
        **options: see `run_many`: `jobs`, `data_dir` and `log`.

    Raises:
        RunError: if no trial of a method is finished, so that its settings are not known.
    """
    for name, values in (("parts", parts), ("methods", methods), ("datasets", datasets)):
        for value in values or ():
            checks.choice(*getattr(wanted, name))(name, value)
    before, lost = kept or ([], [])
    records = {record["name"]: record for record in before}
    runs, found, missing = {}, {}, {} if missing is None else missing

    def take(new):
        shifts = {
            name: wanted.parts[part].evaluations
            for name in new
            if (part := name.split("/")[0]) in wanted.parts
        }
        if quick:
            new = plan.quick_runs(new)
            shifts = {name: plan.quick_evaluations(shift) for name, shift in shifts.items()}
        runs.update(new)
        for name, settings in new.items():
            if records.get(name, {}).get("key") != plan.key(name, settings):
                records.pop(name, None)
        left = {name: settings for name, settings in new.items() if name not in records}
        more = {"evaluations": shifts, "train": train, "missing": missing, **options}
        found.update(run_many.run_many(left, folder, keep_models=wanted.keep_models, **more))

    chosen, held_out = {}, {}
    parts = parts or list(wanted.parts)
    if wanted.tuned & set(parts):
        tried = [r["seed"] for r in before if r["budget"] == "trials"]
        take(wanted.trial_runs([*tried, seeds[0]][0], methods, datasets))
        if not train and not records and not found:
            raise RunError(f"{folder} holds none of the trials by which settings are chosen.")
        names = best(runs, records | found)
        chosen = {of: runs[name] for of, name in names.items()}
        held_out = {of: Path(folder) / name for of, name in names.items() if name in found}
    take(
        {
            k: v
            for part in parts
            for k, v in wanted.runs(part, seeds, methods, datasets, chosen).items()
        }
    )
    stay = frozenset(records)
    for name, measured in found.items():
        records[name] = _record(wanted, Path(folder), name, runs[name], measured)
        if wanted.probabilities and name.startswith("equal/"):
            of = tuple(name.split("/")[1:3])
            records[name]["scaled"] = _scaled(Path(folder) / name, held_out.get(of))
    order = {name: place for place, name in enumerate(runs)}
    budgets = ["trials", *wanted.parts]
    ordered = sorted(
        records.values(),
        key=lambda r: (budgets.index(r["budget"]), order.get(r["name"], len(order))),
    )
    # Why it once failed says more than that it was not tried again.
    reasons = dict(line.split(": ", 1) for line in lost)
    reasons |= {
        name: why for name, why in missing.items() if why != run_many.NOT_RUN or name not in reasons
    }
    return Results(ordered, [f"{n}: {why}" for n, why in reasons.items() if n not in records], stay)


def best(trials, found):
    """Return for each dataset and method the name of the trial of the least held-out NLL."""
    groups, chosen = {}, {}
    for name in trials:
        groups.setdefault(tuple(name.split("/")[1:3]), []).append(name)
    for (dataset, method), names in groups.items():
        finite = [n for n in names if n in found and not math.isnan(found[n]["nll"])]
        if not finite:
            raise RunError(
                f"No trial of {method} on {dataset} is finished, by which its settings are chosen."
            )
        chosen[dataset, method] = min(finite, key=lambda name: found[name]["nll"])
    return chosen


def _record(wanted, folder, name, settings, measured):
    """Return what is kept of a run; "training" is its command, for seed 0."""
    budget, _, method, _ = name.split("/")
    record = {
        "key": plan.key(name, settings),
        "name": name,
        "dataset": settings.dataset,
        "model": settings.model,
        "method": method,
        "budget": budget,
        "epochs": settings.pretrain_epochs + settings.epochs,
        "seed": settings.seed,
        **{key: measured[key] for key in _MEASURED},
        "training": replace(settings, seed=0).command(),
        "seconds": sum(t for stage, t in measured["seconds"].items() if stage != "testing"),
    }
    logged = {key: v[-wanted.last :] for key, v in history(folder / name).items() if v}
    for key in ("loss", "nll", "kl"):
        if "kl" in logged or key == "nll":  # a deterministic network's loss is its NLL
            record[f"train_{key}"] = float(np.mean(logged.get(key, logged["loss"])))
    stds = {
        key.removesuffix("/z_std"): v[-1] for key, v in logged.items() if key.endswith("/z_std")
    }
    if stds:
        record["z_std"] = {layer: round(std, 4) for layer, std in stds.items()}
    for key in ("negative_elbo", "evaluations"):
        if measured.get(key):
            record[key] = measured[key]
    return record


def _scaled(folder, held_out):
    """Return the scores of a run when its predictions have a temperature.

    It is fitted to the held-out images of the method's trial. Methods without one are cross-fitted.
    """
    mean, labels = predictions(folder)
    if held_out is None:
        mean, temperatures = cross_fit(mean, labels)
    else:
        model = fit_temperature(*predictions(held_out))
        mean, temperatures = keras.ops.convert_to_numpy(model(mean)), [float(model.temperature)]
    about = {"temperature": float(np.mean(temperatures)), "crosswise": held_out is None}
    return {**about, **Scores(mean, None, labels, 1).scores()}
