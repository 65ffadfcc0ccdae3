"""Callbacks that collect weights while a model trains: snapshots, and SWAG's Gaussian of them."""

import collections
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks, files
from tfp_ibnn._core.serialization import Configured, storable
from tfp_ibnn.layers import loss_scale
from tfp_ibnn.weights.base import WeightPosterior, WeightSets
from tfp_ibnn.weights.flat import GaussianWeights


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Snapshots(Configured, keras.callbacks.Callback):
    """Collect whole weight sets while a model trains: samples of SGLD, ends of cycles, snapshots.

    Each takes as much memory as the network, or is a file in `folder`, written whole or not at all;
    on a full disk it stays in memory, with a warning, and is written with the next one. A run that
    `Checkpoint` resumes continues in the same folder. A further `fit` with this callback adds to
    what is there, and leaves nothing out again: `start` and `every` count on. One that begins at
    step 0 of its optimizer starts afresh. The exploration of `CosineCycles` is left out. Reference:
    Huang et al., Snapshot Ensembles: Train 1, Get M for Free, arXiv 1704.00109.

    Args:
        every: take one after every so many epochs, or steps.
        start: how many to leave out first (burn-in): the first is taken after `start + every`.
        unit: "epoch" or "step", of the two numbers.
        folder: for the files; None keeps the snapshots in memory.

    Example:
        >>> import keras, numpy as np, tfp_ibnn as ibnn
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.SGD(0.1), "mse")
        >>> snapshots, x = ibnn.Snapshots(every=2, start=2), np.ones((4, 3), "float32")
        >>> log = model.fit(x, x[:, :1], epochs=8, verbose=0, callbacks=[snapshots])
        >>> snapshots.steps
        [4, 6, 8]
    """

    least = 1  # how many a posterior needs

    def __init__(
        self,
        every: int = 1,
        start: int = 0,
        unit: str = "epoch",
        folder: str | os.PathLike | None = None,
    ) -> None:
        super().__init__()
        self.every = checks.positive_integer("every", every)
        self.start = checks.whole("start", start)
        self.unit = checks.one_of("unit", unit, ("epoch", "step"))
        self.folder = None if folder is None else str(folder)
        self._kept: dict[int, list[np.ndarray]] = {}  # by step; with a folder, not yet written
        self._epochs = 0  # that are finished, of all fits
        self._is_first_epoch = True

    def posterior(self, model: keras.Model | None = None) -> WeightPosterior:
        """Return what was collected; `model` is for a folder that another process has written."""
        model = self.model if model is None else model
        if model is None:
            raise ValueError("`model` is missing: give the network that the snapshots are of.")
        count = len(self.steps)
        if count < self.least:
            raise ValueError(
                f"Of the snapshots, taken after every {self.every} {self.unit}s, from {self.start} "
                f"on, there are {count}; {self.least} are needed: train longer, or change `start`."
            )
        return self._posterior(model)

    @property
    def steps(self) -> list[int]:
        """Steps of the optimizer after which there is a snapshot."""
        steps = set(self._kept)
        if self.folder is not None:
            for path in Path(self.folder).glob("step_*.npz"):
                _, number = path.stem.split("_")
                steps.add(int(number))
        return sorted(steps)

    def read(self) -> Iterator[list[np.ndarray]]:
        """Yield the snapshots one after the other, each in the order of `model.weights`."""
        for step in self.steps:
            if step in self._kept:
                yield self._kept[step]
            else:
                yield _read(self._path(step))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._before = self._step()
        if not self._before:
            self._kept.clear()
            self._epochs = 0
        self._epochs = max(epoch, self._epochs)  # a further `fit` begins with epoch 0
        self._last = self._epochs if self.unit == "epoch" else self._before
        if not self._before and self.steps:
            raise ValueError(
                f"`folder` {self.folder!r} holds another run's snapshots. Choose another folder, "
                "or restore the run's checkpoint before `fit`."
            )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.unit != "step":
            return
        # Counted, since to read the optimizer's number would wait for the device.
        batches_per_step = _innermost(self._model).gradient_accumulation_steps or 1
        step = self._before + (batch + 1) // batches_per_step
        self._reach(step, step)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._check_train_size()  # before validation, which starts the metrics again

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._check_train_size()
        self._epochs += 1
        if self.unit == "epoch":
            self._reach(self._epochs, self._step())

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._write()

    def _reach(self, now: int, step: int) -> None:
        """Take a snapshot if one is due at this epoch or step, after that step of the optimizer."""
        last = self._last
        self._last = now
        # Keras may run several steps at once, and then gives the last one's number.
        due_now = (now - self.start) // self.every
        due_before = (last - self.start) // self.every
        if due_now <= max(0, due_before):
            return
        is_sampling = getattr(_innermost(self._model), "is_sampling", None)
        if is_sampling is None or ops.convert_to_numpy(is_sampling(step - 1)):
            self._kept[step] = [storable(w) for w in self.model.weights]
            self._write()

    def _check_train_size(self) -> None:
        """Warn if a sampler takes the mean over an example's answers for its log-likelihood."""
        train_size = getattr(_innermost(self._model), "train_size", None)
        is_checked = not self._is_first_epoch
        self._is_first_epoch = False
        if is_checked or not train_size:
            return
        scale = loss_scale.scale_of(self._model)
        if scale is None or scale >= 1:
            return
        answers = 1 / scale
        metric = next(x for x in self.model.metrics if x.name == "loss")
        examples = round(float(ops.convert_to_numpy(metric.count)))
        # Epochs of `steps_per_epoch` may be shorter than the data, but not longer.
        if 1.5 * train_size < examples / scale:
            warnings.warn(
                f"The loss is a mean over {answers:.5g} answers of each example, so the samples "
                "are of a posterior with less data than there is: write "
                f"train_size={train_size} * {answers:.5g}.",
                stacklevel=2,
            )

    def _step(self) -> int:
        # Not `_model`: on JAX this brings the state of the training into the variables.
        return int(ops.convert_to_numpy(self.model.optimizer.iterations))

    def _posterior(self, model: keras.Model) -> WeightPosterior:
        return WeightSets.of(model, list(self.read()))

    def _path(self, step: int) -> Path:
        return Path(self.folder) / f"step_{step:010d}.npz"

    def _write(self) -> None:
        """Write the snapshots in memory to the folder, if there is one."""
        if self.folder is None:
            return
        for step in list(self._kept):
            path = self._path(step)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with files.replacing(path) as temporary:
                    np.savez(temporary, *self._kept[step])
            except OSError as error:
                warnings.warn(
                    f"{path} could not be written ({error}). It stays in memory, as "
                    f"{len(self._kept)} do, until there is some space.",
                    stacklevel=2,
                )
                return
            del self._kept[step]


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class SWAG(Snapshots):
    """Fit a Gaussian to the weights along the path of SGD: a callback, whose result is a posterior.

        N(mean, 1/2 (diag(variance) + D^T D / (K - 1)))

    Mean and variance are those of all snapshots; the K rows of D are the last ones, less the mean
    (in the paper, Maddox et al., arXiv 1902.02476, the mean so far). Use a constant learning rate,
    high enough for SGD to wander. The posterior takes K + 2 times the memory of the weights; with
    batch normalization use `swag.posterior().materialize(16, x_train)`.

    Args:
        every: take a snapshot after every so many epochs, or steps.
        start: how many to leave out first (burn-in): the first is taken after `start + every`.
        unit: "epoch" or "step", of the two numbers.
        folder: for the files; None keeps the snapshots in memory.
        rank: K, at least 2; as many as there are snapshots, if they are fewer.

    Example:
        >>> import keras, numpy as np, tfp_ibnn as ibnn
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.SGD(0.1), "mse")
        >>> swag, x = ibnn.SWAG(start=2, rank=5), np.ones((4, 3), "float32")
        >>> log = model.fit(x, x[:, :1], epochs=8, verbose=0, callbacks=[swag])
        >>> mc = ibnn.MonteCarlo(swag.posterior(), samples=16)
    """

    least = 2

    def __init__(
        self,
        every: int = 1,
        start: int = 0,
        unit: str = "epoch",
        folder: str | os.PathLike | None = None,
        rank: int = 20,
    ) -> None:
        super().__init__(every, start, unit, folder)
        self.rank = checks.positive_integer("rank", rank, least=2)

    def _posterior(self, model: keras.Model) -> GaussianWeights:
        rank = min(self.rank, len(self.steps))
        posterior = GaussianWeights(model, rank)
        moments = _Moments(rank)
        shapes = [tuple(w.shape) for w in model.weights]
        for number, values in enumerate(self.read(), 1):
            if [value.shape for value in values] != shapes:
                raise ValueError("The snapshots have other shapes than the weights of `model`.")
            sampled = [values[place].ravel() for place in posterior.places]
            row = np.concatenate(sampled)
            if not np.isfinite(row).all():
                raise ArithmeticError(f"Snapshot {number} is not finite: the training diverged.")
            moments.add(row)
        posterior.assign(*moments.of_gaussian())
        return posterior


