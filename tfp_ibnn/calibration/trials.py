"""The networks, and posteriors over their weights, that are compared."""

import dataclasses
import functools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from tfp_ibnn._core import checks
from tfp_ibnn._core.progress import silent
from tfp_ibnn.calibration.engine import Engine, State, copy_of_optimizer
from tfp_ibnn.calibration.examples import Examples, Training, Validation, read
from tfp_ibnn.conversion.convert import to_stochastic
from tfp_ibnn.conversion.copying import copy_of
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.likelihoods import Likelihood
from tfp_ibnn.posteriors import NormalAffine
from tfp_ibnn.training import two_speed
from tfp_ibnn.weights import Laplace, WeightPosterior
from tfp_ibnn.weights.features import last_weighted_layer

PRIOR_SCALES = (0.3, 0.1)
"""Prior scales of the Gaussian posteriors."""
BETAS = (1, 10, 100)
"""Weights of the KL of the Gaussian posteriors."""

EXAMPLES = 10_000
"""The largest number of training examples that `Laplace` is fitted to."""
FULL = 2_000
"""The largest number of weights for which a last layer gets a full covariance."""
MOST_WEIGHTS = 1_000_000
"""A network of more weights is too slow for `Laplace` of all weights."""
MOST_OUTPUTS = 100
"""A network of more outputs is too slow for `Laplace` of all weights."""
PRIOR_FACTORS = (1, 10, 100, 1000)
"""Of the prior precision: that of the marginal likelihood is too low for overfitted networks."""


@dataclasses.dataclass(eq=False)
class Trial:
    """What is compared: a state of an engine, unless it has a `fate` from the start.

    Args:
        name: the name of its candidate in the table.
        engine: what draws its predictions; None if there is a `fate`.
        trained: whether it is to be trained.
        seconds: the time it took so far.
        trainings: what its training took so far, in trainings of the model as it is.
        epochs: after which it was best; 0 before any.
        stopped: whether its training has ended.
        fate: why it is not compared any more; "" while it is.
        states: those to try, the best of which counts; if it is trained, the one to start from.
    """

    name: str
    engine: Engine | None = None
    trained: bool = False
    seconds: float = 0.0
    trainings: float = 0.0
    epochs: int = 0
    stopped: bool = False
    fate: str = ""
    states: Sequence[State] = ()

    def __post_init__(self) -> None:
        if self.engine is not None:
            self.states = self.states or [self.engine.read()]
            self.state = self.best = self.states[0]
        # The lowest NLL and its outputs: on all examples, then without each fold.
        self._scores: list[tuple[float, np.ndarray]] = []

    def leave_out(self, error: Exception) -> "Trial":
        """Exclude it from the comparison, and warn with the reason."""
        self.fate = (str(error) or type(error).__name__).splitlines()[0]
        # From `try_states`, the warning points at the line that calls `calibrate`.
        warnings.warn(f"{self.name}: left out, since {self.fate}", stacklevel=5)
        return self

    def drop(self, reason: str) -> None:
        """Exclude it from the comparison, and free the memory of its states."""
        self.fate = reason
        self.state = self.best = self.states = []

    @property
    def nll(self) -> float:
        """The lowest NLL so far, in nats; infinite before the first."""
        if not self._scores:
            return math.inf
        nll, _ = self._scores[0]
        return nll

    def watch(self, data: Validation, output: Likelihood) -> float:
        """Score the present state; note whether it is the best, and the best without each fold.

        The NLL is that at a fitted temperature: noise must not be chosen for what a temperature
        can do as well.

        Args:
            data: the examples to fit, and their folds.
            output: what the network's outputs mean.

        Returns:
            The NLL on all examples, in nats.

        Raises:
            ValueError: if predictions are not finite.
        """
        raw = self.engine.draw(self.state, data.fit.x)
        nlls = [output.best_nll(raw, data.fit.y, data.fit.weight)]
        for is_kept in data.without_each_fold():
            weight = data.fit.weight_of(is_kept)
            nlls.append(output.best_nll(raw[is_kept], data.fit.y[is_kept], weight))
        if nlls[0] < self.nll:
            self.best = self.state
        scores = list(self._scores) or [(math.inf, raw)] * len(nlls)
        for place, nll in enumerate(nlls):
            least, _ = scores[place]
            if nll < least:
                scores[place] = (nll, raw)
        self._scores = scores
        return nlls[0]

    def try_states(self, data: Validation, output: Likelihood) -> None:
        """Watch all states of a trial that is not trained; a failure affects no other trial.

        Args:
            data: the examples to fit, and their folds.
            output: what the network's outputs mean.
        """
        try:
            for state in self.states:
                self.state = state
                self.watch(data, output)
        except Exception as error:
            self.leave_out(error)

    def watched(self, fold: int = -1) -> np.ndarray:
        """Return the outputs (examples, draws, width) that were watched in the best state.

        Args:
            fold: take the state that was best without this fold; -1 takes the best on all examples.
        """
        _, raw = self._scores[1 + fold]
        return raw


class Setting(NamedTuple):
    """What the trials are made of."""

    model: keras.Model
    output: Likelihood
    optimizer: keras.optimizers.Optimizer
    loss: Any
    training: Training
    data: Validation
    samples: int
    seed: int
    candidates: Mapping[str, WeightPosterior] = {}  # those of the user
    end: float = math.inf  # the `time.monotonic` after which nothing starts
    say: Callable[[str], None] = silent
    parameter: Any = None  # the fitted one of the model as it is


