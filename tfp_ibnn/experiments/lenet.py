"""The LeNet experiment: the original report's Figure 5, and the same at equal budgets."""

import dataclasses
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

from tfp_ibnn._core import checks
from tfp_ibnn.experiments.comparison import HELD_OUT, best, report_budget, row, shortened
from tfp_ibnn.experiments.fleet import run_all
from tfp_ibnn.experiments.folder import RunError
from tfp_ibnn.experiments.settings import Settings
from tfp_ibnn.models import POSTERIORS

__all__ = ["DATASETS", "METHODS", "candidates", "equal", "lenet", "report"]

Say = Callable[[str], None]

DATASETS = ("fashion_mnist", "cifar10")
METHODS = ("deterministic", "mc_dropout", "gaussian", "mixture", "flow")

# The report's baselines: epochs of training.
_BASELINE = {"fashion_mnist": 10, "cifar10": 20}
_EQUAL_EPOCHS = 60

# What a method has to offer against overfitting, weak to strong.
_STRENGTHS = {
    "deterministic": [{"weight_decay": decay} for decay in (0.0, 5e-3, 2e-2)],
    "mc_dropout": [{"dropout": rate} for rate in (0.02, 0.05, 0.1)],
    "posterior": [{"prior_scale": 0.2}, {"prior_scale": 0.5}, {"prior_scale": 0.5, "beta": 10.0}],
}


def report(dataset: str, seed: int) -> dict[str, Settings]:
    """Return the runs with the report's epochs and rates, by method."""
    baseline = Settings(
        dataset=dataset,
        model="lenet",
        posterior="none",
        epochs=_BASELINE[dataset],
        optimizer="sgd",
        learning_rate=0.002,
        schedule="constant",
        evaluate_every=5,
        seed=seed,
    )
    return report_budget(baseline)


def candidates(dataset: str, method: str) -> dict[str, Settings]:
    """Return the settings that a method may choose from at equal budget, six for each.

    They are two learning rates times three strengths of what the method has to offer against
    overfitting: weight decay, the rate of dropout, or the scale of the prior and the weight of the
    KL.
    """
    base = Settings(
        dataset=dataset,
        model="lenet",
        posterior="none",
        epochs=_EQUAL_EPOCHS,
        batch_size=256,
        validation=HELD_OUT,
    )
    found = {}
    for rate, own in itertools.product(
        (0.02, 0.06), _STRENGTHS.get(method, _STRENGTHS["posterior"])
    ):
        name = "-".join(f"{key}{value:g}" for key, value in {"rate": rate, **own}.items())
        settings = dataclasses.replace(base, learning_rate=rate, **own)
        if method in POSTERIORS:
            settings = dataclasses.replace(
                settings, posterior=method, stochastic_learning_rate=2 * rate
            )
        if method == "mixture":
            # The components start apart by as much as the prior allows.
            settings = dataclasses.replace(settings, mean_spread=settings.prior_scale)
        found[name] = settings
    return found


def equal(chosen: Settings, seed: int) -> Settings:
    """Return the final run of a method: the chosen settings, all training images, the test."""
    return dataclasses.replace(chosen, validation=0, seed=seed)


def lenet(
    folder: str | os.PathLike,
    seeds: Sequence[int],
    *,
    datasets: Sequence[str] = DATASETS,
    methods: Sequence[str] = METHODS,
    quick: bool = False,
    jobs: int = 1,
    data_dir: str | os.PathLike | None = None,
    missing: dict[str, str] | None = None,
    say: Say = print,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run the experiment; return a row for each run of the table, and one for each trial.

    Settings are chosen by the NLL of 5,000 training images that the trials did not see, with the
    first seed. Then each method is trained on all training images with every seed, and tested once.
    A trial may fail: there are others.

    Args:
        folder: for the runs; what is there already is not run again.
        seeds: of the runs.
        datasets: some of `DATASETS`.
        methods: some of `METHODS`.
        quick: a few steps on a few images, to see that all of it works.
        jobs: processes at once.
        data_dir: where the data is cached.
        missing: gets the names of the runs that failed, and why.
        say: called with lines of progress.

    Raises:
        RunError: if a run of the table failed, when all others are finished.
    """
    missing = {} if missing is None else missing
    for dataset in datasets:
        checks.one_of("datasets", dataset, DATASETS)
    for method in methods:
        checks.one_of("methods", method, METHODS)
    shorten = shortened if quick else lambda settings: settings
    options = {"jobs": jobs, "data_dir": data_dir, "missing": missing, "say": say}

    trials = {
        f"trials/{dataset}/{method}/{name}": shorten(dataclasses.replace(settings, seed=seeds[0]))
        for dataset, method in itertools.product(datasets, methods)
        for name, settings in itertools.islice(
            candidates(dataset, method).items(), 1 if quick else None
        )
    }
    runs = {
        f"report/{dataset}/{method}/seed{seed}": shorten(settings)
        for dataset, seed in itertools.product(datasets, seeds)
        for method, settings in report(dataset, seed).items()
        if method.removesuffix("_continued") in methods
    }
    # Together, so that no process waits while the last trials end.
    found = run_all(trials | runs, folder, **options)
    tried = [row(name, trials[name], found[name]) for name in trials if name in found]
    chosen = best(trials, found)
    finals = {
        f"equal/{dataset}/{method}/seed{seed}": equal(chosen[dataset, method], seed)
        for (dataset, method), seed in itertools.product(chosen, seeds)
    }
    found |= run_all(finals, folder, **options)
    runs |= finals
    if failed := [name for name in runs if name in missing]:
        name = failed[0]
        raise RunError(f"{len(failed)} of {len(runs)} runs failed. {name}: {missing[name]}")
    return [row(name, settings, found[name]) for name, settings in runs.items()], tried
