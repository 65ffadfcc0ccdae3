"""Callbacks: KL annealing, posterior log, Monte Carlo evaluation, interrupts, NaN."""

import contextlib
import random
import signal
import threading
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn.layers import StochasticLayer
from tfp_ibnn.layers.control import some_stochastic_layers
from tfp_ibnn.layers.model import StochasticModel
from tfp_ibnn.prediction.monte_carlo import MonteCarlo


class KLAnnealing(keras.callbacks.Callback):
    """Raise the weight of the KL, beta, linearly over the first epochs.

    Epoch e (from 0) trains with beta = start + (stop - start) * min(1, e / epochs), of every layer
    or of a `VAE`. What beta reaches stays in the model and its files: train for more than `epochs`.

    Args:
        epochs: how many epochs beta takes from `start` to `stop`.
        start: beta in the first epoch.
        stop: beta from epoch `epochs` on; None takes the `beta` that a posterior or VAE began with.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> annealing = ibnn.KLAnnealing(epochs=20)
        >>> [annealing.beta(epoch) for epoch in (0, 10, 20, 30)]
        [0.0, 0.5, 1.0, 1.0]
    """

    def __init__(self, epochs: int, start: float = 0.0, stop: float | None = None) -> None:
        super().__init__()
        self.epochs = checks.positive_integer("epochs", epochs)
        self.start = checks.non_negative("start", start)
        self.stop = None if stop is None else checks.non_negative("stop", stop)

    def beta(self, epoch: int, own: float = 1.0) -> float:
        """Return the weight of the KL in an epoch, counted from 0, for a posterior's own `beta`."""
        stop = own if self.stop is None else self.stop
        return self.start + (stop - self.start) * min(1.0, epoch / self.epochs)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        owners = [self.model]  # a VAE
        if not hasattr(self.model, "initial_beta"):
            owners = [layer.posterior for layer in some_stochastic_layers(self.model)]
        for owner in owners:
            owner.beta.assign(self.beta(epoch, owner.initial_beta))


class PosteriorLog(keras.callbacks.Callback):
    """Log each layer's posterior at the end of every epoch, among Keras's own logs.

    The keys are `NAME/kl`, `NAME/z_mean`, `NAME/z_std` and `NAME/entropy`, the second layer of one
    name being `NAME_2`: KL and entropy in nats, mean and deviation of z, or of the weights, over
    the channels; and `beta` of the first layer. List it before CSVLogger or TensorBoard.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is None:
            return
        layers, names = some_stochastic_layers(self.model), []
        for layer in layers:
            name, number = layer.name, 2
            while name in names:
                name, number = f"{layer.name}_{number}", number + 1
            names.append(name)
            logs.update({f"{name}/{key}": x for key, x in posterior_statistics(layer).items()})
        logs["beta"] = float(ops.convert_to_numpy(layers[0].posterior.beta))


def posterior_statistics(layer: StochasticLayer) -> dict[str, float]:
    """Return KL, mean and standard deviation of z, and entropy of a layer's posterior."""
    z, kl, entropy = (ops.convert_to_numpy(part) for part in layer.summary())
    parts = {"kl": kl, "z_mean": z, "z_std": np.std(z, axis=0), "entropy": entropy}
    return {name: float(np.mean(part)) for name, part in parts.items()}


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Leave Python's random state, by which Keras shuffles and seeds, as it was before."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


class MonteCarloEvaluation(keras.callbacks.Callback):
    """Evaluate the averaged prediction while training, among Keras's own logs.

    The keys are those of `MonteCarlo.evaluate` behind `val_mc_` (`val_nll` and the like are of
    single draws). List it before what reads them, such as EarlyStopping("val_mc_nll", mode="min").

    Args:
        data: (x, y), (x, y, sample_weight), or a dataset of such batches.
        samples: number of draws.
        every: evaluate in the first epoch and then in every so many epochs.
        batch_size: for arrays.
        seed: of the draws, the same in every epoch, so that epochs can be compared.
        **options: those of `MonteCarlo`.
    """

    def __init__(
        self,
        data: Any,
        samples: int = 32,
        every: int = 1,
        batch_size: int | None = None,
        seed: int | None = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        self.samples = checks.positive_integer("samples", samples)
        self.every = checks.positive_integer("every", every)
        self.batch_size = batch_size
        self.options = {"seed": seed, **options}
        parts = data if isinstance(data, (tuple, list)) else [data]
        if parts is data and len(data) not in (2, 3):
            want = "(x, y), (x, y, sample_weight) or a dataset"
            raise ValueError(f"`data` must be {want}; got a {type(data).__name__} of {len(data)}.")
        self._data = dict(zip(("x", "y", "sample_weight"), parts, strict=False))

    @random_state_kept()
    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._monte_carlo = None
        if self.model.built:
            self._monte_carlo = MonteCarlo(self.model, self.samples, **self.options)

    @random_state_kept()
    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the entries; they are NaN if the training has diverged."""
        if logs is None or epoch % self.every:
            return
        if self._monte_carlo is None:
            self._monte_carlo = MonteCarlo(self.model, self.samples, **self.options)
        options = {"batch_size": self.batch_size, "verbose": 0, "return_dict": True}
        diverged = not np.isfinite(logs.get("loss", 0.0))
        scores = self._monte_carlo.evaluate(**self._data, **options, allow_nan=diverged)
        del scores["loss"]
        logs.update({f"val_mc_{key}": value for key, value in scores.items()})


class Interrupts(keras.callbacks.Callback):
    """Raise an interrupt that Keras has swallowed, at the end of its batch.

    Keras waits for the logs of a batch inside of a bare `except: pass`: on JAX most of the time.
    Used as a context around `fit` and as a callback; a handler of somebody's own is left alone.
    """

    came = False

    def __enter__(self) -> "Interrupts":
        self.came = False
        is_main = threading.current_thread() is threading.main_thread()
        self._acts = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._acts:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self._acts:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.came and kind is not None:  # TensorFlow may have raised something of its own
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.came:
            raise KeyboardInterrupt


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
    """

    def __init__(self, every: int | None = 50, raises: bool = False) -> None:
        super().__init__()
        self.every = None if every is None else checks.positive_integer("every", every)
        self.raises = bool(raises)
        self.message: str | None = None  # what went wrong

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
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
        self._epoch, self._before_epoch = epoch, self._batches

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # Keras may run several batches at once, and then gives the last one's number.
        last, self._batches = self._batches, self._before_epoch + batch + 1
        if self.every is not None and last // self.every < self._batches // self.every:
            self._check(logs, f"batch {batch + 1} of epoch {self._epoch + 1}")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
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
