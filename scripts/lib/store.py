"""Results: `runs.jsonl`, a run per line, keyed by the hash of its settings, and `summary.json`.

A record has `key`, `name` (part/dataset/method/seed), what these say, the scores, the command that
trains the same with seed 0, and what it takes to repeat it; some have `scaled`, the scores at a
temperature, `ece_floor`, the ECE that perfectly calibrated predictions with the same confidences
have in the mean over test sets, as they are and scaled, and `evaluations` on shifted images, rows
by name.
"""

import contextlib
import functools
import json
import os
import platform
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import keras
import numpy as np
import pandas as pd
from scipy.special import entr, softmax

import tfp_ibnn as ibnn
from lib import files
from lib.devices import accelerators
from lib.folder import RunError
from lib.scoring import SCORES, Scores
from tfp_ibnn.metrics.calibration import ece_floor

_PACKAGES = ("keras", "tensorflow", "jax", "tensorflow-probability", "tfp-nightly", "numpy")
# How tables and figures show methods and shifts.
METHODS = tomllib.loads(Path(__file__).with_name("methods.toml").read_text(encoding="utf-8"))
KEYS = ["dataset", "model", "method", "budget", "epochs", "samples"]
_OF_RUNS = {"key", "name", "seed", "scaled", "ece_floor", "evaluations", *SCORES}
# The least above 0 in float16: the NLL of a probability of 0 is none.
_LEAST = float(np.finfo("float16").smallest_subnormal)


def commit(folder=Path(__file__).parent):
    """Return the commit that is checked out, with "-dirty" if files are changed; None without."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    return None


def provenance(options):
    """Return what it takes to repeat a run, for JSON: options, command, commit, versions, hardware.

    The commit is that of the sources, as they are when the record is made.
    """
    script, *arguments = sys.argv
    if script and Path(script).is_absolute():
        script = os.path.relpath(script)
    versions = {"tfp_ibnn": ibnn.__version__}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    cores = f"{platform.machine()}, {os.cpu_count()} CPU cores"
    command = shlex.join(["python", script, *arguments])
    made = {"options": options, "command": command, "backend": keras.backend.backend()}
    made |= {"commit": commit(), "versions": versions, "python": platform.python_version()}
    return {**made, "hardware": "; ".join([*accelerators(), cores])}


def read(folder):
    """Return the records in a folder, and what is missing; raise RunError if they are none."""
    try:
        lines = (Path(folder) / "runs.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        summary = json.loads((Path(folder) / "summary.json").read_text(encoding="utf-8"))
        if not all({"key", "name", "seed"} <= record.keys() for record in records):
            raise ValueError("a line that is not a run")
        return records, summary["missing"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{folder} holds results of something else: {error}.") from error


def write_results(folder, records, options, missing=(), runs=None, kept=(), **more):
    """Write `runs.jsonl` and `summary.json`; return the rows of the summary.

    With the folder of the `runs`, their probabilities are written, too, but for those `kept`, by
    name, that are there: `probabilities/BUDGET-METHOD-seedN.npz`, in float16, with the labels and
    the epistemic uncertainty. Those of other runs are removed. From them all records get what they
    lack of `scaled` and `ece_floor`, and the summary the scores of ensembles. It gets `more`.
    """
    folder, shown = Path(folder), [record for record in records if is_shown(record)]
    made = provenance(options)
    rows = summarise(shown, command=made["command"])
    content = {"options": options, "command": made["command"], "missing": list(missing), **more}
    content["rows"] = rows
    if runs is not None:
        _write_probabilities(folder, shown, Path(runs), kept)
        records = [_completed(record, folder) for record in records]
        content["averaged"] = _averaged(shown, folder)
    lines = [json.dumps(record, allow_nan=False) for record in records]
    files.write_json(folder / "summary.json", content)
    files.write_text(folder / "runs.jsonl", "\n".join([*lines, ""]))
    return rows


def is_shown(record):
    """Whether a run is one of those that are compared, with all seeds, on test images."""
    return record["budget"] not in ("trials", "ablations", "draws")


def summarise(records, **common):
    """Return one row for each method, budget and data set, over its seeds."""
    table = []
    for keys, group in pd.DataFrame(records).groupby(KEYS, sort=False) if records else ():
        rows = [records[place] for place in group.index]
        keys_ = rows[0].keys() - {*KEYS, *_OF_RUNS}
        same = {k: v for k, v in rows[0].items() if k in keys_ and all(r.get(k) == v for r in rows)}
        for key in ("backend", "hardware"):  # of seeds that were run in different places, all
            if places := dict.fromkeys(row[key] for row in rows if key in row):
                same[key] = " | ".join(places)
        scores = group[list(SCORES)].agg(["mean", "std"], skipna=False).round(6)
        if len(group) == 1:
            scores.loc["std"] = 0.0
        about = {**dict(zip(KEYS, keys, strict=True)), "seeds": [row["seed"] for row in rows]}
        table.append({**about, **scores.to_dict(), **same, **common})
    return table


def evaluated(records):
    """Return a frame with a row for each set of shifted images of each run."""
    found = []
    for record in records:
        about = {key: record[key] for key in ("budget", "method", "seed")}
        for name, rows in record.get("evaluations", {}).items():
            found += [{**about, "evaluation": name, **row} for row in rows]
    return pd.DataFrame(found)


def stored(record, folder):
    """Return a run's class probabilities, (images, classes), and labels, as results have them."""
    return predictions(folder, _file(record))


