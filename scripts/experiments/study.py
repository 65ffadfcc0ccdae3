"""The comparisons of methods: run a plan, choose settings, and keep what was found."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from experiments import checks, files, plan, run_many
from experiments.folder import RunError, read_record
from experiments.report import history
from experiments.scoring import Scores
from experiments.tables import SCORES, write_results
from tfp_ibnn.prediction import average, cross_fit, fit_temperature

__all__ = ["Results", "best", "folder_of", "predictions", "read", "stored", "study", "write"]

Row = dict[str, Any]

# The least above 0 in float16: the NLL of a probability of 0 is none.
_LEAST = float(np.finfo("float16").smallest_subnormal)
# What tells the rows of each kind apart.
_KEYS = {
    "rows": ("budget", "dataset", "method", "seed"),
    "trials": ("dataset", "method", "seed", "training"),
    "ablations": ("budget", "method", "seed"),
    "draws": ("method", "seed", "samples"),
    "robustness": ("budget", "method", "seed", "shift", "name", "level"),
    "scaled": ("budget", "method", "seed"),
}
_STORED = ("trials", "ablations", "draws", "scaled", "missing")


class Results(NamedTuple):
    """What a comparison found; one row for each ..."""

    rows: list[Row]
    """Run of the table, see `tables.summarise`."""
    trials: list[Row]
    """Run by which settings were chosen."""
    ablations: list[Row]
    """Change, scored on held-out training images."""
    draws: list[Row]
    """Number of draws, of one model on the test images."""
    robustness: list[Row]
    """Run and set of shifted images."""
    scaled: list[Row]
    """Run of equal budgets, at a temperature."""
    missing: list[str]
    """Run, or its evaluation, that was not made or failed, and why."""


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
        kept: what was found before. Runs that it has are not run again, whether or not their
            folders are still there, and are part of what is returned.
        missing: gets the names of what was not run or failed, and why.
        **options: see `run_many`: `jobs`, `data_dir` and `log`.

    Raises:
        RunError: if no trial of a method is finished, so that its settings are not known.
    """
    for name, values in (("parts", parts), ("methods", methods), ("datasets", datasets)):
        for value in values or ():
            checks.choice(*getattr(wanted, name))(name, value)
    parts = parts or wanted.parts
    runs, found, known = {}, {}, {}
    missing = {} if missing is None else missing
    stored = [*kept.rows, *kept.trials, *kept.ablations] if kept else []
    before = {_key(row): row for row in stored}

    def take(new):
        evaluations = {name: plan.evaluations(name) for name in new if wanted is plan.VGG16}
        if quick:
            new = plan.quick_runs(new)
            evaluations = {k: plan.quick_evaluations(v) for k, v in evaluations.items()}
        runs.update(new)
        keys = {name: _key(_planned(name, settings)) for name, settings in new.items()}
        known.update({name: before[key] for name, key in keys.items() if key in before})
        left = {name: settings for name, settings in new.items() if name not in known}
        more = {"evaluations": evaluations, "train": train, "missing": missing, **options}
        found.update(run_many.run_many(left, folder, **more))

    chosen, held_out, everything = {}, {}, {}
    if set(wanted.tuned) & set(parts):
        first = kept.trials[0]["seed"] if kept and kept.trials else seeds[0]
        trials = wanted.trials(first, methods, datasets)
        take(trials)
        tried = {name: runs[name] for name in trials if name in runs}
        if not train and not known.keys() | found.keys():
            raise RunError(f"{folder} holds none of the trials by which settings are chosen.")
        names = best(tried, known | found)
        chosen = {key: tried[name] for key, name in names.items()}
        held_out = {key: Path(folder) / name for key, name in names.items() if name in found}
    for part in parts:
        everything |= wanted.runs(part, seeds, methods, datasets, chosen)
    take(everything)
    results = _results(wanted, folder, runs, found, missing)
    if wanted is plan.VGG16:
        results = results._replace(scaled=_scaled(results.rows, folder, held_out))
    if not kept:
        return results
    return _joined(wanted, results, kept, list(everything), everything.keys() - known.keys())


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


