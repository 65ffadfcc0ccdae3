"""The fine-tuned candidates: the model itself, as a control, and a Gaussian over z."""

import functools
from collections.abc import Iterator
from typing import Any

import keras

from tfp_ibnn.calibration.engine import Engine
from tfp_ibnn.calibration.fine_tuning import NOISE, decaying
from tfp_ibnn.calibration.trials import Setting, Trial, attempt
from tfp_ibnn.conversion.convert import to_stochastic
from tfp_ibnn.conversion.copying import copy_of
from tfp_ibnn.posteriors import NormalAffine
from tfp_ibnn.training import two_speed

PRIOR_SCALE = 0.1
"""Standard deviation of z at the start, and of its prior: better than 0.3 in 46 of the 55 runs of
results/calibrate."""
BETA = 10
"""The weight of the KL: of 1, 10 and 100, it was best most often in these runs, by at most 0.0003
nats on average."""
RATIO = 5
"""The posterior's learning rate, divided by that of the other weights."""


def fine_tuned(setting: Setting) -> Iterator[Trial]:
    """Give the model, trained further: a posterior must beat it to be worth its draws."""
    yield attempt("fine-tuned", functools.partial(_fine_tuned, setting), setting)


def gaussian(setting: Setting) -> Iterator[Trial]:
    """Give a Gaussian posterior over the noise on the inputs of layers."""
    yield attempt("Gaussian", functools.partial(_gaussian, setting), setting)


def _fine_tuned(setting: Setting) -> Trial:
    make = functools.partial(copy_of, setting.model)
    training = {"optimizer": _optimizer(setting), "loss": setting.loss}
    engine = Engine(make, training=training, seed=setting.seed)
    return Trial("fine-tuned", engine, trained=True)


def _gaussian(setting: Setting) -> Trial:
    make = functools.partial(
        to_stochastic,
        setting.model,
        NormalAffine(prior_scale=PRIOR_SCALE, initial_scale=PRIOR_SCALE, beta=BETA),
        train_size=setting.training.size,
        seed=setting.seed,
    )
    optimizer = _optimizer(setting)
    rate = float(keras.ops.convert_to_numpy(setting.optimizer.learning_rate))
    training: dict[str, Any] = {
        "optimizer": two_speed(optimizer, stochastic_lr=RATIO * rate),
        "loss": setting.loss,
        "noise_scale": setting.output.noise_scale(setting.parameter),
    }
    engine = Engine(make, setting.samples, training, seed=setting.seed)
    return Trial("Gaussian", engine, trained=True, slowdown=NOISE)


def _optimizer(setting: Setting) -> keras.optimizers.Optimizer:
    epochs = max(1, int(setting.epochs))
    return decaying(setting.optimizer, epochs * setting.training_part.steps)
