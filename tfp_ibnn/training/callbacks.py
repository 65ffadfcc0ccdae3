"""Callbacks that anneal the KL, log the posteriors, and evaluate the averaged prediction."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn.layers import StochasticLayer
from tfp_ibnn.layers.control import some_stochastic_layers
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
        """Return the weight of the KL in an epoch.

        Args:
            epoch: counted from 0.
            own: the `beta` that a posterior began with, which None as `stop` leads to.
        """
        stop = own if self.stop is None else self.stop
        progress = min(1.0, epoch / self.epochs)
        return self.start + (stop - self.start) * progress

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if hasattr(self.model, "initial_beta"):  # a VAE
            annealed = [self.model]
        else:
            annealed = [layer.posterior for layer in some_stochastic_layers(self.model)]
        for owner in annealed:
            owner.beta.assign(self.beta(epoch, owner.initial_beta))


class PosteriorLog(keras.callbacks.Callback):
    """Log each layer's posterior at the end of every epoch, among Keras's own logs.

    The keys are `NAME/kl`, `NAME/z_mean`, `NAME/z_std` and `NAME/entropy`, the second layer of one
    name being `NAME_2`: KL and entropy in nats, mean and deviation of z, or of the weights, over
    the channels; and `beta` of the first layer. List it before CSVLogger or TensorBoard.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> det = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="head")])
        >>> sto = ibnn.to_stochastic(det, ibnn.NormalAffine(), train_size=8)
        >>> sto.compile("sgd", "mse", noise_scale=1.0)
        >>> log = ibnn.PosteriorLog()
        >>> x, y = keras.ops.ones((8, 4)), keras.ops.ones((8, 1))
        >>> history = sto.fit(x, y, batch_size=8, verbose=0, callbacks=[log]).history
        >>> sorted(name for name in history if "head" in name)
        ['head/entropy', 'head/kl', 'head/z_mean', 'head/z_std']
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is None:
            return
        layers = some_stochastic_layers(self.model)
        for name, layer in zip(_unique_names(layers), layers, strict=True):
            for statistic, value in posterior_statistics(layer).items():
                logs[f"{name}/{statistic}"] = value
        logs["beta"] = float(ops.convert_to_numpy(layers[0].posterior.beta))


def _unique_names(layers: Sequence[StochasticLayer]) -> list[str]:
    """Return the names of layers, with numbers from 2 on where several have one name."""
    names: list[str] = []
    for layer in layers:
        name = layer.name
        number = 2
        while name in names:
            name = f"{layer.name}_{number}"
            number += 1
        names.append(name)
    return names


def posterior_statistics(layer: StochasticLayer) -> dict[str, float]:
    """Return `kl` and `entropy` of a layer's posterior, in nats, and `z_mean` and `z_std` of z."""
    z, kl, entropy = map(ops.convert_to_numpy, layer.summary())
    deviations = np.std(z, axis=0)
    return {
        "kl": float(np.mean(kl)),
        "z_mean": float(np.mean(z)),
        "z_std": float(np.mean(deviations)),
        "entropy": float(np.mean(entropy)),
    }


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
    single draws), and NaN once the training has diverged. List it before what reads them, such as
    EarlyStopping("val_mc_nll", mode="min").

    Args:
        data: (x, y), (x, y, sample_weight), or a dataset of such batches.
        samples: number of draws.
        every: evaluate in the first epoch and then in every so many epochs.
        batch_size: for arrays.
        seed: of the draws, the same in every epoch, so that epochs can be compared.
        **options: those of `MonteCarlo`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> det = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> sto = ibnn.to_stochastic(det, ibnn.NormalAffine(), train_size=8)
        >>> sto.compile("sgd", "mse", noise_scale=1.0)
        >>> data = keras.ops.ones((8, 4)), keras.ops.ones((8, 1))
        >>> evaluation = ibnn.MonteCarloEvaluation(data, samples=4)
        >>> history = sto.fit(*data, batch_size=8, verbose=0, callbacks=[evaluation]).history
        >>> sorted(history)
        ['kl', 'loss', 'nll', 'val_mc_rmse']
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
        is_arrays = isinstance(data, (tuple, list))
        if is_arrays and len(data) not in (2, 3):
            raise ValueError(
                "`data` must be (x, y), (x, y, sample_weight) or a dataset; got a "
                f"{type(data).__name__} of {len(data)}."
            )
        parts = data if is_arrays else [data]
        self._data = dict(zip(("x", "y", "sample_weight"), parts, strict=False))

    @random_state_kept()
    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._monte_carlo = self._averaged() if self.model.built else None

    @random_state_kept()
    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is None or epoch % self.every:
            return
        if self._monte_carlo is None:
            self._monte_carlo = self._averaged()
        has_diverged = not np.isfinite(logs.get("loss", 0.0))
        scores = self._monte_carlo.evaluate(
            **self._data,
            batch_size=self.batch_size,
            verbose=0,
            return_dict=True,
            allow_nan=has_diverged,
        )
        del scores["loss"]
        for name, value in scores.items():
            logs[f"val_mc_{name}"] = value

    def _averaged(self) -> MonteCarlo:
        """Return the model that averages the draws."""
        return MonteCarlo(self.model, self.samples, **self.options)
