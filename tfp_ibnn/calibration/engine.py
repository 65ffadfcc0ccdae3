"""A network, or a posterior over weights, that draws predictions in any of its states."""

import random
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from tfp_ibnn.calibration.rows import Rows
from tfp_ibnn.prediction import MonteCarlo
from tfp_ibnn.training.callbacks import random_state_kept

State = list[np.ndarray]
"""The values of an engine's variables."""

_BATCH = 256


class Engine:
    """A network or a posterior over weights, compiled once and shared by several trials.

    Args:
        make: returns the network or posterior; called once here, and once per `copy`.
        samples: draws of a prediction; 1 for a network without randomness.
        training: arguments of the network's `compile`, if it is trained; None if it is not.
        **options: further arguments of `MonteCarlo`, such as `seed`.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        samples: int = 1,
        training: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._make = make
        with random_state_kept():
            random.seed(0)  # layers such as Dropout take their seeds from it
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
        return [np.array(keras.ops.convert_to_numpy(variable)) for variable in self._variables]

    def draw(self, state: State, x: Any) -> np.ndarray:
        """Return the network's outputs in a state.

        Args:
            state: from `read` or `train`.
            x: inputs, an array or a structure of arrays; or `Rows`.

        Returns:
            (examples, draws, width), or (rows, draws, width).
        """
        self._load(state)
        if isinstance(x, Rows):
            return x.outputs(self._samples_by_name, self.samples)
        count = len(keras.tree.flatten(x)[0])
        # Up to a full batch: JAX would compile the prediction again for each size of a last one.
        full_batches = -(-count // _BATCH)
        prediction = self.outputs(x, full_batches * _BATCH, _BATCH)
        return prediction["samples"][:count]

    def outputs(self, x: Any, count: int, batch_size: int) -> Any:
        """Return what `MonteCarlo` predicts in the present state, for some number of examples.

        Args:
            x: inputs, an array or a structure of arrays; they are repeated, or cut off.
            count: of examples.
            batch_size: how many of them are predicted at once.
        """
        index = np.resize(np.arange(len(keras.tree.flatten(x)[0])), count)
        repeated = keras.tree.map_structure(lambda part: part[index], x)
        return self._sampler.predict(repeated, batch_size=batch_size, verbose=0)

    def _samples_by_name(self, x: Any) -> dict[str, np.ndarray]:
        """Return the samples (examples, draws, ..., width) of each output, for one batch."""
        count = len(keras.tree.flatten(x)[0])
        prediction = self._sampler.predict(x, batch_size=count, verbose=0)
        parts = self._sampler.likelihood.split(prediction)
        return {name: part["samples"] for name, part in parts.items()}

    def train(self, state: State, fit: Callable[[keras.Model], None]) -> State:
        """Return the state after some training.

        Args:
            state: from `read` or `train`; the training starts there.
            fit: trains the compiled network it is given.
        """
        self._load(state)
        fit(self.network)
        return self.read()

    def copy(self, state: State) -> Any:
        """Return a new network in a state; a posterior over weights is returned itself."""
        with warnings.catch_warnings(action="ignore"):  # shown when the first one was made
            network = self._make()
        # A state ends with the optimizer's variables, which the new network does not have.
        for variable, value in zip(network.variables, state, strict=False):
            variable.assign(value)
        return network

    def _load(self, state: State) -> None:
        for variable, value in zip(self._variables, state, strict=True):
            variable.assign(value)


def copy_of_optimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return an optimizer with the same settings, without variables."""
    return type(optimizer).from_config(optimizer.get_config())
