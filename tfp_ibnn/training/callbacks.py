"""KL annealing, and a log of the posteriors."""

from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.layers.base import StochasticLayer
from tfp_ibnn.training.callback import Callback

__all__ = [
    "KLAnnealing",
    "PosteriorLog",
]


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class KLAnnealing(Callback):
    """Raise the weight of the KL, beta, linearly over the first epochs.

    Epoch e (from 0) trains with beta = start + (stop - start) * min(1, e / epochs), in every
    stochastic layer.

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
        """Return the weight of the KL in an epoch, counted from 0.

        Args:
            epoch: the epoch.
            own: the `beta` that the posterior was made with.
        """
        stop = own if self.stop is None else self.stop
        return self.start + (stop - self.start) * min(1.0, epoch / self.epochs)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Set beta in every stochastic layer."""
        for layer in _layers_of(self.model):
            posterior = layer.posterior
            posterior.beta.assign(self.beta(epoch, posterior.initial_beta))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {"epochs": self.epochs, "start": self.start, "stop": self.stop}


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class PosteriorLog(Callback):
    """Log each layer's posterior at the end of every epoch, among Keras's own logs.

    The keys are `NAME/kl`, `NAME/z_mean`, `NAME/z_std` and `NAME/entropy`: KL and entropy in nats,
    mean and standard deviation of z over the channels. The second layer of one name, in nested
    models, is `NAME_2`. `beta` is the weight of the KL. List it before CSVLogger or
    TensorBoard, so that they see the entries.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the entries."""
        if logs is None:
            return
        layers = _layers_of(self.model)
        names = [layer.name for layer in layers]
        for position, layer in enumerate(layers):
            earlier = names[:position].count(layer.name)
            name = f"{layer.name}_{earlier + 1}" if earlier else layer.name
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
