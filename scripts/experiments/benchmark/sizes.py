"""What needs no clock, or a coarse one: extra parameters, and the time of a conversion."""

import math
from collections.abc import Iterator
from typing import Any

import keras

from experiments.benchmark import timing
from experiments.benchmark.networks import KINDS, TRAIN_SIZE, stochastic
from experiments.benchmark.record import Row, row
from experiments.benchmark.settings import Settings
from tfp_ibnn import NormalAffine, models, to_stochastic

__all__ = ["conversion_time", "extra_parameters"]


def extra_parameters(settings: Settings) -> Iterator[Row]:
    """Count the trainable weights that a posterior adds to VGG16."""
    plain = _weights(models.vgg16())
    for kind, target in (("gaussian", 0.1), ("flow", 10.0)):
        share = 100 * (_weights(stochastic("vgg16", kind)) / plain - 1)
        measured = {"ratio": share, "median": share, "noise": 0.0}
        label = f"VGG16, extra parameters, {KINDS[kind]}"
        yield row(f"parameters.{kind}", label, measured, target, "%", parameters=plain)


def conversion_time(settings: Settings) -> Iterator[Row]:
    """Time `to_stochastic` of ResNet50."""
    plain = keras.applications.ResNet50(weights=None)

    def convert() -> Any:
        return to_stochastic(plain, NormalAffine(), TRAIN_SIZE)

    times = [timing.seconds_of(convert) for _ in range(4)]
    yield row("conversions", "to_stochastic of ResNet50", timing.smallest(times), 5.0, "s")


def _weights(model: keras.Model) -> int:
    return sum(math.prod(weight.shape) for weight in model.trainable_variables)
