"""The cost of a training step, to that of the deterministic network."""

from collections.abc import Iterator, Mapping

import keras

from experiments.benchmark import timing
from experiments.benchmark.networks import KINDS, stepper, stochastic
from experiments.benchmark.processes import child
from experiments.benchmark.record import Row, row
from experiments.benchmark.settings import Settings
from tfp_ibnn import models

__all__ = ["BATCH", "STEPS", "lenet_steps", "step_rows", "tfp_rows", "vgg16_steps"]

BATCH, STEPS = 128, 16
VGG_BATCH, VGG_STEPS = 32, 2
ENSEMBLE = 4

# By posterior: label, target, and what sets the network apart.
_LENET = {
    "all": ("LeNet step, {}, all layers", {"gaussian": 1.4, "flow": 1.6}, {}),
    "rest": (
        "LeNet step, {}, all but the first",
        {"gaussian": 1.15, "flow": 1.35},
        {"first": False},
    ),
    "position": (
        "LeNet step, {}, position noise",
        {"gaussian": 1.9, "flow": 2.4},
        {"noise": "position"},
    ),
}


def lenet_steps(settings: Settings) -> Iterator[Row]:
    """Time LeNet's step, batch 128, 16 steps an execution, and those of other methods."""
    steps = STEPS if not settings.short else 4
    keras.utils.set_random_seed(settings.seed)

    def action(model: keras.Model) -> timing.Action:
        return stepper(model, BATCH, steps, settings.seed)

    actions = {"deterministic": action(models.lenet())}
    described = {}
    for part, (label, targets, options) in _LENET.items():
        if settings.short and part != "all":
            continue
        for kind, name in KINDS.items():
            found = f"training.{part}.{kind}"
            described[found] = (label.format(name), targets[kind])
            actions[found] = action(stochastic("lenet", kind, **options))
    if not settings.short:
        found = "training.dropout"
        described[found] = ("LeNet step, MC dropout", None)
        actions[found] = action(models.lenet(dropout=0.1))
        found = "training.ensemble"
        described[found] = ("LeNet step, deep ensemble of 4 (four networks)", None)
        members = [action(models.lenet()) for _ in range(ENSEMBLE)]
        actions[found] = lambda: sum(member() for member in members)
    yield from step_rows(actions, described, settings.rounds)
    if not settings.short and keras.backend.backend() == "tensorflow":
        yield from tfp_rows("training", settings)


def vgg16_steps(settings: Settings) -> Iterator[Row]:
    """Time VGG16's step, batch 32, 2 steps an execution."""
    keras.utils.set_random_seed(settings.seed)
    networks = {"deterministic": models.vgg16()}
    described = {}
    for kind, target in (("gaussian", 1.05), ("flow", 1.15)):
        found = f"vgg16.all.{kind}"
        described[found] = (f"VGG16 step, {KINDS[kind]}, all layers", target)
        networks[found] = stochastic("vgg16", kind)
    actions = {
        name: stepper(model, VGG_BATCH, VGG_STEPS, settings.seed)
        for name, model in networks.items()
    }
    yield from step_rows(actions, described, max(4, settings.rounds // 4))


def step_rows(
    actions: Mapping[str, timing.Action],
    described: Mapping[str, tuple[str, float | None]],
    rounds: int,
) -> Iterator[Row]:
    """Time actions in turn; give a row for each that is described, to "deterministic"."""
    times = timing.interleave(actions, rounds)
    reference = times["deterministic"]
    for found, (label, target) in described.items():
        seconds = {"step": min(times[found]), "deterministic": min(reference)}
        yield row(found, label, timing.ratio(times[found], reference), target, seconds=seconds)


def tfp_rows(group: str, settings: Settings) -> Iterator[Row]:
    """Give the rows of TensorFlow Probability's own layers, timed in a process of their own."""
    rows = child(
        "tfp_layers",
        group,
        settings.rounds,
        settings.seed,
        environment={"TF_USE_LEGACY_KERAS": "1"},
    )
    yield from rows
