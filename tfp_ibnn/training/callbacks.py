"""Callbacks: KL annealing, a log of the posteriors, Monte Carlo evaluation, interruptions."""

import contextlib
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.serialization import Configured
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.layers.base import StochasticLayer
from tfp_ibnn.prediction.monte_carlo import MonteCarlo


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class KLAnnealing(Configured, keras.callbacks.Callback):
    """Raise the weight of the KL, beta, linearly over the first epochs.

    Epoch e (from 0) trains with beta = start + (stop - start) * min(1, e / epochs) in every layer.

    Args:
        epochs: how many epochs beta takes from `start` to `stop`.
        start: beta in the first epoch.
        stop: beta from epoch `epochs` on; None takes the `beta` that each posterior was made with.

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
        """Set beta in every stochastic layer."""
        for posterior in (layer.posterior for layer in _layers_of(self.model)):
            posterior.beta.assign(self.beta(epoch, posterior.initial_beta))


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class PosteriorLog(Configured, keras.callbacks.Callback):
    """Log each layer's posterior at the end of every epoch, among Keras's own logs.

    The keys are `NAME/kl`, `NAME/z_mean`, `NAME/z_std` and `NAME/entropy`: KL and entropy in nats,
    mean and standard deviation of z over the channels; and `beta`, the weight of the KL. The second
    layer of one name, in nested models, is `NAME_2`. List it before CSVLogger or TensorBoard.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the entries."""
        if logs is None:
            return
        layers, count = _layers_of(self.model), Counter()
        for layer in layers:
            count[layer.name] += 1
            name = layer.name if count[layer.name] == 1 else f"{layer.name}_{count[layer.name]}"
            for key, value in posterior_statistics(layer).items():
                logs[f"{name}/{key}"] = value
        logs["beta"] = float(ops.convert_to_numpy(layers[0].posterior.beta))


def posterior_statistics(layer: StochasticLayer) -> dict[str, float]:
    """Return KL, mean and standard deviation of z, and entropy of a layer's posterior."""
    z, kl, entropy = (ops.convert_to_numpy(part) for part in layer.posterior.summary())
    return {
        "kl": float(np.mean(kl)),
        "z_mean": float(np.mean(z)),
        "z_std": float(np.mean(np.std(z, axis=0))),
        "entropy": float(np.mean(entropy)),
    }


def _layers_of(model: keras.Model) -> list[StochasticLayer]:
    layers = stochastic_layers(model)
    if not layers:
        raise ValueError(f"Model {model.name!r} has no stochastic layer.")
    return layers


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class MonteCarloEvaluation(Configured, keras.callbacks.Callback):
    """Evaluate the averaged prediction while training, among Keras's own logs.

    The keys are those of `MonteCarlo.evaluate` behind `val_mc_`, such as `val_mc_nll`. (`val_nll`
    and the like are of single draws.) List it before the callbacks that read them, such as
    EarlyStopping("val_mc_nll", mode="min"), ModelCheckpoint and CSVLogger.

    Args:
        data: (x, y), (x, y, sample_weight), or a dataset of such batches.
        samples: number of draws.
        every: evaluate in the first epoch and then in every so many epochs.
        batch_size: for arrays.
        seed: of the draws, the same in every epoch, so that epochs can be compared.
        **options: those of `MonteCarlo`.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> callback = ibnn.MonteCarloEvaluation(([[0.0], [1.0]], [0, 1]), samples=32, every=5)
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
            raise ValueError(
                "`data` must be (x, y), (x, y, sample_weight) or a dataset; got a "
                f"{type(data).__name__} of {len(data)}."
            )
        self._data = dict(zip(("x", "y", "sample_weight"), parts, strict=False))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor, the data included if it is arrays."""
        data = list(self._data.values())
        if len(data) == 1:
            raise ValueError("The config of a MonteCarloEvaluation can hold arrays, not a dataset.")
        own = {name: getattr(self, name) for name in ("samples", "every", "batch_size")}
        return {"data": data, **own, **self.options}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Wrap the model that is trained."""
        self._monte_carlo = self._wrap() if self.model.built else None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the entries; they are NaN if the training has diverged."""
        if logs is None or epoch % self.every:
            return
        if self._monte_carlo is None:
            self._monte_carlo = self._wrap()
        options = {"batch_size": self.batch_size, "verbose": 0, "return_dict": True}
        diverged = not np.isfinite(logs.get("loss", 0.0))
        with _random_state_kept():
            scores = self._monte_carlo.evaluate(**self._data, **options, allow_nan=diverged)
        del scores["loss"]
        logs.update({f"val_mc_{key}": value for key, value in scores.items()})

    def _wrap(self) -> MonteCarlo:
        with _random_state_kept():
            return MonteCarlo(self.model, self.samples, **self.options)


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Leave Python's random state, by which Keras shuffles datasets, to the training."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


class Interrupts(keras.callbacks.Callback):
    """Raises an interruption that has got lost again, at the end of its batch.

    Keras waits for the logs of a batch inside of a bare `except: pass`. On JAX that is where most
    of the time passes, and with it Ctrl-C. Used as a context around `fit` and as a callback; a
    handler of somebody's own is left alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.came = False

    def __enter__(self) -> "Interrupts":
        is_main = threading.current_thread() is threading.main_thread()
        self._acts = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._acts:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._acts:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Raise what came."""
        if self.came:
            raise KeyboardInterrupt
