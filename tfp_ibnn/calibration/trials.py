"""The networks, and posteriors over their weights, that are compared."""

import contextlib
import dataclasses
import functools
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from tfp_ibnn.calibration.examples import FOLDS, Examples, Training
from tfp_ibnn.calibration.outputs import Output
from tfp_ibnn.conversion.convert import copy_of, to_stochastic
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.posteriors import NormalAffine
from tfp_ibnn.prediction import MonteCarlo
from tfp_ibnn.training import two_speed
from tfp_ibnn.weights import Laplace, WeightPosterior
from tfp_ibnn.weights.features import last_weighted_layer

PRIOR_SCALES = (0.3, 0.1)
BETAS = (1, 10, 100)

EXAMPLES = 10_000
"""So many training examples, at most, are used for posteriors after training."""
FULL = 2_000
"""Weights of a last layer, at most, whose covariance is full and not a Kronecker product."""
MOST_WEIGHTS, MOST_OUTPUTS = 1_000_000, 100
"""Of a network, beyond which Laplace of all weights is too slow."""
PRIOR_FACTORS = (1, 10, 100, 1000)
"""Of Laplace's prior precision: the marginal likelihood's is too low for overfitted networks."""

NO_TIME = "there was no time for it"

_BATCH = 256

State = list[np.ndarray]


