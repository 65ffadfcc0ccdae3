"""Noise added to the trained network, without training."""

import functools
import time
import warnings
from collections.abc import Iterator

import numpy as np

from tfp_ibnn._core import constraints
from tfp_ibnn.calibration.engine import Engine, State
from tfp_ibnn.calibration.rows import every_nth
from tfp_ibnn.calibration.trials import OutOfTime, Setting, Trial, attempt, posterior_engine
from tfp_ibnn.conversion.convert import to_stochastic
from tfp_ibnn.conversion.copying import copy_of
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.posteriors import NormalAffine
from tfp_ibnn.prediction.batch_norm import BATCH_SIZE, BatchStatistics, batch_norms

SCALES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
"""The standard deviations of the noise that are tried."""
SCREENED = 512
"""The largest number of examples on which all scales are tried, if others score the choice."""
SCREENING_DRAWS = 8
"""The largest number of draws by which scales are compared."""


def noise(setting: Setting) -> Iterator[Trial]:
    """Give the model with Gaussian noise of mean one and one scale on the inputs of all layers.

    The scale is the one of `SCALES` with the lowest NLL on the examples to fit, or on every n-th of
    them, by few draws. With cross-fitting several scales are states if folds differ in the best.
    """
    yield attempt("noise", functools.partial(_noise, setting), setting)


def _noise(setting: Setting) -> Trial:
    start = time.monotonic()
    make = functools.partial(
        to_stochastic,
        setting.model,
        NormalAffine(initial_scale=SCALES[0]),
        train_size=setting.training.size,
        seed=setting.seed,
    )
    with warnings.catch_warnings(action="ignore"):  # of layers that take no noise
        engine = Engine(make, setting.samples, seed=setting.seed)
    states = _best_states(_states_by_scale(engine), engine, setting)
    return Trial("noise", engine, seconds=time.monotonic() - start, states=states)


def _states_by_scale(engine: Engine) -> list[State]:
    """Return a state for each of the scales, which share all other values."""
    layers = stochastic_layers(engine.network)
    of_scales = {id(layer.posterior.affine.raw_scale) for layer in layers}
    variables = engine.network.variables
    state = engine.read()
    states = []
    for scale in SCALES:
        raw_scale = constraints.inverse_scale(scale)
        changed = []
        for variable, value in zip(variables, state, strict=True):
            is_scale = id(variable) in of_scales
            changed.append(np.full_like(value, raw_scale) if is_scale else value)
        states.append(changed)
    return states


def _best_states(states: list[State], engine: Engine, setting: Setting) -> list[State]:
    """Return the states with the lowest NLL by a few draws: on all examples, and without each fold.

    Args:
        states: those to compare, by the same random numbers.
        engine: draws in each of them.
        setting: the examples to fit; without folds, a part of them is enough.

    Raises:
        OutOfTime: if the time limit is over before all are compared.
    """
    data = setting.data
    if data.folds is None:
        every = -(-data.fit.size // SCREENED)
        screened = every_nth(data.fit, every, setting.output, setting.seed)
        data = data._replace(fit=screened)
    draws = min(SCREENING_DRAWS, setting.samples)
    screening = Engine(lambda: engine.network, draws, seed=setting.seed)
    nlls = []
    for state in states:
        if time.monotonic() > setting.end:
            raise OutOfTime
        raw = screening.draw(state, data.fit.x)
        nlls.append(data.best_nlls(raw, setting.output))
    best = np.argmin(nlls, axis=0)
    return [states[place] for place in np.unique(best)]


def mc_batch_norm(setting: Setting) -> Iterator[Trial]:
    """Give the model with the statistics of random mini-batches, if it has batch normalization."""
    if batch_norms(setting.model):
        name = "MC batch normalization"
        yield attempt(name, functools.partial(_mc_batch_norm, setting, name), setting)


def _mc_batch_norm(setting: Setting, name: str) -> Trial:
    start = time.monotonic()
    training = setting.training
    posterior = BatchStatistics.of(
        copy_of(setting.model),
        training.data,
        setting.samples,
        batch_size=training.batch_size or BATCH_SIZE,
        seed=setting.seed,
    )
    engine = posterior_engine(setting, posterior)
    return Trial(name, engine, seconds=time.monotonic() - start)