def history(folder):
    """Return what the training stage of a run logged, by name."""
    rows = pd.read_csv(folder / "training.csv")
    return {name: rows[name].dropna().to_list() for name in rows if name != "epoch"}


def predictions(folder, name="probabilities.npz"):
    """Return the class probabilities of a finished run, (images, classes), and the labels."""
    with np.load(Path(folder) / name) as found:
        return found["probabilities"].astype("float64"), found["labels"].astype("int32")


def _file(record):
    return "probabilities/{budget}-{method}-seed{seed}.npz".format(**record)


def _write_probabilities(folder, records, runs, kept):
    (folder / "probabilities").mkdir(exist_ok=True)
    paths = {record["name"]: folder / _file(record) for record in records}
    for path in set((folder / "probabilities").glob("*-*-seed*.npz")) - set(paths.values()):
        path.unlink()
    for name, path in paths.items():
        if name not in kept:
            with np.load(runs / name / "probabilities.npz") as found:
                small = np.maximum(found["probabilities"], _LEAST).astype("float16")
                arrays = {**found, "probabilities": small}
            for more in (runs / name).glob("*/unknown.npz"):
                with np.load(more) as found:
                    arrays |= found
            with files.replacing(path) as temporary:
                np.savez_compressed(temporary, **arrays)


def stored_entropies(record, folder):
    """Return the entropies of a run's predictions, or of the mean of several runs', in nats.

    Those of known and of unknown images, or None if the unknown ones are not stored.
    """
    seeds = record.get("seeds", [record.get("seed")])
    files_ = [np.load(Path(folder) / _file({**record, "seed": seed})) for seed in seeds]
    if not all("unknown" in found for found in files_):
        return None
    kinds = [[found[kind] for found in files_] for kind in ("probabilities", "unknown")]
    return [entr(np.mean(kind, axis=0, dtype="float64")).sum(axis=1) for kind in kinds]


def fit_temperature(probabilities, labels):
    """Return temperature scaling fitted to predictions; it takes predictions as its input."""
    scaling = ibnn.TemperatureScaling(_identity(np.shape(probabilities)[-1]), from_logits=False)
    return scaling.fit(iter([(probabilities, labels)]))  # at once, and without a dataset


@functools.cache
def _identity(classes):
    """Return the model that answers with its input; it has no weights, so that all can share it."""
    inputs = keras.Input((classes,))
    identity = keras.Model(inputs, keras.layers.Identity()(inputs))
    identity.run_eagerly = True  # nothing is computed that could be compiled
    return identity


def cross_fit(probabilities, labels):
    """Return predictions at temperatures fitted to other examples, and the two temperatures.

    Every second example has the temperature that was fitted to the others, and these have the one
    fitted to those: for models without held-out data.
    """
    scaled, temperatures = np.empty_like(probabilities), []
    for half in (0, 1):
        model = fit_temperature(probabilities[1 - half :: 2], labels[1 - half :: 2])
        temperatures.append(float(model.temperature))
        scaled[half::2] = keras.ops.convert_to_numpy(model(probabilities[half::2]))
    return scaled, temperatures


def cross_fitted(mean, labels):
    """Return the scores of predictions at a temperature that is fitted to every other example."""
    scaled, temperatures = cross_fit(mean, labels)
    about = {"temperature": float(np.mean(temperatures)), "crosswise": True}
    return {**about, **Scores(scaled, None, labels, 1).scores()}


def _completed(record, folder):
    if not is_shown(record) or record.keys() >= {"scaled", "ece_floor"}:
        return record
    mean, labels = stored(record, folder)
    scaled = record.get("scaled") or cross_fitted(mean, labels)
    return {**record, "scaled": scaled, "ece_floor": _floors(mean, scaled["temperature"])}


def _floors(mean, temperature):
    forms = {"as it is": mean, "scaled": softmax(np.log(mean) / temperature, axis=1)}
    return {name: round(ece_floor(form, seed=0), 6) for name, form in forms.items()}


def _averaged(records, folder):
    """Return the scores of each method's ensemble, the mean prediction of its seeds."""
    groups, found = {}, []
    for record in records:
        groups.setdefault((record["budget"], record["method"]), []).append(record)
    for (budget, method), group in groups.items():
        if len(group) > 1:
            each = [stored(record, folder) for record in group]
            mean, labels = np.mean([mean for mean, _ in each], axis=0), each[0][1]
            about = {"budget": budget, "method": method}
            about["seeds"] = [record["seed"] for record in group]
            scaled = cross_fitted(mean, labels)
            more = {"scaled": scaled, "ece_floor": _floors(mean, scaled["temperature"])}
            if entropies := stored_entropies({**about, "seed": None}, folder):
                more["entropy_auroc"] = ibnn.metrics.ood_scores(*entropies)["auroc"]
            found.append({**about, **Scores(mean, None, labels, 1).scores(), **more})
    return found
