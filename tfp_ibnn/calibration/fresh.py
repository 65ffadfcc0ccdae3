"""Fresh trainings: ensembles, SWAG along one of them, and a network trained with noise."""

import functools
import random
import time
from collections.abc import Iterator

import keras

from tfp_ibnn._core import keras_internals
from tfp_ibnn.calibration.engine import Engine, copy_of_optimizer
from tfp_ibnn.calibration.fine_tuning import NOISE
from tfp_ibnn.calibration.trials import Setting, Trial, attempt, posterior_engine
from tfp_ibnn.calibration.untrained import training_examples
from tfp_ibnn.conversion.convert import to_stochastic
from tfp_ibnn.conversion.copying import copy_of
from tfp_ibnn.posteriors import NormalAffine
from tfp_ibnn.training.callbacks import random_state_kept
from tfp_ibnn.weights import DeepEnsemble

SIZES = (2, 3, 5)
"""The sizes of the ensembles, including the model itself."""


def ensembles(setting: Setting) -> Iterator[Trial]:
    """Give ensembles of the model and fresh networks."""
    for size in SIZES:
        name = f"ensemble of {size}"
        yield attempt(name, functools.partial(_ensemble, setting, name, size), setting)


def swag_on_the_way(setting: Setting) -> Iterator[Trial]:
    """Give SWAG's Gaussian along the training of the first fresh network."""
    yield attempt("SWAG", functools.partial(_swag, setting), setting)


def trained_with_noise(setting: Setting) -> Iterator[Trial]:
    """Give a fresh network that was trained with a Gaussian posterior over z from the start."""
    yield attempt("trained with noise", functools.partial(_noisy, setting), setting)


def _ensemble(setting: Setting, name: str, size: int) -> Trial:
    count = size - 1  # the model itself is there already
    networks = [copy_of(setting.model), *setting.fresh.first(count)]
    ensemble = DeepEnsemble(networks)
    engine = Engine(lambda: ensemble, size, seed=setting.seed)
    seconds = setting.fresh.seconds_of(count)
    return Trial(name, engine, seconds=seconds, trainings=float(count))


def _swag(setting: Setting) -> Trial:
    posterior = setting.fresh.swag()
    layers = keras_internals.nested_layers(posterior.network)
    if any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers):
        # Each draw needs its own statistics.
        inputs = training_examples(setting).x
        # In a tuple, since the inputs may be one themselves.
        posterior = posterior.materialize(setting.samples, (inputs,), seed=setting.seed)
    engine = posterior_engine(setting, posterior)
    seconds = setting.fresh.seconds_of(1)
    return Trial("SWAG", engine, seconds=seconds, trainings=1.0)


def _noisy(setting: Setting) -> Trial:
    start = time.monotonic()
    fresh = setting.fresh.untrained()
    with random_state_kept():
        random.seed(setting.seed)  # layers such as Dropout take their seeds from it
        network = to_stochastic(
            fresh, NormalAffine(), train_size=setting.training.size, seed=setting.seed
        )
    network.compile(
        optimizer=copy_of_optimizer(fresh.optimizer),
        loss=setting.loss,
        # For a squared loss, by the scale that was fitted to the model as it is.
        noise_scale=setting.output.noise_scale(setting.parameter),
    )
    setting.fresh.train(network)
    engine = Engine(functools.partial(copy_of, network), setting.samples, seed=setting.seed)
    seconds = time.monotonic() - start
    return Trial("trained with noise", engine, seconds=seconds, trainings=NOISE)