def deadline(minutes: float | None) -> float:
    """Return the `time.monotonic` after some minutes, or infinity for None; or raise."""
    if minutes is None:
        return math.inf
    return time.monotonic() + 60 * checks.positive("minutes", minutes)


def deterministic(setting: Setting) -> Iterator[Trial]:
    """Give the model as it is, and trained on: what others must beat to be worth their draws."""
    training = {"optimizer": copy_of_optimizer(setting.optimizer), "loss": setting.loss}
    make = functools.partial(copy_of, setting.model)
    engine = Engine(make, training=training, seed=setting.seed)
    yield Trial("as it is", engine)
    yield Trial("fine-tuned", engine, trained=True)


def mc_dropout(setting: Setting) -> Iterator[Trial]:
    """Give the model with its dropout left on, if it has any."""
    make = functools.partial(copy_of, setting.model)
    with warnings.catch_warnings(action="ignore"):  # models without dropout
        engine = Engine(make, setting.samples, dropout=True, seed=setting.seed)
    if engine.samples > 1:
        yield Trial("MC dropout", engine)


def gaussian(setting: Setting) -> Iterator[Trial]:
    """Give Gaussian posteriors of several prior scales and weights of the KL."""
    for scale in PRIOR_SCALES:
        make = functools.partial(
            to_stochastic,
            setting.model,
            NormalAffine(prior_scale=scale, initial_scale=scale, beta=1),
            train_size=setting.training.size,
            seed=setting.seed,
        )
        training = _training_of_posteriors(setting)
        # The warnings of the first conversion are enough.
        action = None if scale == PRIOR_SCALES[0] else "ignore"
        try:
            with warnings.catch_warnings(action=action):
                engine = Engine(make, setting.samples, training, seed=setting.seed)
        except ValueError as error:
            yield Trial("Gaussian").leave_out(error)
            return
        for beta in BETAS:
            for layer in stochastic_layers(engine.network):
                layer.posterior.beta.assign(beta)
            yield Trial(f"Gaussian, prior {scale}, beta {beta}", engine, trained=True)


def _training_of_posteriors(setting: Setting) -> dict[str, Any]:
    """Return the arguments of `compile`: the posteriors' parameters have five times the rate."""
    rate = float(keras.ops.convert_to_numpy(setting.optimizer.learning_rate))
    optimizer = copy_of_optimizer(setting.optimizer)
    return {
        "optimizer": two_speed(optimizer, stochastic_lr=5 * rate),
        "loss": setting.loss,
        "noise_scale": setting.output.noise_scale(setting.parameter),
    }


def given(setting: Setting) -> Iterator[Trial]:
    """Give the candidates of the user."""
    for name, posterior in setting.candidates.items():
        yield Trial(name, _posterior_engine(setting, posterior))


def _posterior_engine(setting: Setting, posterior: WeightPosterior) -> Engine:
    return Engine(lambda: posterior, setting.samples, seed=setting.seed)


def laplace(setting: Setting) -> Iterator[Trial]:
    """Give Gaussians around the trained weights, of the last layer and of all, linearized."""
    subsets = {"Laplace, last layer": "last_layer", "Laplace, all weights": "all"}
    for name, subset in subsets.items():
        trial = Trial(name)
        try:
            if time.monotonic() < setting.end:
                trial = _laplace_trial(setting, name, subset)
        except Exception as error:  # any failure costs only this candidate
            trial.leave_out(error)
        yield trial


def _laplace_trial(setting: Setting, name: str, subset: str) -> Trial:
    """Return a trial of a fitted `Laplace`, with a state for each of its prior precisions."""
    start = time.monotonic()
    structure = _hessian_structure(setting, subset)
    if setting.training.has_weights:
        raise ValueError("it takes no weights of training examples.")
    every = -(-setting.training.size // EXAMPLES)
    examples = read(setting.training.data, setting.model, setting.output, "train", every)
    with warnings.catch_warnings(action="ignore"):  # the comparison shows what they warn about
        posterior = _fitted_laplace(setting, examples, subset, structure)
        engine = _posterior_engine(setting, posterior)
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
    size = setting.model.count_params()
    width = setting.output.width
    if size > MOST_WEIGHTS or width > MOST_OUTPUTS:
        raise ValueError(
            f"it is for at most {MOST_WEIGHTS:,} weights and {MOST_OUTPUTS} outputs; "
            f"got {size:,} and {width}."
        )
    return "kron"


def _fitted_laplace(setting: Setting, examples: Examples, subset: str, structure: str) -> Laplace:
    posterior = Laplace(
        copy_of(setting.model),
        subset,
        structure,
        # The larger prior precisions are compared as states.
        prior_precision="marglik",
        # A temperature below 1 makes up for the examples that are not used.
        temperature=len(examples.y) / setting.training.size,
        **setting.output.head,
    )
    posterior.fit(examples.x, examples.y, verbose=0)
    return posterior


Method = Callable[[Setting], Iterable[Trial]]

METHODS: Sequence[Method] = (deterministic, given, mc_dropout, laplace, gaussian)
"""A new method is one more function here."""
