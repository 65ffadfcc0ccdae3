"""The training of an ensemble's members, one after the other or side by side."""

import inspect
import time
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tfp_ibnn._core.progress import Heartbeat, printer
from tfp_ibnn._core.serialization import storable
from tfp_ibnn.training import Interrupts
from tfp_ibnn.weights.architecture import difference
from tfp_ibnn.weights.side_by_side import SideBySide


class Members:
    """The members of an ensemble that are finished.

    Args:
        build: a function that returns a compiled model; it may take the member's seed.
        seeds: one for each member.
        is_shown: whether to print a line for each.
        is_slow_shown: whether to print a line every ten seconds while one trains.
    """

    def __init__(
        self,
        build: Callable[..., keras.Model],
        seeds: list[int],
        is_shown: bool,
        is_slow_shown: bool,
    ) -> None:
        self.first: keras.Model | None = None
        self.sets: list[list[np.ndarray]] = []
        self._build = build
        self._seeds = seeds
        self._is_shown = is_shown
        self._is_slow_shown = is_slow_shown

    def train_in_turn(self, x: Any, y: Any, options: dict[str, Any], callbacks: Any) -> None:
        """Train one member after the other.

        Args:
            x: training inputs, or a dataset.
            y: training targets.
            options: other arguments of `fit`.
            callbacks: for `fit`; or a function that returns new ones, which may take the seed.
        """
        for seed in self._seeds:
            start = time.monotonic()
            model = self._built(seed)
            if model.built:  # else when it is trained
                self._check_alike(model, seed)
            own_callbacks = _called(callbacks, seed) if callable(callbacks) else callbacks
            name = f"Member {self._seeds.index(seed) + 1} of {len(self._seeds)}"
            with Heartbeat(name, printer(self._is_slow_shown)):
                loss = _fit(model, x, y, options, own_callbacks or ())
            self._add(model, seed, loss, start)

    def train_side_by_side(self, x: Any, y: Any, options: dict[str, Any]) -> None:
        """Train all members at once.

        Args:
            x: training inputs, or a dataset.
            y: training targets.
            options: other arguments of `fit`.
        """
        start = time.monotonic()
        models = [self._built(seed) for seed in self._seeds]
        training = SideBySide(models)
        callbacks = [training.callback()]
        _fit(models[0], x, y, options, callbacks)
        losses = training.finish()
        trained = zip(models, self._seeds, losses, strict=True)
        for model, seed, loss in trained:
            self._add(model, seed, loss, start)

    def _built(self, seed: int) -> keras.Model:
        keras.utils.set_random_seed(seed)
        model = _called(self._build, seed)
        if not isinstance(model, keras.Model) or not model.compiled:
            raise ValueError(f"`build({seed})` must return a compiled Keras model; got {model!r}.")
        return model

    def _check_alike(self, model: keras.Model, seed: int) -> None:
        """Raise if a model differs from the first finished one in more than values of weights."""
        if self.first is None:
            return
        where = difference(self.first, model)
        if where:
            raise ValueError(
                f"`build({seed})` must return a model that differs from the first one only in the "
                f"values of its weights; it differs in {where}. Train such models by `fit`, and "
                "use ibnn.WeightMixture(models)."
            )

    def _add(self, model: keras.Model, seed: int, loss: float, start: float) -> None:
        """Keep the weights of a member, unless it has diverged."""
        values = [storable(w) for w in model.weights]
        if not np.isfinite(loss) or not all(np.isfinite(v).all() for v in values):
            warnings.warn(
                f"The member of seed {seed} diverged (its loss is {loss:g}): it is left out.",
                stacklevel=4,
            )
            return
        self._check_alike(model, seed)
        if self.first is None:
            self.first = model
        self.sets.append(values)
        if self._is_shown:
            number = self._seeds.index(seed) + 1
            seconds = time.monotonic() - start
            print(
                f"Member {number} of {len(self._seeds)} (seed {seed}): {seconds:.0f} s, "
                f"loss {loss:.4g}."
            )


def _called(function: Callable[..., Any], seed: int) -> Any:
    """Return what a user's function makes, which need not take the seed."""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
            return function(seed)
    return function()


def _fit(model: keras.Model, x: Any, y: Any, options: dict[str, Any], callbacks: Any) -> float:
    """Train a model, and return its last loss; Ctrl-C raises."""
    with Interrupts() as interrupts:
        log = model.fit(x, y, callbacks=[*callbacks, interrupts], **options)
    return log.history.get("loss", [0.0])[-1]
