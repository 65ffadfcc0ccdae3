"""The cost of 128 samples, to that of 128 deterministic passes at their best batch size."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from tfp_ibnn import models
from tfp_ibnn.experiments.benchmark import timing
from tfp_ibnn.experiments.benchmark.networks import KINDS, compiled, images, stochastic
from tfp_ibnn.experiments.benchmark.record import Row, row
from tfp_ibnn.experiments.benchmark.settings import Settings
from tfp_ibnn.experiments.benchmark.training import ENSEMBLE, tfp_rows
from tfp_ibnn.prediction.monte_carlo import MonteCarlo

__all__ = ["IMAGES", "SAMPLES", "passes", "predictions", "time_passes"]

SAMPLES = 128
IMAGES = 100
BATCHES = (32, 64, 128, 256, 512, 1024)
"""Batch sizes that the deterministic network may choose from."""

_SHARED = {"gaussian": 1.10, "flow": 1.15}
_OWN = {"gaussian": 1.3, "flow": 1.5}


def predictions(settings: Settings) -> Iterator[Row]:
    """Time 128 samples of LeNet on 100 images, and the prediction of other methods."""
    keras.utils.set_random_seed(settings.seed)
    x, _ = images(IMAGES, settings.seed)
    actions, described = {}, {}
    for independent, targets in ((False, _SHARED), (True, _OWN)):
        if settings.short and independent:
            continue
        for kind, name in KINDS.items():
            found = f"prediction.{'own' if independent else 'shared'}.{kind}"
            draws = "draws for each example" if independent else "shared samples"
            described[found] = (f"LeNet, 128 {draws}, {name}", targets[kind])
            average = MonteCarlo(
                stochastic("lenet", kind), SAMPLES, independent=independent, from_logits=True
            )
            actions[found] = compiled(average, x)
    if not settings.short:
        for kind, name in KINDS.items():
            options = {"independent": True, "seed": settings.seed, "from_logits": True}
            average = MonteCarlo(stochastic("lenet", kind), SAMPLES, **options)
            found = f"prediction.seeded.{kind}"
            described[found] = (f"LeNet, 128 draws for each example, with a seed, {name}", None)
            actions[found] = compiled(average, x)
        average = MonteCarlo(models.lenet(dropout=0.1), SAMPLES, dropout=True, from_logits=True)
        described["prediction.dropout"] = ("LeNet, 128 samples, MC dropout", None)
        actions["prediction.dropout"] = compiled(average, x)
        described["prediction.ensemble"] = ("LeNet, deep ensemble of 4 (four passes)", None)
        members = [compiled(models.lenet(), x) for _ in range(ENSEMBLE)]
        actions["prediction.ensemble"] = lambda: sum(member() for member in members)
    actions |= passes(models.lenet(), settings.seed)
    times, reference, batch = time_passes(actions, max(4, settings.rounds // 2))
    for found, (label, target) in described.items():
        seconds = {"prediction": min(times[found]), "deterministic": min(reference)}
        measured = timing.ratio(times[found], reference)
        yield row(found, label, measured, target, seconds=seconds, best_batch=batch)
    if settings.short:
        return
    for kind, name in KINDS.items():
        ours, theirs = times[f"prediction.shared.{kind}"], times["prediction.ensemble"]
        yield row(
            f"prediction.to_ensemble.{kind}",
            f"LeNet, 128 shared samples, {name}, to the ensemble of 4",
            timing.ratio(ours, theirs),
            seconds={"prediction": min(ours), "ensemble": min(theirs)},
        )
    yield from tfp_rows("prediction", settings)


def passes(model: Any, seed: int, make: Callable = compiled) -> dict[str, timing.Action]:
    """Return actions that run a deterministic network at each batch size.

    Each returns the seconds of 128 passes over 100 images, found from an eighth of them.
    """
    needed = IMAGES * SAMPLES

    def action(batch: int) -> timing.Action:
        repeats = max(1, needed // (8 * batch))
        run = make(model, images(batch, seed)[0], repeats)
        return lambda: run() * needed / (repeats * batch)

    return {f"batch {batch}": action(batch) for batch in BATCHES}


def time_passes(
    actions: Mapping[str, timing.Action], rounds: int
) -> tuple[dict[str, list[float]], list[float], int]:
    """Return the times of all actions, those of the best batch size, and that size."""
    times = timing.interleave(actions, rounds)
    best = min(BATCHES, key=lambda batch: min(times[f"batch {batch}"]))
    return times, times[f"batch {best}"], best
