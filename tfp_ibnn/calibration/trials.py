"""The networks, and posteriors over their weights, that are compared."""

import dataclasses
import functools
import itertools
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from tfp_ibnn._core import keras_optimizers
from tfp_ibnn._core.progress import Heartbeat, silent
from tfp_ibnn.calibration.examples import FOLDS, Training, Validation, read
from tfp_ibnn.conversion.convert import copy_of, to_stochastic
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.likelihoods import Likelihood
from tfp_ibnn.posteriors import NormalAffine
from tfp_ibnn.prediction import MonteCarlo
from tfp_ibnn.training import Interrupts, two_speed
from tfp_ibnn.training.callbacks import random_state_kept
from tfp_ibnn.weights import Laplace, WeightPosterior
from tfp_ibnn.weights.features import last_weighted_layer

PRIOR_SCALES = (0.3, 0.1)
BETAS = (1, 10, 100)
PATIENCE = 2
# Of Laplace: training examples at most; weights of a last layer whose covariance is full, at most;
# weights and outputs of a network beyond which that of all weights is too slow; and factors of the
# prior precision, since that of the marginal likelihood is too low for overfitted networks.
EXAMPLES, FULL = 10_000, 2_000
MOST_WEIGHTS, MOST_OUTPUTS = 1_000_000, 100
PRIOR_FACTORS = (1, 10, 100, 1000)

_BATCH = 256
State = list[np.ndarray]


