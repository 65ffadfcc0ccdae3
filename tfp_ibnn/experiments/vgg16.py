"""The VGG16 experiment: does a posterior earn its cost on CIFAR-10, and does a flow?"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tfp_ibnn import _checks
from tfp_ibnn.experiments import robustness
from tfp_ibnn.experiments.comparison import HELD_OUT, best, report_budget, row, shortened
from tfp_ibnn.experiments.fleet import run_all
from tfp_ibnn.experiments.folder import RunError
from tfp_ibnn.experiments.settings import Settings

__all__ = [
    "DRAWS",
    "METHODS",
    "PARTS",
    "SHIFTS",
    "Results",
    "ablations",
    "candidates",
    "choose",
    "equal",
    "evaluations_of",
    "final_runs",
    "first_runs",
    "half",
    "long",
    "report",
    "vgg16",
]

Say = Callable[[str], None]

METHODS = (
    "deterministic",
    "mc_dropout",
    "gaussian",
    "mixture_4",
    "mixture_16",
    "mixture_16_ibnn",
    "flow_first",
    "flow_last",
    "flow_over_mixture",
    "gaussian_fixed",
    "gaussian_elbo",
    "flow_elbo",
)

PARTS = ("equal", "long", "report", "half", "ablations")
"""Equal budgets; three times as long; the report's; half of the classes; one change at a time."""

DRAWS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of draws that the unchanged ablation is tested with."""

SHIFTS = robustness.Settings(
    dataset="cifar10",
    shifts=("clean", "corruptions", "rotations", "foreign"),
    degrees=tuple(range(30, 181, 30)),
    foreign=("fashion_mnist", "mnist"),
    samples=16,
    limit=2_000,
)
"""What the models of equal budgets are evaluated on, besides the test."""

_NEEDS_TRIALS = {"equal", "long", "half"}
_CLASSES = 5
_LONG = ("gaussian", "deterministic")
_HALF = ("deterministic", "mc_dropout", "gaussian", "mixture_4", "flow_last")

# The report does not say for how long its baseline was trained.
_BASELINE_EPOCHS = 30

_BASE = Settings(
    dataset="cifar10",
    model="vgg16",
    posterior="none",
    epochs=100,
    learning_rate=0.05,
    weight_decay=0.01,
    log_every=50,
    precision="mixed_bfloat16",
)
_GAUSSIAN = dataclasses.replace(
    _BASE, posterior="gaussian", prior_scale=0.3, beta=30.0, stochastic_learning_rate=0.02
)


class Results(NamedTuple):
    """What the experiment found."""

    rows: list[dict[str, Any]]
    """One for each run of the table, see `summary.summarise`."""
    trials: list[dict[str, Any]]
    """One for each run by which settings were chosen."""
    ablations: list[dict[str, Any]]
    """One for each change, scored on held-out training images."""
    draws: list[dict[str, Any]]
    """One for each number of draws, of the unchanged ablation on the test images."""
    robustness: list[dict[str, Any]]
    """One for each run and set of shifted images."""
    missing: list[str]
    """Names of runs that are not finished."""


def candidates() -> dict[str, dict[str, Settings]]:
    """Return the settings to choose from, by method.

    Those of the Gaussian are for all posteriors: what differs between them then is the posterior.
    """
    base = dataclasses.replace(_BASE, validation=HELD_OUT)
    gaussian = dataclasses.replace(_GAUSSIAN, validation=HELD_OUT)
    return {
        "gaussian": {
            f"prior{scale:g}-beta{beta:g}": dataclasses.replace(
                gaussian, prior_scale=scale, beta=beta
            )
            for scale, beta in ((0.3, 30.0), (0.3, 100.0), (0.4, 30.0), (0.2, 30.0))
        },
        "mc_dropout": {
            f"dropout{rate:g}": dataclasses.replace(base, dropout=rate, weight_decay=0.02)
            for rate in (0.3, 0.5)
        },
        "deterministic": {
            f"decay{decay:g}": dataclasses.replace(base, weight_decay=decay)
            for decay in (0.01, 0.02)
        },
    }


def equal(chosen: Mapping[str, Settings], seed: int) -> dict[str, Settings]:
    """Return the runs at equal budget, by method.

    Args:
        chosen: the settings of "deterministic", "mc_dropout" and "gaussian".
        seed: of the runs.
    """
    own = {method: _final(settings, seed) for method, settings in chosen.items()}
    gaussian = own["gaussian"]
    mixture = dataclasses.replace(
        gaussian, posterior="mixture", initial_scale=gaussian.prior_scale, mean_spread=0.1
    )
    flow = dataclasses.replace(gaussian, posterior="flow")
    # The colours of the first layer alone would suffer from noise that cannot shrink.
    fixed = dataclasses.replace(gaussian, deterministic_layers="conv1", **_fixed(gaussian))
    elbo = dataclasses.replace(gaussian, beta=1.0, stochastic_learning_rate=0.1)
    return own | {
        "mixture_4": mixture,
        "mixture_16": dataclasses.replace(mixture, components=16),
        "mixture_16_ibnn": _ibnn(seed),
        "flow_first": dataclasses.replace(flow, affine="first"),
        "flow_last": flow,
        "flow_over_mixture": dataclasses.replace(flow, base_components=4),
        "gaussian_fixed": fixed,
        "gaussian_elbo": elbo,
        "flow_elbo": dataclasses.replace(elbo, posterior="flow", affine="first"),
    }


def _fixed(settings: Settings) -> dict[str, Any]:
    """Return changes by which the posterior starts at the prior and stays there."""
    return {"stochastic_learning_rate": 1e-12, "initial_scale": settings.prior_scale}


def _final(settings: Settings, seed: int) -> Settings:
    return dataclasses.replace(settings, validation=0, seed=seed)


def _ibnn(seed: int) -> Settings:
    """Return the recipe of arXiv 2010.13498 for VGG16, as far as an equal budget allows.

    It has 300 epochs, and beta rises over 200 of them. Its weight decay of 5e-4 goes through
    momentum of 0.9, which makes it ten times as strong; a decoupled one does not.
    """
    return dataclasses.replace(
        _BASE,
        posterior="mixture",
        components=16,
        prior_scale=0.3,
        kl_warmup=2 * _BASE.epochs // 3,
        train_samples=2,
        stochastic_learning_rate=1.2,
        weight_decay=0.005,
        seed=seed,
    )


def long(chosen: Mapping[str, Settings], seed: int) -> dict[str, Settings]:
    """Return runs of 300 epochs, as long as those of arXiv 2010.13498, by method."""
    runs = equal(chosen, seed)
    return {method: dataclasses.replace(runs[method], epochs=300) for method in _LONG}


def report(seed: int) -> dict[str, Settings]:
    """Return the runs with the report's epochs and rates (its figure 6), by method."""
    baseline = dataclasses.replace(
        _BASE,
        epochs=_BASELINE_EPOCHS,
        optimizer="sgd",
        learning_rate=0.001,
        schedule="constant",
        weight_decay=0.0,
        evaluate_every=5,
        seed=seed,
    )
    runs = report_budget(baseline)
    del runs["mixture"]  # the report has none
    return runs


