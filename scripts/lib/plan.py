"""What the experiments run: `plan.toml`, in which the entries and their meaning are.

A run has a name of four parts: part, dataset, method, and its seed or, of a trial, what it tries.
"""

import dataclasses
import hashlib
import itertools
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from lib import robustness
from lib.settings import Settings

HELD_OUT = 5_000  # training images that trials do not see, and are scored on
_TOML = tomllib.loads(Path(__file__).with_name("plan.toml").read_text(encoding="utf-8"))
_CHANGES, _DEFAULTS = _TOML.pop("changes"), dataclasses.asdict(Settings())


class Part(NamedTuple):
    """Runs that are compared with each other; `plan.toml` says what the entries mean."""

    runs: dict
    base: dict | None = None
    narrowed: bool = True
    first_seed: bool = False
    evaluations: dict = {}
    datasets: tuple = ()
    change: dict = {}


class Plan(NamedTuple):
    """The runs of an experiment; `plan.toml` says what the entries mean."""

    seeds: range
    parts: dict
    datasets: tuple
    base: dict = {}
    trials: dict = {}
    probabilities: bool = False
    scaled: bool = False
    last: int = 1
    keep_models: bool = False
    held_out: int = HELD_OUT

    @property
    def methods(self):
        parts = (part.runs for part in self.parts.values() if part.narrowed)
        return tuple(dict.fromkeys(m for runs in parts for m in runs if "continued" not in m))

    def trial_runs(self, seed, methods=None, datasets=None):
        """Return the runs by which the settings of some methods are chosen, by name."""
        tried = {m if m in self.trials else "gaussian" for m in methods or self.methods}
        found = {}
        for dataset in datasets or self.datasets:
            about = {**self.base, "dataset": dataset, "validation": self.held_out, "seed": seed}
            for method, choices in self.trials.items():
                for change in choices if method in tried else ():
                    name = f"trials/{dataset}/{method}/{label(change)}"
                    found[name] = Settings(**changed(about, change))
        return found

    def runs(self, name, seeds, methods=None, datasets=None, chosen=None):
        """Return the runs of a part, by name; `chosen` has settings by dataset and method."""
        part, found = self.parts[name], {}
        seeds = seeds[:1] if part.first_seed else seeds
        for dataset, seed in itertools.product(datasets or part.datasets or self.datasets, seeds):
            for method, change in part.runs.items():
                wanted = method.removesuffix("_continued") in (methods or self.methods)
                base, of = part.base, method if method in self.trials else "gaussian"
                if base is None and (dataset, of) in (chosen or {}):
                    base = {**chosen[dataset, of].as_dict(), "validation": 0}
                if base is not None and (wanted or not part.narrowed):
                    about = {"dataset": dataset, "seed": seed}
                    about = changed({**_DEFAULTS, **about}, base) | about
                    run = f"{name}/{dataset}/{method}/seed{seed}"
                    found[run] = Settings(**changed(changed(about, part.change), change))
        return found


def changed(settings, change):
    """Return options with some changes, as `plan.toml` has them."""
    return {**settings, **_resolved(settings, change)}


def _resolved(settings, change):
    found = {}
    for name, value in change.items():
        if name == "label":
            continue
        if name == "use":
            for used in value:
                found |= _resolved(settings, _CHANGES[used])
            continue
        if isinstance(value, str) and value.startswith("$"):
            value = settings[value[1:]]
        elif isinstance(value, dict):
            value = json.dumps(value) if name == "posterior" else value[settings["dataset"]]
        found[name] = value
    return found


def label(change):
    if "label" in change:
        return change["label"]
    shown = {k: f"{v:g}" if isinstance(v, float) else v for k, v in change.items() if k != "use"}
    return ",".join(f"{name}={v}" for name, v in shown.items()) or "reference"


def key(name, settings):
    """Return what a run is stored by: the hash of its part and its settings."""
    content = json.dumps({"part": name.split("/")[0], **settings.as_dict()}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _plan(seeds, parts, **options):
    made = {}
    for name, part in parts.items():
        runs = part.pop("runs", None)
        if isinstance(runs, str):
            runs = made[runs].runs | part.pop("more", {})
        runs = runs or {label(change): change for change in part.pop("list")}
        shifts = part.pop("evaluations", {})
        shifts = {which: robustness.Settings(**shift) for which, shift in shifts.items()}
        made[name] = Part(runs, **part, evaluations=shifts)
    return Plan(range(*seeds), made, **options)


PLANS = {name: _plan(**plan) for name, plan in _TOML.items()}
"""The experiments that `scripts/reproduce.py` knows."""


def quick_runs(runs):
    """Return runs in small, whose scores mean nothing: one trial per method, three ablations."""
    found, count = {}, {}
    for name, settings in runs.items():
        part, dataset, method, _ = name.split("/")
        group = (part, dataset, method) if part == "trials" else part
        count[group] = count.get(group, 0) + 1
        if count[group] <= {"trials": 1, "ablations": 3}.get(part, len(runs)):
            less = ("kl_warmup", "pretrain_epochs", "evaluate_every", "elbo_passes")
            small = {option: min(1, getattr(settings, option)) for option in less}
            small |= {"epochs": 1, "warmup_epochs": 0, "evaluation_samples": 2, "samples": 4}
            small |= {"limit": 300, "train_size": settings.train_size and 100, "batch_size": 100}
            found[name] = replace(settings, **small, validation=100 if settings.validation else 0)
    return found


def quick_evaluations(wanted):
    few = {"corruptions": ("contrast",), "degrees": (90,), "limit": 100}
    some = {
        name: {**few, "foreign": wanted[name].foreign[-1:], "samples": min(2, wanted[name].samples)}
        for name in list(wanted)[:2]
    }
    return {name: replace(wanted[name], **changes) for name, changes in some.items()}
