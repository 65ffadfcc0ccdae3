"""Trials, which are compared, and the setting that methods make them from."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from tfp_ibnn._core import checks
from tfp_ibnn._core.progress import silent
from tfp_ibnn.calibration.engine import Engine, State
from tfp_ibnn.calibration.examples import Training, Validation
from tfp_ibnn.likelihoods import Likelihood
from tfp_ibnn.weights import WeightPosterior

NO_TIME = "there was no time for it"
"""Why a candidate is dropped that was never scored."""


class OutOfTime(Exception):
    """There is not enough time left for a trial."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    return (str(error) or type(error).__name__).splitlines()[0]


@dataclasses.dataclass(eq=False)
class Trial:
    """What is compared: a state of an engine, unless it has a `fate` from the start.

    Args:
        name: the name of its candidate in the table.
        engine: draws its predictions; None if there is a `fate`.
        trained: whether it is to be trained.
        seconds: the time it has taken so far.
        trainings: the cost of its training so far, in trainings of the model: the share of the
            model's epochs for which it was fine-tuned, or the number of fresh networks, times
            `slowdown`. The model itself does not count, since it exists already.
        slowdown: how much longer a step of its training takes than one of the model's.
        epochs: the epoch after which it was best; 0 before any.
        stopped: whether its training has ended.
        effort: the least effort that tries it; "" until `run_stages` has it.
        fate: why it is not compared any more; "" while it is.
        states: the states to try, the best of which counts; if it is trained, the initial one.
        candidates: each `Candidate` that was scored: the trial with and without a temperature.
        dropped: why further ones were not, by name.
    """

    name: str
    engine: Engine | None = None
    trained: bool = False
    seconds: float = 0.0
    trainings: float = 0.0
    slowdown: float = 1.0
    epochs: int = 0
    stopped: bool = False
    effort: str = ""
    fate: str = ""
    states: Sequence[State] = ()
    candidates: list[Any] = dataclasses.field(default_factory=list)
    dropped: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.engine is not None:
            self.states = self.states or [self.engine.read()]
            self.state = self.best = self.states[0]
        # The lowest NLL and its outputs: on all examples, then without each fold.
        self._scores: list[tuple[float, np.ndarray]] = []

    def leave_out(self, error: Exception) -> "Trial":
        """Exclude it from the comparison, with the first line of an error as the reason."""
        self.fate = first_line(error)
        return self

    @property
    def nll(self) -> float:
        """The lowest NLL so far, in nats; infinite before the first."""
        if not self._scores:
            return math.inf
        nll, _ = self._scores[0]
        return nll

    def watch(self, data: Validation, output: Likelihood) -> float:
        """Score the current state; record whether it is the best, and the best without each fold.

        Args:
            data: the examples to fit, and their folds.
            output: what the network's outputs mean.

        Returns:
            The NLL on all examples at a fitted temperature, in nats.

        Raises:
            ValueError: if predictions are not finite.
        """
        raw = self.engine.draw(self.state, data.fit.x)
        nlls = data.best_nlls(raw, output)
        if nlls[0] < self.nll:
            self.best = self.state
        scores = list(self._scores) or [(math.inf, raw)] * len(nlls)
        for place, nll in enumerate(nlls):
            least, _ = scores[place]
            if nll < least:
                scores[place] = (nll, raw)
        self._scores = scores
        return nlls[0]

    def try_states(self, data: Validation, output: Likelihood, end: float = math.inf) -> None:
        """Watch all states of a trial that is not trained; a failure affects no other trial.

        Args:
            data: the examples to fit, and their folds.
            output: what the network's outputs mean.
            end: the `time.monotonic` after which no state is watched.
        """
        try:
            for state in self.states:
                if time.monotonic() > end:
                    break
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
    """What the trials are made from."""

    model: keras.Model
    output: Likelihood
    optimizer: keras.optimizers.Optimizer | None  # of the fine-tuning, if there is any
    loss: Any
    training: Training
    data: Validation
    samples: int
    seed: int
    candidates: Mapping[str, Engine] = {}  # those of the user
    end: float = math.inf  # the `time.monotonic` after which nothing starts
    say: Callable[[str], None] = silent
    parameter: Any = None  # the fitted one of the model as it is
    epochs: float = 1  # of the fine-tuning; below 1, a part of one
    model_epochs: float = 0.0  # those that the model was trained for; 0 if unknown
    effort: str = "seconds"  # the last one whose methods are tried
    most: float = math.inf  # trainings of the model that all may take that "minutes" tries
    fresh: Any = None  # the `FreshNetworks`, if any are trained

    @property
    def training_part(self) -> Training:
        """What an epoch of the fine-tuning goes through: all data, or a part of them."""
        steps = int(self.epochs * self.training.steps)
        return self.training.shortened(max(1, steps)) if self.epochs < 1 else self.training


Method = Callable[[Setting], Iterable[Trial]]
"""A function that returns the trials of a setting."""


def deadline(minutes: float | None) -> float:
    """Return the `time.monotonic` after some minutes, or infinity for None; or raise."""
    if minutes is None:
        return math.inf
    return time.monotonic() + 60 * checks.positive("minutes", minutes)


def attempt(name: str, make: Callable[[], Trial], setting: Setting) -> Trial:
    """Return what `make` returns; if it fails, a trial that is left out.

    After the time limit it is not called, and the trial has neither an engine nor a fate.

    Args:
        name: of the trial, if `make` does not return one.
        make: returns the trial; its errors affect no other trial.
        setting: has the time limit.
    """
    trial = Trial(name)
    if time.monotonic() > setting.end:
        return trial
    try:
        return make()
    except OutOfTime:
        return trial
    except Exception as error:
        return trial.leave_out(error)


def posterior_engine(setting: Setting, posterior: WeightPosterior) -> Engine:
    """Return an engine that draws from a posterior over weights.

    Args:
        setting: has the number of draws and the seed.
        posterior: the posterior; it is not copied.
    """
    return Engine(lambda: posterior, setting.samples, seed=setting.seed)
