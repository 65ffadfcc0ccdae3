"""A callback for numbers that become NaN or infinite."""

import warnings
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.serialization import Configured
from tfp_ibnn.layers.model import StochasticModel


class NonFiniteError(ArithmeticError):
    """A training whose loss or weights are no longer finite."""


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class TerminateOnNonFinite(Configured, keras.callbacks.Callback):
    """Stop when the loss or a weight is NaN or infinite, say why, and go back to good weights.

    The message names the layer whose z or KL was the first to become NaN or infinite, or the loss,
    if they were all finite: the fault then lies in the network or in the data. (Of models other
    than `StochasticModel`, and if the last step went wrong, it names the weights.) Weights and
    optimizer are set back to the last check that a sound one has followed, so that their own loss
    is known to be finite. NaN in the data can look like a fault of z: where ReLU turns NaN into 0,
    as on TensorFlow's CPUs, the gradient is the first to fail, and z follows in the next step.

    Args:
        every: check, and copy the weights, every so many batches and at the end of each epoch; None
            checks only there.
        raises: raise a `NonFiniteError`, before other callbacks can save the model, instead of a
            warning and an early end.

    Example:
        List it before the callbacks that save the model:

        >>> import tfp_ibnn as ibnn
        >>> callbacks = [ibnn.TerminateOnNonFinite(every=10), ibnn.Checkpoint("run.npz")]
    """

    def __init__(self, every: int | None = 50, raises: bool = False) -> None:
        super().__init__()
        self.every = None if every is None else checks.positive_integer("every", every)
        self.raises = bool(raises)
        self.message: str | None = None  # what went wrong

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Keep the weights as they are."""
        self.message = None
        self._batches = self._before_epoch = self._epoch = 0
        self._was_bad = bool(_bad_weights(self.model))
        if isinstance(self.model, StochasticModel):
            self.model.clear_fault()
        # Each with the number of batches before it. What was kept last has not proved good yet.
        self._good = self._latest = 0, []
        if self.model.built and not self._was_bad:
            # On TensorFlow an optimizer gets its variables in the first step otherwise.
            if not self.model.optimizer.built:
                self.model.optimizer.build(self.model.trainable_variables)
            self._keep()
            self._good = self._latest

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Count the epochs."""
        self._epoch, self._before_epoch = epoch, self._batches

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Check every so many batches."""
        # Keras may run several batches at once, and then tells the last one's number.
        last, self._batches = self._batches, self._before_epoch + batch + 1
        if self.every is not None and last // self.every < self._batches // self.every:
            self._check(logs, f"batch {batch + 1} of epoch {self._epoch + 1}")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Check."""
        self._check(logs, f"epoch {epoch + 1}")

    def _check(self, logs: dict[str, Any] | None, when: str) -> None:
        if self.message is not None:
            return
        loss = float((logs or {}).get("loss", 0.0))
        # The loss is that of the weights before the last step.
        bad = _bad_weights(self.model)
        if np.isfinite(loss) and not bad:
            # An epoch's end may follow a check at once, and then proves nothing more.
            if self._batches > self._latest[0]:
                self._keep()
            return
        cause = "The weights are finite."
        if getattr(self.model, "fault", None):
            cause = f"The first to become NaN or infinite was {self.model.fault}."
        elif bad:
            more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
            cause = f"Weights that are not finite: {', '.join(bad[:3])}{more}."
        self.message = f"After {when} the loss is {loss}. {cause} {self._go_back()}"
        if self.raises:
            raise NonFiniteError(self.message)
        warnings.warn(self.message, stacklevel=2)
        self.model.stop_training = True

    def _keep(self) -> None:
        """Keep what a training step changes, but for random states and metrics."""
        variables = [*self.model.weights, *self.model.optimizer.variables]
        # Copies, since the buffers themselves are written over.
        copies = [(variable, ops.copy(variable.value)) for variable in variables]
        self._good, self._latest = self._latest, (self._batches, copies)

    def _go_back(self) -> str:
        since, values = self._good
        for variable, value in values:
            variable.assign(value)
        if self._was_bad:
            return "The weights were not finite from the beginning."
        if not values:
            return "There are none to go back to: the model was built in its first step."
        batches = self._batches - since
        return f"The weights are again those of {batches} batch{'es'[: 2 * (batches > 1)]} before."


def _bad_weights(model: keras.Model) -> list[str]:
    """Return the paths of weights that are not finite."""
    of_a_step = getattr(model, "_last_kl", None)
    is_float = keras.backend.is_float_dtype
    weights = [w for w in model.weights if is_float(w.dtype) and w is not of_a_step]
    # One transfer for all of them.
    finite = ops.convert_to_numpy(ops.stack([ops.all(ops.isfinite(w)) for w in weights] or [True]))
    return [weight.path for weight, good in zip(weights, finite, strict=False) if not good]
