"""Candidates without training: the model as it is, those of the user, MC dropout, Laplace."""

import functools
import math
import time
import warnings
from collections.abc import Iterator

import numpy as np

from tfp_ibnn.calibration.engine import Engine
from tfp_ibnn.calibration.examples import Examples
from tfp_ibnn.calibration.fine_tuning import NOISE
from tfp_ibnn.calibration.network import without_graph
from tfp_ibnn.calibration.reading import Reader
from tfp_ibnn.calibration.trials import Setting, Trial, attempt, posterior_engine
from tfp_ibnn.conversion.copying import copy_of
from tfp_ibnn.weights import Laplace
from tfp_ibnn.weights.features import last_weighted_layer

EXAMPLES = 10_000
"""The largest number of training examples that a posterior is fitted to."""
FULL = 2_000
"""The largest number of weights for which a last layer gets a full covariance."""
MOST_WEIGHTS = 1_000_000
"""The largest number of weights for `Laplace` of all weights, which is too slow above."""
MOST_OUTPUTS = 100
"""The largest number of outputs for `Laplace` of all weights, which is too slow above."""
PRIOR_FACTORS = (1, 10, 100, 1000)
"""Factors of the prior precision: the marginal likelihood's is too low for overfitted networks."""


def as_it_is(setting: Setting) -> Iterator[Trial]:
    """Give the model as it is."""
    make = functools.partial(copy_of, setting.model)
    yield Trial("as it is", Engine(make, seed=setting.seed))


def given(setting: Setting) -> Iterator[Trial]:
    """Give the candidates of the user."""
    for name, engine in setting.candidates.items():
        yield Trial(name, engine)


def mc_dropout(setting: Setting) -> Iterator[Trial]:
    """Give the model with its dropout left on, if it has any."""
    make = functools.partial(copy_of, setting.model)
    with warnings.catch_warnings(action="ignore"):  # models without dropout
        engine = Engine(make, setting.samples, dropout=True, seed=setting.seed)
    if engine.samples > 1:
        yield Trial("MC dropout", engine)


def laplace_of_the_last_layer(setting: Setting) -> Iterator[Trial]:
    """Give a Gaussian around the trained weights of the last layer, linearized."""
    yield _laplace("Laplace, last layer", "last_layer", setting)


def laplace_of_all_weights(setting: Setting) -> Iterator[Trial]:
    """Give a Gaussian around all trained weights, linearized."""
    trial = _laplace("Laplace, all weights", "all", setting)
    if _too_slow_for_minutes(setting):
        trial.effort = "trainings"
    yield trial


def training_examples(setting: Setting) -> Examples:
    """Return training examples, every n-th one if there are many."""
    reader = Reader(setting.model, setting.output, "train")
    return reader.read(setting.training.data, _every(setting))


def _every(setting: Setting) -> int:
    """Return n if every n-th training example is taken."""
    return -(-setting.training.size // EXAMPLES)


def _laplace(name: str, subset: str, setting: Setting) -> Trial:
    make = functools.partial(_laplace_trial, setting, name, subset)
    return attempt(name, make, setting)


def _laplace_trial(setting: Setting, name: str, subset: str) -> Trial:
    """Return a trial of a fitted `Laplace`, with a state for each of its prior precisions."""
    start = time.monotonic()
    if without_graph(setting.model) is not setting.model:
        raise ValueError("`model` has a `call` of its own.")
    structure = _hessian_structure(setting, subset)
    examples = _counted(training_examples(setting), setting)
    with warnings.catch_warnings(action="ignore"):  # the comparison shows what they warn about
        posterior = _fitted_laplace(setting, examples, subset, structure)
        engine = posterior_engine(setting, posterior)
    state = engine.read()
    is_prior = [variable is posterior.prior_precision for variable in posterior.variables]
    place = is_prior.index(True)
    states = []
    for factor in PRIOR_FACTORS:
        changed = list(state)
        changed[place] = factor * state[place]
        states.append(changed)
    return Trial(name, engine, seconds=time.monotonic() - start, states=states)


def _hessian_structure(setting: Setting, subset: str) -> str:
    """Return the structure of the Hessian for these weights, or raise if it would be too slow."""
    if subset == "last_layer":
        is_small = last_weighted_layer(setting.model).count_params() <= FULL
        return "full" if is_small else "kron"
    reason = too_slow(setting)
    if reason:
        raise ValueError(reason)
    return "kron"


def too_slow(setting: Setting) -> str:
    """Return why `Laplace` of all weights would take too long; "" if it would not."""
    size = setting.model.count_params()
    width = setting.output.width
    if size > MOST_WEIGHTS or width > MOST_OUTPUTS:
        return (
            f"it is for at most {MOST_WEIGHTS:,} weights and {MOST_OUTPUTS} outputs; "
            f"got {size:,} and {width}."
        )
    return "" if setting.effort == "trainings" else _too_slow_for_minutes(setting)


def _too_slow_for_minutes(setting: Setting) -> str:
    """Return why `Laplace` of all weights would take too long at effort "minutes"; or ""."""
    # A pass back for each output, and the fine-tuning, without noise and with it.
    model_epochs = setting.model_epochs or math.inf
    hessian = setting.output.width / _every(setting) / model_epochs
    fine_tuning = (1 + NOISE) * setting.epochs / model_epochs
    if hessian + fine_tuning > setting.most:
        return (
            f"it takes {hessian:.2g} trainings of `model`, after {fine_tuning:.2g} of fine-tuning; "
            f"effort='minutes' has {setting.most:g}."
        )
    return ""


def _fitted_laplace(setting: Setting, examples: Examples, subset: str, structure: str) -> Laplace:
    posterior = Laplace(
        copy_of(setting.model),
        subset,
        structure,
        # The larger prior precisions are compared as states.
        prior_precision="marglik",
        # A temperature below 1 compensates for the examples that are not used.
        temperature=1 / _every(setting),
        **setting.output.head,
    )
    posterior.fit(examples.x, examples.y, sample_weight=examples.weight, verbose=0)
    return posterior


def _counted(examples: Examples, setting: Setting) -> Examples:
    """Return examples in which labels of the loss's `ignore_class` have the weight 0.

    Args:
        examples: of the training data, with weights or without.
        setting: what their targets are.
    """
    ignored = getattr(setting.output, "ignored", None)
    if ignored is None:
        return examples
    y = examples.y
    if y.ndim == len(setting.model.outputs[0].shape):
        y = y[..., 0]
    is_counted = y != ignored
    weight = is_counted.astype("float64")
    if examples.weight is not None:
        ones = (1,) * (y.ndim - examples.weight.ndim)
        weight *= examples.weight.reshape(*examples.weight.shape, *ones)
    return Examples(examples.x, np.where(is_counted, y, 0), weight)