def half(chosen: Mapping[str, Settings], seed: int) -> dict[str, Settings]:
    """Return runs that know the first five classes only, by method."""
    runs = equal(chosen, seed)
    return {method: dataclasses.replace(runs[method], classes=_CLASSES) for method in _HALF}


def ablations(seed: int) -> dict[str, Settings]:
    """Return the runs that differ in one thing from the first, by what that is.

    They are shorter than those of the comparison, and scored on held-out training images.
    """
    base = dataclasses.replace(
        _GAUSSIAN, epochs=60, samples=64, validation=HELD_OUT, log_every=1000, seed=seed
    )
    fixed = _fixed(base)
    flow = {"posterior": "flow"}
    changes: list[dict[str, Any]] = [
        {},
        {"noise": "position"},
        {"prior_scale": 0.2},
        {"prior_scale": 0.5},
        {"learn_prior_scale": True},
        {"beta": 1.0},
        {"beta": 10.0},
        {"beta": 100.0},
        {"gamma": 30.0},
        {"kl_warmup": 40},
        {"warmup_epochs": 5},
        {"stochastic_learning_rate": 0.1},
        {"train_samples": 2},
        fixed,
        {"deterministic_layers": "conv1"},
        {"deterministic_layers": "conv1", **fixed},
        flow,
        {**flow, "flow_depth": 1},
        {**flow, "flow_depth": 6},
        {**flow, "flow_layers": "conv[2-7]"},
    ]
    return {_label(change): dataclasses.replace(base, **change) for change in changes}


def _label(change: Mapping[str, Any]) -> str:
    words = (
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in change.items()
    )
    return ",".join(words) or "reference"


def first_runs(seeds: Sequence[int], parts: Sequence[str] = PARTS) -> dict[str, Settings]:
    """Return the runs that do not wait for others, by name: trials, report and ablations."""
    found = {}
    if _NEEDS_TRIALS & set(parts):
        found |= {
            f"trials/cifar10/{method}/{name}": dataclasses.replace(settings, seed=seeds[0])
            for method, choices in candidates().items()
            for name, settings in choices.items()
        }
    if "report" in parts:
        found |= {
            f"report/cifar10/{method}/seed{seed}": settings
            for seed in seeds
            for method, settings in report(seed).items()
        }
    if "ablations" in parts:
        found |= {
            f"ablations/cifar10/{name}/seed{seeds[0]}": settings
            for name, settings in ablations(seeds[0]).items()
        }
    return found