class _Moments:
    """Mean and squares of vectors, by Welford's method, and the last `rank` of them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._last = collections.deque(maxlen=rank)
        self._count = 0
        self._mean: Any = 0.0
        self._squares: Any = 0.0  # the sum of the squared distances from the mean

    def add(self, row: np.ndarray) -> None:
        """Count a vector in."""
        self._last.append(row)
        self._count += 1
        gap = row.astype("float64") - self._mean
        self._mean = self._mean + gap / self._count
        new_gap = row - self._mean
        self._squares = self._squares + gap * new_gap

    def of_gaussian(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return mean, scale and factor of SWAG's Gaussian."""
        variance = self._squares / self._count
        scale = np.sqrt(variance / 2)
        rows = np.stack(self._last) - self._mean
        factor = rows / math.sqrt(2 * (self._rank - 1))
        return self._mean, scale, factor


def _innermost(model: keras.Model) -> keras.optimizers.Optimizer:
    """Return the optimizer of a model, inside of what scales its loss."""
    return getattr(model.optimizer, "inner_optimizer", model.optimizer)


def _read(path: Path) -> list[np.ndarray]:
    """Return the arrays of a snapshot, or raise if the file is damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return [file[f"arr_{number}"] for number in range(len(file.files))]
    except Exception as error:  # broken bytes make numpy and zipfile raise nearly anything
        raise ValueError(f"{path} is not a whole snapshot ({error}). Delete it.") from error
