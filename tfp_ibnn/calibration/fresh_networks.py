"""Networks trained like the model, from new weights."""

import random
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tfp_ibnn._core import keras_internals
from tfp_ibnn.calibration.engine import copy_of_optimizer
from tfp_ibnn.calibration.fine_tuning import Limits
from tfp_ibnn.calibration.network import with_graph
from tfp_ibnn.calibration.trials import OutOfTime, Setting
from tfp_ibnn.conversion.copying import copy_of
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.training.callbacks import random_state_kept
from tfp_ibnn.weights import SWAG, WeightPosterior

SNAPSHOTS = 20
"""The largest number of weight sets that SWAG takes, in the last quarter of a training.

If a quarter has fewer steps, they are the last 20 steps."""

Build = Callable[[], keras.Model]
"""A function that returns a compiled, untrained network."""


def check_build(build: Any, model_epochs: float) -> None:
    """Raise if it is unknown how to train fresh networks, or for how long.

    Args:
        build: the user's function, or None.
        model_epochs: those that the model was trained for; 0 if unknown.
    """
    if build is not None and not callable(build):
        raise ValueError(
            "`build` must be a function that returns a compiled, untrained Keras model; "
            f"got {build!r}."
        )
    if not model_epochs:
        raise ValueError(
            "effort='trainings' trains fresh networks for as many steps as `model`, whose "
            "optimizer has taken none: load the model together with its optimizer, or write "
            "model.optimizer.iterations.assign(steps) after `compile`."
        )


