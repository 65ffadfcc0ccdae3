"""The networks that are compared, and how they are trained."""

import contextlib
import dataclasses
import functools
import itertools
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from tfp_ibnn.calibration.examples import FOLDS, Examples, Training
from tfp_ibnn.calibration.outputs import Output
from tfp_ibnn.conversion import to_stochastic
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.posteriors import NormalAffine
from tfp_ibnn.prediction import MonteCarlo
from tfp_ibnn.training import Interrupts, two_speed

PATIENCE = 2
WATCHED = 2048
"""So many examples of A watch over the training."""

PRIOR_SCALES = (0.3, 0.1)
BETAS = (1, 10, 100)

_BATCH = 256

State = list[np.ndarray]


class Engine:
    """A network, made by `make`, that trials use in turn: it is compiled once."""

    def __init__(
        self,
        make: Callable[[], keras.Model],
        samples: int = 1,
        dropout: bool = False,
        optimizer: keras.optimizers.Optimizer | None = None,
        loss: Any = None,
        seed: int = 0,
    ) -> None:
        self._make, self.network = make, make()
        self.options = {"samples": samples, "dropout": dropout, "seed": seed}
        self.options["independent"] = samples == 1
        # The outputs as they are, whatever they mean.
        self._sampler = MonteCarlo(self.network, head="point", return_samples=True, **self.options)
        self.samples = self._sampler.samples
        self._variables = list(self.network.variables)
        if optimizer is not None:
            self.network.compile(optimizer, loss)
            self.network.optimizer.build(self.network.trainable_variables)
            self._variables += self.network.optimizer.variables
        self._held: State | None = None
        self._warm = False

    def warm_up(self, state: State, training: Training) -> None:
        """Compile what trains and draws, which would else count as the first trial's time."""
        if not self._warm:
            self._warm, batch = True, []
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of an epoch that is one batch
                self.train(state, lambda network: batch.append(training.first_batch(network)))
            if batch[0] is not None:
                self.draw(state, batch[0])

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

    def copy(self, state: State) -> keras.Model:
        """Return a network of its own in a state."""
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
    """A network to compare: a state of an engine."""

    name: str
    engine: Engine
    trained: bool = False
    seconds: float = 0.0
    epochs: int = 0
    """After which it was best."""
    stopped: bool = False
    fate: str = ""
    """Why it is not compared any more."""

    def __post_init__(self) -> None:
        self.state = self.best = self.engine.read()
        self._scores: list[tuple[float, np.ndarray | None]] = []

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
        kept = None if folds is None else raw
        self._scores = [
            (nll, kept) if nll < best[0] else best
            for nll, best in zip(now, self._scores or [(math.inf, None)] * len(now), strict=True)
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
    train_size: int
    samples: int
    seed: int
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
                    setting.model, posterior, setting.train_size, seed=setting.seed
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
            warnings.warn(f"Gaussian posteriors are left out: {error}", stacklevel=4)
            return
        for beta in BETAS:
            for layer in stochastic_layers(engine.network):
                layer.posterior.beta.assign(beta * unit)
            yield Trial(f"Gaussian, prior {scale}, beta {beta}", engine, trained=True)


METHODS = (deterministic, mc_dropout, gaussian)
"""A new method is one more function here."""


def fine_tuning_optimizer(model: keras.Model, given: Any) -> keras.optimizers.Optimizer:
    """Return the optimizer given, or a copy of the model's own at a tenth of its rate.

    A schedule gives a tenth of its present value, and at least a thousandth of its largest so far,
    since many end at 0.
    """
    if given is not None:
        return keras.optimizers.get(given)
    own = getattr(model, "optimizer", None) if model.compiled else None
    if own is None:
        return keras.optimizers.Adam(1e-4)
    own = getattr(own, "inner_optimizer", own)  # of one that scales losses
    if isinstance(own, keras.optimizers.MultiOptimizer):
        raise ValueError(
            "`model` has several optimizers: give one, such as "
            "optimizer=keras.optimizers.Adam(1e-4)."
        )
    config = own.get_config()
    rate = float(keras.ops.convert_to_numpy(own.learning_rate))
    if isinstance(config["learning_rate"], dict):
        schedule = keras.optimizers.schedules.deserialize(config["learning_rate"])
        steps = np.linspace(0, int(keras.ops.convert_to_numpy(own.iterations)), 101)
        largest = max(float(keras.ops.convert_to_numpy(schedule(step))) for step in steps)
        rate = max(rate, largest / 100)
    return type(own).from_config({**config, "learning_rate": rate / 10})


def fine_tune(
    trials: Sequence[Trial],
    training: Training,
    watch: Callable[[Trial], float],
    epochs: int | None,
    minutes: float | None,
    say: Callable[[str], None],
) -> None:
    """Train all trials epoch by epoch; those that draw and are dropped get a `fate`.

    `watch` scores a trial, `say` prints a line. Without `epochs` and `minutes` the training ends
    when nothing gets better.
    """
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    running, round_time = list(trials), 0.0
    with Interrupts() as interrupts:
        for epoch in itertools.count(1):
            start = time.monotonic()
            if not running or (epochs is not None and epoch > epochs) or start + round_time > end:
                break
            for trial in running:
                if time.monotonic() > end:
                    return
                try:
                    _one_epoch(trial, training, epoch, watch, interrupts, say)
                except Exception:
                    if interrupts.came:  # and TensorFlow has raised something of its own
                        raise KeyboardInterrupt from None
                    raise
            round_time = time.monotonic() - start
            _drop_worse_half([x for x in trials if x.engine.samples > 1 and not x.fate], epoch, say)
            running = [x for x in running if not x.fate and not x.stopped]


def _one_epoch(
    trial: Trial,
    training: Training,
    epoch: int,
    watch: Callable[[Trial], float],
    interrupts: Interrupts,
    say: Callable[[str], None],
) -> None:
    trial.engine.warm_up(trial.state, training)
    start, before = time.monotonic(), trial.nll
    trial.state = trial.engine.train(trial.state, lambda x: training.epoch(x, epoch, interrupts))
    try:
        nll = watch(trial)
    except ValueError as error:  # of predictions that are not finite
        trial.stopped, trial.fate = True, "" if trial.epochs else str(error)
        say(f"epoch {epoch}: {trial.name} is stopped: {error}")
        return
    trial.epochs = epoch if nll < before else trial.epochs
    trial.stopped = epoch - trial.epochs >= PATIENCE
    trial.seconds += time.monotonic() - start
    say(f"epoch {epoch}: {trial.name}: NLL {nll:.4f}, {trial.seconds:.0f} s")


def _drop_worse_half(trials: list[Trial], epoch: int, say: Callable[[str], None]) -> None:
    keep = max(2, -(-len(trials) // 2))
    for trial in sorted(trials, key=lambda x: x.nll)[keep:]:
        trial.fate = f"NLL {trial.nll:.4f} after epoch {epoch}"
        trial.state = trial.best = []  # which take memory
        say(f"epoch {epoch}: {trial.name} is dropped")


def _copy(model: keras.Model) -> keras.Model:
    """Return a Functional model of new layers with the same weights; not compiled."""
    sequential = isinstance(model, keras.Sequential)
    try:
        ends = (model.inputs[0], model.outputs[0]) if sequential else (model.input, model.output)
        # An alias of the same layers, since Keras would compile the clone of a compiled model.
        alias = keras.Model(*ends, name=model.name)
    except (AttributeError, TypeError, ValueError):
        alias = None
    if alias is None or type(model).call not in (keras.Sequential.call, type(alias).call):
        raise ValueError(
            f"`model` must be a built Functional or Sequential model; {model.name!r} is not built, "
            f"or a {type(model).__name__} with a `call` of its own."
        )
    inputs = [layer for layer in alias.layers if isinstance(layer, keras.layers.InputLayer)]
    names = {id(layer.output): layer.name for layer in inputs}
    fresh = keras.tree.map_structure(
        lambda x: keras.Input(batch_shape=x.shape, dtype=x.dtype, name=names[id(x)]), alias.input
    )
    with _seeded(0):
        copy = keras.models.clone_model(alias, input_tensors=fresh)
    copy.set_weights(alias.get_weights())
    return copy


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