def final_runs(
    chosen: Mapping[str, Settings],
    seeds: Sequence[int],
    parts: Sequence[str] = PARTS,
    methods: Sequence[str] = METHODS,
) -> dict[str, Settings]:
    """Return the runs with chosen settings, by name: equal budgets, long, half of the classes."""
    makers = {"equal": equal, "long": long, "half": half}
    return {
        f"{part}/cifar10/{method}/seed{seed}": made[method]
        for part, make in makers.items()
        if part in parts
        for seed in seeds
        for made in [make(chosen, seed)]
        for method in methods
        if method in made
    }


def choose(
    runs: Mapping[str, Settings], found: Mapping[str, dict[str, Any]]
) -> dict[str, Settings]:
    """Return the settings of the best trial of each method."""
    trials = {name: settings for name, settings in runs.items() if name.startswith("trials/")}
    return {method: settings for (_, method), settings in best(trials, found).items()}


def evaluations_of(name: str) -> dict[str, robustness.Settings]:
    """Return what a run is evaluated on besides the test, by the name of a folder."""
    budget, _, method, _ = name.split("/")
    if budget == "equal":
        return {"robustness": SHIFTS}
    if budget == "half":
        shifts = ("clean", "foreign")
        return {"robustness": dataclasses.replace(SHIFTS, classes=_CLASSES, shifts=shifts)}
    if (budget, method) == ("ablations", "reference"):
        clean = dataclasses.replace(SHIFTS, shifts=("clean",), limit=None)
        return {f"draws{count}": dataclasses.replace(clean, samples=count) for count in DRAWS}
    return {}


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
    say: Say = print,
) -> Results:
    """Run the experiment.

    Settings are chosen by the NLL of 5,000 training images that the trials did not see, with the
    first seed. Then each method is trained on all training images with every seed, and tested once.

    Args:
        folder: for the runs; what is there already is not run again.
        seeds: of the runs.
        parts: some of `PARTS`.
        methods: some of `METHODS`, of the equal budgets and the half of the classes.
        quick: a few steps on a few images, to see that all of it works.
        train: run what is not finished; else it is left out, and named in the results.
        jobs: processes at once.
        data_dir: where the data is cached.
        say: called with lines of progress.

    Raises:
        RunError: if nothing is to be trained, and not even the trials are finished.
    """
    for part in parts:
        _checks.one_of("parts", part, PARTS)
    for method in methods:
        _checks.one_of("methods", method, METHODS)
    runs: dict[str, Settings] = {}
    found: dict[str, dict[str, Any]] = {}

    def take(new: dict[str, Settings]) -> None:
        new = _shortened(new) if quick else new
        evaluations = {name: evaluations_of(name) for name in new}
        if quick:
            evaluations = {name: _shortened_evaluations(of) for name, of in evaluations.items()}
        options = {"jobs": jobs, "data_dir": data_dir, "train": train, "say": say}
        runs.update(new)
        found.update(run_all(new, folder, evaluations=evaluations, **options))

    take(first_runs(seeds, parts))
    if _NEEDS_TRIALS & set(parts):
        if unknown := [name for name in runs if name.startswith("trials/") and name not in found]:
            raise RunError(f"What to train is not known: {unknown[0]} is not finished.")
        take(final_runs(choose(runs, found), seeds, parts, methods))

    def rows(*budgets: str) -> list[dict[str, Any]]:
        return [
            {**row(name, settings, found[name]), "seconds": found[name]["seconds"]["training"]}
            for name, settings in runs.items()
            if name in found and name.split("/")[0] in budgets
        ]

    shifted, draws = [], []
    for name, metrics in found.items():
        budget, _, method, _ = name.split("/")
        known = {"budget": budget, "method": method, "seed": runs[name].seed}
        for folder_name, measured in metrics["evaluations"].items():
            if folder_name == "robustness":
                shifted += [known | one for one in measured]
            else:
                draws += [known | {"samples": int(folder_name.removeprefix("draws"))} | measured[0]]
    return Results(
        rows=rows("equal", "long", "report", "half"),
        trials=rows("trials"),
        ablations=rows("ablations"),
        draws=draws,
        robustness=shifted,
        missing=[name for name in runs if name not in found],
    )


def _shortened(runs: Mapping[str, Settings]) -> dict[str, Settings]:
    """Return all runs in small, but of the trials one a method, and of the ablations two."""
    found: dict[str, Settings] = {}
    count: dict[str, int] = {}
    for name, settings in runs.items():
        budget, _, method, _ = name.split("/")
        group = f"{budget}/{method}" if budget == "trials" else budget
        count[group] = count.get(group, 0) + 1
        if count[group] <= {"trials": 1, "ablations": 2}.get(budget, len(runs)):
            found[name] = shortened(settings)
    return found


def _shortened_evaluations(
    evaluations: Mapping[str, robustness.Settings],
) -> dict[str, robustness.Settings]:
    few = {"corruptions": SHIFTS.corruptions[:1], "degrees": (90,), "foreign": ("mnist",)}
    return {
        name: dataclasses.replace(settings, **few, limit=100, samples=min(2, settings.samples))
        for name, settings in evaluations.items()
    }