class Engine:
    """A network or posterior that trials share, compiled once, by `training` if it is trained."""

    def __init__(
        self,
        make: Callable[[], Any],
        samples: int = 1,
        training: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._make = make
        with random_state_kept():
            random.seed(0)  # by which layers such as Dropout get their seeds
            self.network = make()
        self.options = {"samples": samples, "independent": samples == 1, **options}
        # The outputs as they are, whatever they mean.
        self._sampler = MonteCarlo(self.network, head="point", return_samples=True, **self.options)
        self.samples = self._sampler.samples
        self._variables = list(self.network.variables)
        if training is not None:
            self.network.compile(**training)
            self.network.optimizer.build(self.network.trainable_variables)
            self._variables += self.network.optimizer.variables

    def read(self) -> State:
        """Return weights, random states and the optimizer's variables."""
        return [np.array(keras.ops.convert_to_numpy(x)) for x in self._variables]

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
        fit(self.network)
        return self.read()

    def copy(self, state: State) -> Any:
        """Return a network of its own in a state; a posterior over weights is the same one."""
        with warnings.catch_warnings(action="ignore"):  # what the first one has said
            network = self._make()
        for variable, value in zip(network.variables, state, strict=False):
            variable.assign(value)
        return network

    def _load(self, state: State) -> None:
        for variable, value in zip(self._variables, state, strict=True):
            variable.assign(value)


@dataclasses.dataclass(eq=False)
class Trial:
    """What is compared: a state of an engine, unless it has a `fate` from the start."""

    name: str
    engine: Engine | None = None
    trained: bool = False
    seconds: float = 0.0
    epochs: int = 0  # after which it was best
    stopped: bool = False
    fate: str = ""  # why it is not compared any more
    states: Sequence[State] = ()  # all that are tried, the best of which counts; or the first one

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

    @property
    def nll(self) -> float:
        """The least that was watched."""
        return self._scores[0][0] if self._scores else math.inf

    def watch(self, data: Validation, output: Likelihood) -> float:
        """Return the NLL of this state; note which is best, and which without each fold.

        At a fitted temperature: noise must not be chosen for what a temperature does as well.
        """
        raw, y = self.engine.draw(self.state, data.fit.x), data.fit.y
        parts = [np.ones(len(y), bool)]
        parts += [data.folds != fold for fold in range(FOLDS)] if data.folds is not None else []
        weights = [data.fit.weight_of(part) for part in parts]
        now = [
            output.best_nll(raw[part], y[part], weight)
            for part, weight in zip(parts, weights, strict=True)
        ]
        self.best = self.state if now[0] < self.nll else self.best
        pairs = zip(now, self._scores or [(math.inf, raw)] * len(now), strict=True)
        self._scores = [(nll, raw) if nll < best[0] else best for nll, best in pairs]
        return now[0]

    def try_states(self, data: Validation, output: Likelihood) -> None:
        """Watch all states of what is not trained; a failure costs no other trial."""
        try:
            for state in self.states:
                self.state = state
                self.watch(data, output)
        except Exception as error:
            self.leave_out(error)

    def watched(self, fold: int = -1) -> np.ndarray:
        """Return the outputs that were watched in the best state, or the best without a fold."""
        return self._scores[1 + fold][1]


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
    end: float = math.inf  # after which nothing is begun, by `time.monotonic`
    say: Callable[[str], None] = silent
    parameter: Any = None  # the fitted one of the model as it is


def deterministic(setting: Setting) -> Iterator[Trial]:
    """Give the model as it is, and trained on: what others must beat to be worth their draws."""
    training = {"optimizer": _same(setting.optimizer), "loss": setting.loss}
    engine = Engine(lambda: copy_of(setting.model), training=training, seed=setting.seed)
    yield Trial("as it is", engine)
    yield Trial("fine-tuned", engine, trained=True)


def mc_dropout(setting: Setting) -> Iterator[Trial]:
    """Give the model with its dropout left on, if it has any."""
    with warnings.catch_warnings(action="ignore"):  # of models without dropout
        options = {"dropout": True, "seed": setting.seed}
        engine = Engine(lambda: copy_of(setting.model), setting.samples, **options)
    if engine.samples > 1:
        yield Trial("MC dropout", engine)


def gaussian(setting: Setting) -> Iterator[Trial]:
    """Give Gaussian posteriors of several prior scales and weights of the KL."""
    noise_scale = setting.output.noise_scale(setting.parameter)
    size = setting.training.size
    rate = 5 * float(keras.ops.convert_to_numpy(setting.optimizer.learning_rate))
    convert = functools.partial(to_stochastic, setting.model, train_size=size, seed=setting.seed)
    for scale in PRIOR_SCALES:
        posterior = NormalAffine(prior_scale=scale, initial_scale=scale, beta=1)
        optimizer = two_speed(_same(setting.optimizer), stochastic_lr=rate)
        training = {"optimizer": optimizer, "loss": setting.loss, "noise_scale": noise_scale}
        options = {"training": training, "seed": setting.seed}
        try:
            # What the first one has said is enough.
            with warnings.catch_warnings(action=None if scale == PRIOR_SCALES[0] else "ignore"):
                engine = Engine(lambda own=posterior: convert(own), setting.samples, **options)
        except ValueError as error:
            yield Trial("Gaussian").leave_out(error)
            return
        for beta in BETAS:
            for layer in stochastic_layers(engine.network):
                layer.posterior.beta.assign(beta)
            yield Trial(f"Gaussian, prior {scale}, beta {beta}", engine, trained=True)


def given(setting: Setting) -> Iterator[Trial]:
    """Give the candidates of the user."""
    for name, posterior in setting.candidates.items():
        engine = Engine(lambda own=posterior: own, setting.samples, seed=setting.seed)
        yield Trial(name, engine)


def laplace(setting: Setting) -> Iterator[Trial]:
    """Give Gaussians around the trained weights, of the last layer and of all, linearised."""
    for subset, name in {"last_layer": "last layer", "all": "all weights"}.items():
        trial = Trial(f"Laplace, {name}")
        try:
            if time.monotonic() < setting.end:
                trial = _laplace(setting, trial.name, subset)
        except Exception as error:  # whatever it is, it costs this candidate only
            trial.leave_out(error)
        yield trial


def _laplace(setting: Setting, name: str, subset: str) -> Trial:
    model, output, start = setting.model, setting.output, time.monotonic()
    size, structure = model.count_params(), "kron"
    if subset == "last_layer":
        structure = "full" if last_weighted_layer(model).count_params() <= FULL else "kron"
    elif size > MOST_WEIGHTS or output.width > MOST_OUTPUTS:
        limits = f"{MOST_WEIGHTS:,} weights and {MOST_OUTPUTS} outputs"
        raise ValueError(f"it is for at most {limits}; got {size:,} and {output.width}.")
    if setting.training.has_weights:
        raise ValueError("it takes no weights of training examples.")
    every = -(-setting.training.size // EXAMPLES)
    examples = read(setting.training.data, model, output, "train", every)
    # A temperature below 1 makes up for the examples that are not used.
    options = {"temperature": len(examples.y) / setting.training.size, **output.head}
    options |= {"prior_precision": "marglik"}  # the larger ones are compared below
    with warnings.catch_warnings(action="ignore"):  # of what the comparison shows
        posterior = Laplace(copy_of(model), subset, structure, **options)
        posterior.fit(examples.x, examples.y, verbose=0)
        engine = Engine(lambda: posterior, setting.samples, seed=setting.seed)
    state, prior = engine.read(), posterior.prior_precision
    place = [variable is prior for variable in posterior.variables].index(True)
    states = [[*state[:place], x * state[place], *state[place + 1 :]] for x in PRIOR_FACTORS]
    return Trial(name, engine, seconds=time.monotonic() - start, states=states)


METHODS = (deterministic, given, mc_dropout, laplace, gaussian)
"""A new method is one more function here."""


def fine_tuning_optimizer(model: keras.Model, given: Any) -> keras.optimizers.Optimizer:
    """Return the optimizer given, or a copy of the model's own at a tenth of its rate.

    A schedule gives a tenth of its present value, and at least a thousandth of its largest so far,
    since many end at 0.
    """
    own = model.optimizer if model.compiled else None
    if given is not None or own is None:
        return keras.optimizers.get(given or keras.optimizers.Adam(1e-4))
    own = getattr(own, "inner_optimizer", own)  # of one that scales losses
    if keras_optimizers.has_many_parts(own):
        remedy = "give one, such as optimizer=keras.optimizers.Adam(1e-4)"
        raise ValueError(f"`model` has several optimizers: {remedy}.")
    config = own.get_config()
    rate = float(keras.ops.convert_to_numpy(own.learning_rate))
    if isinstance(config["learning_rate"], dict):
        schedule = keras.optimizers.schedules.deserialize(config["learning_rate"])
        steps = np.linspace(0, int(keras.ops.convert_to_numpy(own.iterations)), 101)
        largest = max(float(keras.ops.convert_to_numpy(schedule(step))) for step in steps)
        rate = max(rate, largest / 100)
    return type(own).from_config({**config, "learning_rate": rate / 10})


def fine_tune(trials: Sequence[Trial], setting: Setting, epochs: int | None) -> None:
    """Train trials epoch by epoch; of those that draw, drop the worse half after each."""
    running, round_time = list(trials), 0.0
    of = "" if epochs is None else f" of {epochs}"
    with Interrupts() as interrupts:
        for epoch in itertools.islice(itertools.count(1), epochs):
            start = time.monotonic()
            if not running:
                break
            if start + round_time > setting.end:
                _end_by_time(running, setting, f"epoch {epoch}{of} is not begun")
                break
            for number, trial in enumerate(running):
                if time.monotonic() > setting.end:
                    _end_by_time(running[number:], setting, f"epoch {epoch}{of} is not finished")
                    return
                with Heartbeat(f"epoch {epoch}{of}: {trial.name}", setting.say):
                    _one_epoch(trial, setting, epoch, interrupts)
            round_time = time.monotonic() - start
            rivals = [x for x in trials if x.engine.samples > 1 and not x.fate]
            for trial in sorted(rivals, key=lambda x: x.nll)[max(2, -(-len(rivals) // 2)) :]:
                trial.fate = f"NLL {trial.nll:.4f} after epoch {epoch}"
                trial.state = trial.best = trial.states = []  # which take memory
                setting.say(f"epoch {epoch}: {trial.name} is dropped")
            running = [x for x in running if not x.fate and not x.stopped]


def _end_by_time(left: Sequence[Trial], setting: Setting, what: str) -> None:
    """Say that `minutes` ended the training, and of which trials."""
    names = ", ".join(trial.name for trial in left)
    setting.say(f"`minutes` ended the training: {what} for {names}.")


def _one_epoch(trial: Trial, setting: Setting, epoch: int, interrupts: Interrupts) -> None:
    start, before, training = time.monotonic(), trial.nll, setting.training
    trial.state = trial.engine.train(trial.state, lambda x: training.epoch(x, epoch, interrupts))
    try:
        nll = trial.watch(setting.data, setting.output)
    except ValueError as error:  # of predictions that are not finite
        trial.stopped, trial.fate = True, "" if trial.epochs else str(error)
        setting.say(f"epoch {epoch}: {trial.name} is stopped: {error}")
        return
    trial.epochs = epoch if nll < before else trial.epochs
    trial.stopped = epoch - trial.epochs >= PATIENCE
    trial.seconds += time.monotonic() - start
    setting.say(f"epoch {epoch}: {trial.name}: NLL {nll:.4f}, {trial.seconds:.0f} s")


def _same(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    return type(optimizer).from_config(optimizer.get_config())
