"""The LeNet experiment: the original report's Figure 5, and the same at equal budgets."""

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfp_ibnn import _checks
from tfp_ibnn.experiments.fleet import run_all
from tfp_ibnn.experiments.settings import Settings
from tfp_ibnn.experiments.summary import SCORES
from tfp_ibnn.models import POSTERIORS

__all__ = ["DATASETS", "METHODS", "candidates", "equal", "lenet", "report"]

Say = Callable[[str], None]

DATASETS = ("fashion_mnist", "cifar10")
METHODS = ("deterministic", "mc_dropout", "gaussian", "mixture", "flow")

# The report's baselines: epochs of training.
_BASELINE = {"fashion_mnist": 10, "cifar10": 20}
_REPORT_DROPOUT = 0.2
_EQUAL_EPOCHS = 60
_HELD_OUT = 5_000

# What a method has to offer against overfitting, weak to strong.
_STRENGTHS = {
    "deterministic": [{"weight_decay": decay} for decay in (0.0, 5e-3, 2e-2)],
    "mc_dropout": [{"dropout": rate} for rate in (0.02, 0.05, 0.1)],
    "posterior": [{"prior_scale": 0.2}, {"prior_scale": 0.5}, {"prior_scale": 0.5, "beta": 10.0}],
}


def report(dataset: str, seed: int) -> dict[str, Settings]:
    """Return the runs with the report's epochs and rates, by method.

    The baseline is trained by SGD at 0.002. All others begin with the same baseline training and
    have 50 epochs of Adam more, the stochastic ones with a rate of their own for the posteriors,
    noise for each position, the KL averaged over positions, the affine map first, and the prior
    N(1, 0.5²). The report does not tell its rate of dropout, nor has it a mixture: there 0.2 and
    four components are ours. "deterministic_continued" is the control that the report lacks.
    """
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
    continued = dataclasses.replace(
        baseline,
        pretrain_epochs=baseline.epochs,
        pretrain_optimizer="sgd",
        pretrain_learning_rate=0.002,
        epochs=50,
        optimizer="adam",
        learning_rate=2e-4,
    )
    stochastic = dataclasses.replace(
        continued,
        stochastic_learning_rate=2e-3,
        noise="position",
        kl_reduction="mean",
        affine="first",
        prior_scale=0.5,
    )
    return {
        "deterministic": baseline,
        "deterministic_continued": continued,
        "mc_dropout": dataclasses.replace(continued, dropout=_REPORT_DROPOUT),
        **{
            method: dataclasses.replace(stochastic, posterior=method)
            for method in ("gaussian", "mixture", "flow")
        },
    }


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
        validation=_HELD_OUT,
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
    say: Say = print,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run the experiment; return a row for each run of the table, and one for each trial.

    Settings are chosen by the NLL of 5,000 training images that the trials did not see, with the
    first seed. Then each method is trained on all training images with every seed, and tested once.

    Args:
        folder: for the runs; what is there already is not run again.
        seeds: of the runs.
        datasets: some of `DATASETS`.
        methods: some of `METHODS`.
        quick: a few steps on a few images, to see that all of it works.
        jobs: processes at once.
        data_dir: where the data is cached.
        say: called with lines of progress.
    """
    for dataset in datasets:
        _checks.one_of("datasets", dataset, DATASETS)
    for method in methods:
        _checks.one_of("methods", method, METHODS)
    shorten = _quick if quick else lambda settings: settings
    options = {"jobs": jobs, "data_dir": data_dir, "say": say}

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
    tried = [_row(name, settings, found[name]) for name, settings in trials.items()]
    chosen = best(trials, found)
    finals = {
        f"equal/{dataset}/{method}/seed{seed}": equal(chosen[dataset, method], seed)
        for (dataset, method), seed in itertools.product(chosen, seeds)
    }
    found |= run_all(finals, folder, **options)
    return [_row(name, settings, found[name]) for name, settings in (runs | finals).items()], tried


def best(
    trials: Mapping[str, Settings], found: Mapping[str, dict[str, Any]]
) -> dict[tuple[str, str], Settings]:
    """Return for each data set and method the settings of the least held-out NLL."""
    chosen: dict[tuple[str, str], str] = {}
    for name in trials:
        _, dataset, method, _ = name.split("/")
        rival = chosen.setdefault((dataset, method), name)
        if found[name]["nll"] < found[rival]["nll"] or math.isnan(found[rival]["nll"]):
            chosen[dataset, method] = name
    return {key: trials[name] for key, name in chosen.items()}


def _row(name: str, settings: Settings, metrics: dict[str, Any]) -> dict[str, Any]:
    budget, _, method, _ = Path(name).parts
    keys = (*SCORES, "samples", "parameters", "backend", "hardware", "versions", "python")
    return {
        "dataset": settings.dataset,
        "model": settings.model,
        "method": method,
        "budget": budget,
        "epochs": settings.pretrain_epochs + settings.epochs,
        "seed": settings.seed,
        **{key: metrics[key] for key in keys},
        "training": dataclasses.replace(settings, seed=0).command(),
    }


def _quick(settings: Settings) -> Settings:
    """Return settings for a look at whether all of it works; its scores mean nothing."""
    return dataclasses.replace(
        settings,
        limit=300,
        validation=100 if settings.validation else 0,
        epochs=1,
        pretrain_epochs=min(1, settings.pretrain_epochs),
        evaluate_every=min(1, settings.evaluate_every),
        evaluation_samples=2,
        samples=4,
        batch_size=100,
    )