class FreshNetworks:
    """Networks with new weights, trained for as many epochs as the model; each is trained once.

    Args:
        setting: the model, its data, for how many epochs it was trained, and the end of the time.
        build: returns a compiled, untrained network; None draws new weights for the layers that the
            model has trained, and takes its optimizer from step 0.
        seconds: the estimated time of a training; later the time of the last one.
    """

    def __init__(self, setting: Setting, build: Build | None, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self._setting = setting
        self._build = build
        self._epochs = max(1, round(setting.model_epochs))
        self._begun = 0
        self._trained: list[keras.Model] = []
        self._seconds_of_each: list[float] = []
        self._swag: SWAG  # of the first one

    def first(self, number: int) -> list[keras.Model]:
        """Return the first networks; those that do not exist yet are trained.

        Args:
            number: how many.

        Raises:
            ArithmeticError: if a training diverged; the next call starts another.
            OutOfTime: if there is not enough time for all of them.
        """
        while len(self._trained) < number:
            network = self.untrained()
            callbacks = []
            if not self._trained:
                self._swag = self._new_swag(network)
                callbacks = [self._swag]
            self.train(network, *callbacks)
            # Without the optimizer's variables.
            self._trained.append(copy_of(with_graph(network)))
            self._seconds_of_each.append(self.seconds)
        return self._trained[:number]

    def seconds_of(self, number: int) -> float:
        """Return the total time of the trainings of the first networks."""
        return sum(self._seconds_of_each[:number])

    def swag(self) -> WeightPosterior:
        """Return SWAG's Gaussian along the end of the first network's training."""
        (network,) = self.first(1)
        return self._swag.posterior(network)

    def _new_swag(self, network: keras.Model) -> SWAG:
        """Return the callback that takes a compiled network's last weights, step by step."""
        innermost = getattr(network.optimizer, "inner_optimizer", network.optimizer)
        batches = self._epochs * self._setting.training.steps
        steps = batches // (innermost.gradient_accumulation_steps or 1)
        every = max(1, steps // 4 // SNAPSHOTS)
        start = max(0, steps - SNAPSHOTS * every)
        return SWAG(every, start, unit="step", rank=SNAPSHOTS)

    def untrained(self) -> keras.Model:
        """Return a compiled network with new weights."""
        self._begun += 1
        with random_state_kept():
            random.seed(self._setting.seed + self._begun)
            if self._build is None:
                model = self._setting.model
                network = _with_new_weights(model)
                network.compile(copy_of_optimizer(model.optimizer), self._setting.loss)
                return network
            network = self._build()
        if not isinstance(network, keras.Model) or not network.compiled:
            raise ValueError(f"`build()` must return a compiled Keras model; got {network!r}.")
        steps = int(keras.ops.convert_to_numpy(network.optimizer.iterations))
        if steps:
            raise ValueError(
                "`build()` must return a new network with a new optimizer; this one's has taken "
                f"{steps} steps."
            )
        return network

    def train(self, network: keras.Model, *callbacks: keras.callbacks.Callback) -> None:
        """Train a network for as many steps as the model.

        Args:
            network: a compiled one.
            *callbacks: Keras callbacks.

        Raises:
            ArithmeticError: if its weights become NaN or infinite.
            OutOfTime: if there is not enough time.
        """
        start = time.monotonic()
        end = self._setting.end
        if start + self.seconds > end:
            raise OutOfTime
        # Each network sees the examples in its own order.
        training = self._setting.training._replace(seed=self._setting.seed + self._begun)
        unaveraged = _Unaveraged()
        with Limits(end) as limits:
            for epoch in range(1, self._epochs + 1):
                unaveraged.restore()
                training.epoch(network, epoch, limits, unaveraged, *callbacks)
                if limits.is_late:
                    raise OutOfTime
        if not all(np.isfinite(value).all() for value in network.get_weights()):
            raise ArithmeticError("its training diverged: its weights are not finite.")
        self.seconds = time.monotonic() - start


class _Unaveraged(keras.callbacks.Callback):
    """Keeps the weights at the end of an epoch, for the next one.

    With `use_ema`, every `fit` ends by replacing the weights with their averages, which is right
    only at the end of a training.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: list[np.ndarray] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        innermost = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        if getattr(innermost, "use_ema", False):
            variables = self.model.trainable_variables
            self._values = [np.array(keras.ops.convert_to_numpy(x)) for x in variables]

    def restore(self) -> None:
        """Give the network the weights that were kept, if any."""
        if self._values:
            for variable, value in zip(self.model.trainable_variables, self._values, strict=True):
                variable.assign(value)


def _with_new_weights(model: keras.Model) -> keras.Model:
    """Return a copy with new weights in the layers that were trained.

    Frozen layers and adapted preprocessing layers keep theirs.
    """
    network = copy_of(model)
    graph = functional_graph(model)
    # This alias is not compiled, so its clone is not compiled either.
    alias = keras.Model(graph.inputs, graph.outputs)
    clone = keras.models.clone_model(alias, clone_function=_new_layer)
    renewed = _ids_of_trained_layers(network)
    for variable, new in zip(network.weights, copy_of(clone).weights, strict=True):
        if id(variable) in renewed:
            variable.assign(new)
    return network


def _new_layer(layer: Any) -> Any:
    """Return a layer or operation like another one, with weights that no seed of the user fixes."""
    config = _without_seeds(layer.get_config())
    return type(layer).from_config(config)


def _without_seeds(config: Any) -> Any:
    """Return a config, or a part of one, in which initializers have no seed."""
    if type(config) is list:
        return [_without_seeds(value) for value in config]
    if type(config) is not dict:
        return config
    changed = {key: _without_seeds(value) for key, value in config.items()}
    options = changed.get("config")
    if changed.get("module") == "keras.initializers" and "seed" in (options or {}):
        changed["config"] = {**options, "seed": None}
    return changed


def _ids_of_trained_layers(network: keras.Model) -> set[int]:
    """Return the ids of the weights of layers that train some of them, including statistics."""
    ids: set[int] = set()
    for layer in keras_internals.nested_layers(network):
        inner = keras_internals.nested_layers(layer, include_self=False)
        of_inner = {id(variable) for part in inner for variable in part.weights}
        own = {id(variable) for variable in layer.weights} - of_inner
        if own.intersection(id(variable) for variable in layer.trainable_variables):
            ids |= own
    return ids
