"""Run a plan, choose settings by trials, and make records of what was found."""

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np

from lib import checks, plan, run_many
from lib.folder import RunError
from lib.scoring import SCORES, Scores
from lib.store import cross_fitted, fit_temperature, history, predictions

_MEASURED = (*SCORES, "samples", "parameters", "backend", "hardware", "versions", "python")


class Results(NamedTuple):
    """What an experiment found."""

    records: list  # one for each run, see `store`
    missing: list  # the runs, or their evaluations, that were not made or failed, and why
    kept: frozenset = frozenset()  # names of the records that were there before


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
    """Run a plan, or some of its `parts`, `methods` and `datasets`; return the `Results`.

    Settings are chosen by the NLL of training images that the trials did not see, with the first
    seed, or that of the trials in `kept`. Then each method is trained on all training images with
    every seed, and tested once. A run that fails is named as missing, and the others go on.

    What the folder of the runs has already is not run again, nor what `kept`, from `store.read`,
    has, whether or not the folders of those are still there. With `quick` all of it has a few steps
    on a few images; with `train=False` what is not finished is left out. `missing` gets the names
    of what was not run or failed, and why; the options are those of `run_many`.
    """
    for name, values in (("parts", parts), ("methods", methods), ("datasets", datasets)):
        for value in values or ():
            checks.choice(*getattr(wanted, name))(name, value)
    before, lost = kept or ([], [])
    records = {record["name"]: record for record in before}
    runs, found, missing = {}, {}, {} if missing is None else missing

    def take(new):
        new = plan.quick_runs(new) if quick else new
        left, shifts = {}, {}
        for name, settings in new.items():
            runs[name] = settings
            if records.get(name, {}).get("key") != plan.key(name, settings):
                records.pop(name, None)
                left[name] = settings
            if part := wanted.parts.get(name.split("/")[0]):
                evaluations = part.evaluations
                shifts[name] = plan.quick_evaluations(evaluations) if quick else evaluations
        more = {"evaluations": shifts, "keep_models": wanted.keep_models, "train": train}
        found.update(run_many.run_many(left, folder, missing=missing, **more, **options))

    chosen, held_out, parts = {}, {}, parts or list(wanted.parts)
    if any(wanted.parts[part].base is None for part in parts):
        tried = [record["seed"] for record in before if record["budget"] == "trials"]
        take(wanted.trial_runs([*tried, seeds[0]][0], methods, datasets))
        if not (train or records or found):
            raise RunError(f"{folder} holds none of the trials by which settings are chosen.")
        names = best(runs, records | found)
        chosen = {of: runs[name] for of, name in names.items()}
        held_out = {of: Path(folder) / name for of, name in names.items() if name in found}
    new = [wanted.runs(part, seeds, methods, datasets, chosen) for part in parts]
    take({name: settings for part in new for name, settings in part.items()})
    stay = frozenset(records)
    for name, measured in found.items():
        records[name] = _record(wanted, Path(folder), name, runs[name], measured)
        if wanted.scaled or (wanted.probabilities and name.startswith("equal/")):
            trial = held_out.get(tuple(name.split("/")[1:3]))
            records[name]["scaled"] = _scaled(Path(folder) / name, trial)
    budgets = ["trials", *wanted.parts]

    def place(record):
        return budgets.index(record["budget"]), [*runs, record["name"]].index(record["name"])

    reasons = dict(line.split(": ", 1) for line in lost)
    for name, why in missing.items():
        # Why it once failed says more than that it was not tried again.
        reasons[name] = reasons.get(name, why) if why == run_many.NOT_RUN else why
    still = [f"{name}: {why}" for name, why in reasons.items() if name not in records]
    return Results(sorted(records.values(), key=place), still, stay)


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
    budget, _, method, _ = name.split("/")
    record = {"key": plan.key(name, settings), "name": name, "dataset": settings.dataset}
    record |= {"model": settings.model, "method": method, "budget": budget, "seed": settings.seed}
    record |= {"epochs": settings.pretrain_epochs + settings.epochs}
    record |= {key: measured[key] for key in _MEASURED}
    record["training"] = replace(settings, seed=0).command()
    record["seconds"] = sum(t for stage, t in measured["seconds"].items() if stage != "testing")
    logged = {key: v[-wanted.last :] for key, v in history(folder / name).items() if v}
    for key in ("loss", "nll", "kl"):
        if "kl" in logged or key == "nll":  # a deterministic network's loss is its NLL
            record[f"train_{key}"] = float(np.mean(logged.get(key, logged["loss"])))
    stds = {
        key.removesuffix("/z_std"): v[-1] for key, v in logged.items() if key.endswith("/z_std")
    }
    if stds:
        record["z_std"] = {layer: round(std, 4) for layer, std in stds.items()}
    for key in ("negative_elbo", "weights", "evaluations"):
        if measured.get(key):
            record[key] = measured[key]
    return record


def _scaled(folder, held_out):
    """Return the scores of a run when its predictions have a temperature.

    It is fitted to the held-out images of the method's trial. Methods without one are cross-fitted.
    """
    mean, labels = predictions(folder)
    if held_out is None:
        return cross_fitted(mean, labels)
    model = fit_temperature(*predictions(held_out))
    mean = keras.ops.convert_to_numpy(model(mean))
    about = {"temperature": float(model.temperature), "crosswise": False}
    return {**about, **Scores(mean, None, labels, 1).scores()}
