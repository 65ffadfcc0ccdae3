"""Training that stops when a number becomes NaN or infinite."""

import warnings
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.layers.model import StochasticModel


class _Copy(NamedTuple):
    """The state of a training as it was."""

    batches: int
    """How many batches of this training came before it."""

    values: list[tuple[keras.Variable, Tensor]]


class NonFiniteError(ArithmeticError):
    """A training whose loss or weights are no longer finite."""


class TerminateOnNonFinite(keras.callbacks.Callback):
    """Stop when the loss or a weight is NaN or infinite, report why, restore good weights.

    The message names the layer whose z or KL was the first to become NaN or infinite, or the loss
    if they were finite: the fault then lies in the network or the data. (Of models other than
    `StochasticModel`, and if the last step went wrong, it names the weights.) Weights and optimizer
    are set back to the last check that a sound one has followed. NaN in the data can look like a
    fault of z: where ReLU turns NaN into 0, as on TensorFlow's CPUs, the gradient fails first. List
    it before the callbacks that save the model.

    Args:
        every: check, and copy the weights, every so many batches and at the end of each epoch; None
            checks only there.
        raises: raise a `NonFiniteError` instead of a warning and an early end.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.SGD(1e30), "mse")
        >>> x = keras.ops.ones((8, 1))
        >>> stop = ibnn.TerminateOnNonFinite(raises=True)
        >>> try:
        ...     _ = model.fit(x, x, epochs=9, verbose=0, callbacks=[stop])
        ... except ibnn.NonFiniteError:
        ...     print(stop.message.partition(".")[0])
        After epoch 2 the loss is inf
    """

    def __init__(self, every: int | None = 50, raises: bool = False) -> None:
        super().__init__()
        self.every = None if every is None else checks.positive_integer("every", every)
        self.raises = bool(raises)
        self.message: str | None = None  # what went wrong

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.message = None
        self._epoch = 0
        self._batches = 0
        self._before_epoch = 0
        self._was_bad = bool(_bad_weights(self.model))
        if isinstance(self.model, StochasticModel):
            self.model.clear_fault()
        # What was kept last has not proved good yet: its loss comes with the next step.
        self._latest = _Copy(0, [])
        self._good = self._latest
        if self.model.built and not self._was_bad:
            # On TensorFlow an optimizer gets its variables in the first step otherwise.
            if not self.model.optimizer.built:
                self.model.optimizer.build(self.model.trainable_variables)
            self._keep()
            self._good = self._latest

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        self._before_epoch = self._batches

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # Keras may run several batches at once, and then gives the last one's number.
        before = self._batches
        self._batches = self._before_epoch + batch + 1
        if self.every is not None and before // self.every < self._batches // self.every:
            self._check(logs, f"batch {batch + 1} of epoch {self._epoch + 1}")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._check(logs, f"epoch {epoch + 1}")

    def _check(self, logs: dict[str, Any] | None, when: str) -> None:
        """Keep a copy if all is finite; else go back to the last good one, and report it once."""
        if self.message is not None:
            return
        # The loss is that of the weights before the last step.
        loss = float((logs or {}).get("loss", 0.0))
        bad = _bad_weights(self.model)
        if np.isfinite(loss) and not bad:
            # An epoch's end may follow a check at once, and then proves nothing more.
            if self._batches > self._latest.batches:
                self._keep()
            return
        cause = self._cause(bad)
        self.message = f"After {when} the loss is {loss}. {cause} {self._go_back()}"
        if self.raises:
            raise NonFiniteError(self.message)
        warnings.warn(self.message, stacklevel=2)
        self.model.stop_training = True

    def _cause(self, bad: list[str]) -> str:
        """Return a sentence on what became NaN or infinite first, or is so now."""
        fault = getattr(self.model, "fault", None)
        if fault:
            return f"The first to become NaN or infinite was {fault}."
        if not bad:
            return "The weights are finite."
        first = ", ".join(bad[:3])
        if len(bad) > 3:
            return f"Weights that are not finite: {first} and {len(bad) - 3} more."
        return f"Weights that are not finite: {first}."

    def _keep(self) -> None:
        """Keep what a training step changes, but for random states and metrics."""
        variables = [*self.model.weights, *self.model.optimizer.variables]
        # Copies, since the buffers themselves are written over.
        values = [(variable, ops.copy(variable.value)) for variable in variables]
        self._good = self._latest
        self._latest = _Copy(self._batches, values)

    def _go_back(self) -> str:
        """Set the weights to the good copy, and return a sentence on it."""
        for variable, value in self._good.values:
            variable.assign(value)
        if self._was_bad:
            return "The weights were not finite from the beginning."
        if not self._good.values:
            return "There are none to go back to: the model was built in its first step."
        batches = self._batches - self._good.batches
        unit = "batches" if batches > 1 else "batch"
        return f"The weights are again those of {batches} {unit} before."


def _bad_weights(model: keras.Model) -> list[str]:
    """Return the paths of weights that are not finite."""
    of_a_step = getattr(model, "_last_kl", None)
    weights = []
    for weight in model.weights:
        if keras.backend.is_float_dtype(weight.dtype) and weight is not of_a_step:
            weights.append(weight)
    if not weights:
        return []
    # One transfer for all of them.
    finite = ops.stack([ops.all(ops.isfinite(weight)) for weight in weights])
    finite = ops.convert_to_numpy(finite)
    return [weight.path for weight, is_finite in zip(weights, finite, strict=True) if not is_finite]