def _key(row):
    return tuple(row[key] for key in ("budget", "dataset", "method", "seed", "training"))


def _name(row):
    return "{budget}/{dataset}/{method}/seed{seed}".format(**{"dataset": "cifar10", **row})


def _planned(name, settings):
    """Return what is known of a row before the run; "training" is its command, for seed 0."""
    budget, _, method, _ = name.split("/")
    return {
        "dataset": settings.dataset,
        "model": settings.model,
        "method": method,
        "budget": budget,
        "epochs": settings.pretrain_epochs + settings.epochs,
        "seed": settings.seed,
        "training": replace(settings, seed=0).command(),
    }


def _results(wanted, folder, runs, found, missing):
    rows, shifted, draws = {}, [], []
    keys = (*SCORES, "samples", "parameters", "backend", "hardware", "versions", "python")
    for name in (name for name in runs if name in found):
        measured, settings = found[name], runs[name]
        row = _planned(name, settings) | {key: measured[key] for key in keys}
        row["seconds"] = sum(
            measured["seconds"].get(stage, 0.0) for stage in ("pretraining", "training")
        )
        logged = history(Path(folder) / name)
        last = {key: values[-1] for key, values in logged.items() if values}
        row["train_nll"] = last.get("nll", last["loss"])
        if "kl" in last:
            row["train_kl"] = last["kl"]
            stds = {key: value for key, value in last.items() if key.endswith("/z_std")}
            row["z_std"] = {key.removesuffix("/z_std"): round(v, 4) for key, v in stds.items()}
        rows.setdefault(row["budget"], []).append(row)
        about = {key: row[key] for key in ("budget", "method", "seed")}
        for evaluation, measures in measured.get("evaluations", {}).items():
            if row["budget"] == "draws":
                samples = int(evaluation.removeprefix("draws"))
                draws.append({**about, "samples": samples, **measures[0]})
            else:
                shifted += [about | one for one in measures]
    ablations = [*rows.get("ablations", []), *rows.get("draws", [])]
    return Results(
        rows=[row for part in wanted.parts if part != "ablations" for row in rows.get(part, [])],
        trials=rows.get("trials", []),
        ablations=sorted(ablations, key=lambda row: row["method"] != "reference"),
        draws=draws,
        robustness=shifted,
        scaled=[],
        missing=[f"{name}: {why}" for name, why in missing.items()],
    )


def _scaled(rows, folder, held_out):
    """Return the scores of the runs of equal budgets when their predictions have a temperature.

    It is fitted to the held-out images of the method's trial. Methods without one are cross-fitted.
    """
    fitted = {of: fit_temperature(*predictions(path)) for of, path in held_out.items()}
    scaled = []
    for row in (row for row in rows if row["budget"] == "equal"):
        mean, labels = predictions(folder_of(row, folder))
        model = fitted.get((row["dataset"], row["method"]))
        if model is not None:
            mean, temperatures = keras.ops.convert_to_numpy(model(mean)), [float(model.temperature)]
        else:
            mean, temperatures = cross_fit(mean, labels)
        about = {key: row[key] for key in ("budget", "method", "seed")}
        about |= {"temperature": float(np.mean(temperatures)), "crosswise": model is None}
        scaled.append({**about, **_scores(mean, labels)})
    return scaled


def _scores(mean, labels):
    found = Scores(mean, np.zeros(len(mean)), labels, 1).summary()
    return {key: found[key] for key in SCORES}