class Engine:
    """What `make` returns, a network or a posterior over weights, for trials to use in turn.

    It is compiled once. The options are those of `MonteCarlo`.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        samples: int = 1,
        optimizer: keras.optimizers.Optimizer | None = None,
        loss: Any = None,
        **options: Any,
    ) -> None:
        self._make, self.network = make, make()
        self.options = {"samples": samples, "independent": samples == 1, **options}
        # The outputs as they are, whatever they mean.
        self._sampler = MonteCarlo(self.network, head="point", return_samples=True, **self.options)
        self.samples = self._sampler.samples
        self._variables = list(self.network.variables)
        if optimizer is not None:
            self.network.compile(optimizer, loss)
            self.network.optimizer.build(self.network.trainable_variables)
            self._variables += self.network.optimizer.variables
        self._held: State | None = None

    def read(self) -> State:
        """Return weights, random states and the optimizer's variables."""
        self._held = [np.array(keras.ops.convert_to_numpy(x)) for x in self._variables]
        return self._held

    def draw(self, state: State, x: Any) -> np.ndarray:
        """Return the network's outputs (examples, draws, width) in a state."""
        self._load(state)
        count = len(keras.tree.flatten(x)[0])
        if count % _BATCH:  # JAX would compile the prediction again for each size of a last batch
            index = np.resize(np.arange(count), -(-count // _BATCH) * _BATCH)
            x = keras.tree.map_structure(lambda part: part[index], x)
        return self._sampler.predict(x, batch_size=_BATCH, verbose=0)["samples"][:count]

    def train(self, state: State, fit: Callable[[keras.Model], None]) -> State:
        """Return the state after some training."""
        self._load(state)
        self._held = None
        fit(self.network)
        return self.read()

    def copy(self, state: State) -> Any:
        """Return a network of its own in a state; a posterior over weights is the same one."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what was said when the first one was made
            network = self._make()
        for variable, value in zip(network.variables, state, strict=False):
            variable.assign(value)
        return network

    def _load(self, state: State) -> None:
        if self._held is not state:
            for variable, value in zip(self._variables, state, strict=True):
                variable.assign(value)
            self._held = state


@dataclasses.dataclass(eq=False)
class Trial:
    """What is compared: a state of an engine, unless it has a `fate` from the start."""

    name: str
    engine: Engine | None = None
    trained: bool = False
    seconds: float = 0.0
    epochs: int = 0
    """After which it was best."""
    stopped: bool = False
    fate: str = ""
    """Why it is not compared any more."""
    states: Sequence[State] = ()
    """Those that are tried, the best of which counts; of a training, the first one."""

    def __post_init__(self) -> None:
        if self.engine is not None:
            self.states = self.states or [self.engine.read()]
            self.state = self.best = self.states[0]
        self._scores: list[tuple[float, np.ndarray]] = []

    def leave_out(self, error: Exception) -> "Trial":
        """Do not compare it, and say why."""
        self.fate = (str(error) or type(error).__name__).splitlines()[0]
        warnings.warn(f"{self.name}: left out, since {self.fate}", stacklevel=4)
        return self

    def draw(self, x: Any) -> np.ndarray:
        """Return the outputs (examples, draws, width) at the best epoch."""
        return self.engine.draw(self.best, x)

    @property
    def nll(self) -> float:
        """The least that was watched."""
        return self._scores[0][0] if self._scores else math.inf

    def watch(self, examples: Examples, folds: np.ndarray | None, output: Output) -> float:
        """Return the NLL of this epoch; note which is best, and which without each fold.

        At a fitted temperature: noise must not be chosen for what a temperature does as well.
        """
        raw = self.engine.draw(self.state, examples.x)
        parts = [np.ones(len(examples.y), bool)]
        parts += [folds != fold for fold in range(FOLDS)] if folds is not None else []
        now = [output.best_nll(raw[part], examples.y[part]) for part in parts]
        self.best = self.state if now[0] < self.nll else self.best
        self._scores = [
            (nll, raw) if nll < best[0] else best
            for nll, best in zip(now, self._scores or [(math.inf, raw)] * len(now), strict=True)
        ]
        return now[0]

    def watched(self, fold: int | None = None) -> np.ndarray:
        """Return the outputs that were watched at the best epoch, or the best without a fold."""
        return self._scores[0 if fold is None else 1 + fold][1]


class Setting(NamedTuple):
    """What the trials are made of."""

    model: keras.Model
    output: Output
    optimizer: keras.optimizers.Optimizer
    loss: Any
    training: Training
    samples: int
    seed: int
    end: float = math.inf
    """After which nothing is begun, by `time.monotonic`."""
    candidates: Mapping[str, WeightPosterior] = {}
    """Those of the user."""
    parameter: Any = None
    """The fitted one of the model as it is."""


def deterministic(setting: Setting) -> Iterator[Trial]:
    """Give the model as it is, and trained on: what others must beat to be worth their draws."""
    make, optimizer = functools.partial(_copy, setting.model), _same(setting.optimizer)
    engine = Engine(make, optimizer=optimizer, loss=setting.loss, seed=setting.seed)
    yield Trial("as it is", engine)
    yield Trial("fine-tuned", engine, trained=True)


def mc_dropout(setting: Setting) -> Iterator[Trial]:
    """Give the model with its dropout left on, if it has any."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of models without dropout
        make = functools.partial(_copy, setting.model)
        engine = Engine(make, setting.samples, dropout=True, seed=setting.seed)
    if engine.samples > 1:
        yield Trial("MC dropout", engine)


def gaussian(setting: Setting) -> Iterator[Trial]:
    """Give Gaussian posteriors of several prior scales and weights of the KL."""
    unit = setting.output.loss_scale(setting.parameter)
    for scale in PRIOR_SCALES:
        posterior = NormalAffine(prior_scale=scale, initial_scale=scale, beta=unit)

        def make(posterior: Any = posterior) -> keras.Model:
            with _seeded(setting.seed):
                return to_stochastic(
                    setting.model, posterior, setting.training.size, seed=setting.seed
                )

        optimizer = _same(setting.optimizer)
        rate = 5 * float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        optimizer = two_speed(optimizer, stochastic_lr=rate)
        options = {"optimizer": optimizer, "loss": setting.loss, "seed": setting.seed}
        try:
            with warnings.catch_warnings():
                if scale != PRIOR_SCALES[0]:
                    warnings.simplefilter("ignore")  # the same has been said already
                engine = Engine(make, setting.samples, **options)
        except ValueError as error:
            yield Trial("Gaussian").leave_out(error)
            return
        for beta in BETAS:
            for layer in stochastic_layers(engine.network):
                layer.posterior.beta.assign(beta * unit)
            yield Trial(f"Gaussian, prior {scale}, beta {beta}", engine, trained=True)


def given(setting: Setting) -> Iterator[Trial]:
    """Give the candidates of the user."""
    for name, posterior in setting.candidates.items():
        try:
            engine = Engine(lambda own=posterior: own, setting.samples, seed=setting.seed)
        except ValueError as error:
            raise ValueError(f"`candidates[{name!r}]` cannot be used: {error}") from error
        yield Trial(name, engine)


def laplace(setting: Setting) -> Iterator[Trial]:
    """Give Gaussians around the trained weights, of the last layer and of all, linearised."""
    for name, subset in ("Laplace, last layer", "last_layer"), ("Laplace, all weights", "all"):
        start = time.monotonic()
        if start > setting.end:
            yield Trial(name, fate=NO_TIME)
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what the comparison shows
                posterior = _laplace(setting, subset)
                engine = Engine(lambda own=posterior: own, setting.samples, seed=setting.seed)
        except Exception as error:  # whatever it is, it costs this candidate only
            yield Trial(name).leave_out(error)
            continue
        state = engine.read()
        place = [x is posterior.prior_precision for x in posterior.variables].index(True)
        states = [[*state[:place], x * state[place], *state[place + 1 :]] for x in PRIOR_FACTORS]
        yield Trial(name, engine, seconds=time.monotonic() - start, states=states)


def _laplace(setting: Setting, subset: str) -> Laplace:
    model, output, training = setting.model, setting.output, setting.training
    size, structure = model.count_params(), "kron"
    if subset == "last_layer":
        structure = "full" if last_weighted_layer(model).count_params() <= FULL else "kron"
    elif size > MOST_WEIGHTS or output.width > MOST_OUTPUTS:
        limits = f"{MOST_WEIGHTS:,} weights and {MOST_OUTPUTS} outputs"
        raise ValueError(f"it is for at most {limits}; got {size:,} and {output.width}.")
    if training.has_weights:
        raise ValueError("it takes no weights of training examples.")
    x, y = training.thinned(model, output, EXAMPLES)
    # A temperature below 1 makes up for the examples that are not used.
    options = {"temperature": len(y) / training.size, **output.head}
    return Laplace(_copy(model), subset, structure, **options).fit(x, y, verbose=0)


METHODS = (deterministic, given, mc_dropout, laplace, gaussian)
"""A new method is one more function here."""


def _copy(model: keras.Model) -> keras.Model:
    with _seeded(0):
        return copy_of(model)


def _same(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    return type(optimizer).from_config(optimizer.get_config())


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Give layers such as Dropout, which ask Python for a seed, always the same ones."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
