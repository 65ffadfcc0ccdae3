"""What the comparisons of methods have in common: the report's budget, trials, and rows.

A run is known by a name of four parts: budget, dataset, method, and what tells it from others.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.folder import RunError
from experiments.settings import Settings
from experiments.summary import SCORES

__all__ = ["HELD_OUT", "best", "planned", "report_budget", "row", "shortened"]

HELD_OUT = 5_000
"""Training images that trials do not see, and are scored on."""

_REPORT_DROPOUT = 0.2


def report_budget(baseline: Settings) -> dict[str, Settings]:
    """Return the runs with the report's epochs and rates, by method.

    The baseline is trained by SGD. All others begin with such a training, MC dropout under dropout,
    and have 50 epochs of Adam more; the stochastic ones with a rate of their own for the
    posteriors, noise for each position, the KL averaged over positions, the affine map first, and
    the prior N(1, 0.5²). The report does not tell its rate of dropout, nor has it a mixture: there
    0.2 and four components are ours. "deterministic_continued" is the control that the report
    lacks.

    Args:
        baseline: settings of the deterministic network.
    """
    continued = dataclasses.replace(
        baseline,
        pretrain_epochs=baseline.epochs,
        pretrain_optimizer=baseline.optimizer,
        pretrain_learning_rate=baseline.learning_rate,
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


def best(
    trials: Mapping[str, Settings], found: Mapping[str, dict[str, Any]]
) -> dict[tuple[str, str], Settings]:
    """Return for each dataset and method the settings of the least held-out NLL.

    Args:
        trials: settings by name.
        found: what the trials that did not fail measured, by name.

    Raises:
        RunError: if all trials of a method failed.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name in trials:
        _, dataset, method, _ = name.split("/")
        groups.setdefault((dataset, method), []).append(name)
    chosen = {}
    for (dataset, method), names in groups.items():
        scores = {name: found[name]["nll"] for name in names if name in found}
        finite = {name: nll for name, nll in scores.items() if not math.isnan(nll)}
        if not finite:
            raise RunError(
                f"No trial of {method} on {dataset} is finished, by which its settings are chosen."
            )
        chosen[dataset, method] = trials[min(finite, key=finite.get)]
    return chosen


def row(name: str, settings: Settings, metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a run in the tables of `summarise`."""
    keys = (*SCORES, "samples", "parameters", "backend", "hardware", "versions", "python")
    return planned(name, settings) | {key: metrics[key] for key in keys}


def planned(name: str, settings: Settings) -> dict[str, Any]:
    """Return what is known of such a row before the run; "training" is its command, for seed 0."""
    budget, _, method, _ = Path(name).parts
    return {
        "dataset": settings.dataset,
        "model": settings.model,
        "method": method,
        "budget": budget,
        "epochs": settings.pretrain_epochs + settings.epochs,
        "seed": settings.seed,
        "training": dataclasses.replace(settings, seed=0).command(),
    }


def shortened(settings: Settings) -> Settings:
    """Return settings for a look at whether all of it works; its scores mean nothing."""
    return dataclasses.replace(
        settings,
        limit=300,
        validation=100 if settings.validation else 0,
        epochs=1,
        kl_warmup=min(1, settings.kl_warmup),
        warmup_epochs=0,
        pretrain_epochs=min(1, settings.pretrain_epochs),
        evaluate_every=min(1, settings.evaluate_every),
        evaluation_samples=2,
        samples=4,
        batch_size=100,
    )