def _joined(wanted, new, kept, order, changed):
    """Return all of two results; of what both have, the new."""
    lists = {}
    for name, keys in _KEYS.items():
        stay = (row for row in getattr(kept, name) if _name(row) not in changed)
        rows = {tuple(row[key] for key in keys): row for row in (*stay, *getattr(new, name))}
        lists[name] = list(rows.values())
    places = {name: place for place, name in enumerate(order)}

    def place(row):
        return places.get(_name(row), len(places))

    lists["rows"].sort(key=lambda row: (wanted.parts.index(row["budget"]), place(row)))
    lists["ablations"].sort(key=lambda row: (row["method"] != "reference", place(row)))
    known = {_name(row) for row in (*lists["rows"], *lists["ablations"])}
    reasons, latest = (dict(line.split(": ", 1) for line in one.missing) for one in (kept, new))
    # Why it once failed says more than that it was not tried again.
    for name, why in latest.items():
        if why != run_many.NOT_RUN or name not in reasons:
            reasons[name] = why
    missing = [f"{name}: {why}" for name, why in reasons.items() if name not in known]
    return Results(**lists, missing=missing)


def folder_of(row, runs):
    """Return the folder of a run."""
    return Path(runs) / _name(row)


def predictions(folder):
    """Return the class probabilities of a finished run, (images, classes), and the labels."""
    with np.load(Path(folder) / "probabilities.npz") as found:
        return found["probabilities"].astype("float64"), found["labels"].astype("int32")


def write(folder, results, runs, options, kept=None):
    """Write what VGG16 found, and return the summary: JSON files, and all probabilities.

    The probabilities of each run go to `probabilities/BUDGET-METHOD-seedN.npz`, in float16, with
    the labels and the epistemic uncertainty; those of other runs, from a call before, are removed.
    `runs.json` also has the scores of the mean prediction of each method's seeds, as "averaged".

    Args:
        folder: of the results; it must exist.
        results: of `study`.
        runs: the folder of the runs.
        options: of the command.
        kept: results in this folder, of which `results` hold rows; the probabilities of these stay.
    """
    folder = Path(folder)
    (folder / "probabilities").mkdir(exist_ok=True)
    old = set((folder / "probabilities").glob("*-*-seed*.npz"))
    for row in results.rows:
        path = _stored(row, folder)
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
        shifts = {budget: plan.evaluations(budget) for budget in budgets}
        if options.get("quick"):
            shifts = {budget: plan.quick_evaluations(found) for budget, found in shifts.items()}
        content = {
            "options": {budget: found["robustness"].as_dict() for budget, found in shifts.items()},
            "rows": [
                {key: round(v, 5) if isinstance(v, float) else v for key, v in row.items()}
                for row in results.robustness
            ],
        }
        files.write_json(folder / "robustness.json", content)
    more = {name: getattr(results, name) for name in _STORED}
    return write_results(
        folder, results.rows, options, **more, averaged=_averaged(results.rows, folder)
    )


def _averaged(rows, folder):
    """Return the scores of each method's ensemble: the mean prediction of its seeds."""
    groups, found = {}, []
    for row in rows:
        if row["budget"] in ("equal", "long"):
            groups.setdefault((row["budget"], row["method"]), []).append(row)
    for (budget, method), group in groups.items():
        if len(group) > 1:
            each = [stored(row, folder) for row in group]
            scores = _scores(average([mean for mean, _ in each]), each[0][1])
            seeds = [row["seed"] for row in group]
            found.append({"budget": budget, "method": method, "seeds": seeds, **scores})
    return found


def _stored(row, folder):
    return Path(folder) / "probabilities" / "{budget}-{method}-seed{seed}.npz".format(**row)


def stored(row, folder):
    """Return a run's class probabilities, (images, classes), and labels, as `write` left them."""
    with np.load(_stored(row, folder)) as found:
        return found["probabilities"].astype("float64"), found["labels"]


def read(folder):
    """Return what `write` left in a folder, or raise RunError if that cannot be read."""
    record, shifts = read_record(Path(folder) / "runs.json"), Path(folder) / "robustness.json"
    try:
        return Results(
            rows=record["runs"],
            robustness=read_record(shifts)["rows"] if shifts.exists() else [],
            **{name: record[name] for name in _STORED},
        )
    except KeyError as error:
        raise RunError(f"{folder} holds results of something else: without {error}.") from error
