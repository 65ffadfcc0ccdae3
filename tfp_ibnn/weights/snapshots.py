"""Callbacks that collect weights while a model trains."""

import os
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks, files
from tfp_ibnn._core.serialization import Configured, storable
from tfp_ibnn.weights.base import WeightSets


class Collector(Configured, keras.callbacks.Callback):
    """Calls `collect` after every so many epochs or steps; the base of callbacks.

    An optimizer that says when it samples, as SGLD with cycles does, is asked: what falls into its
    exploration is left out.

    Args:
        every: collect after every so many epochs, or steps.
        start: how many to leave out first (burn-in). The first weights are those after
            `start + every`.
        unit: "epoch" or "step", of the two numbers.
    """

    def __init__(self, every: int = 1, start: int = 0, unit: str = "epoch") -> None:
        super().__init__()
        self.every = checks.positive_integer("every", every)
        self.start = checks.whole("start", start)
        self.unit = checks.one_of("unit", unit, ("epoch", "step"))

    def collect(self, step: int) -> None:
        """Keep the weights after a step of the optimizer."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forget what was collected; a training that begins at step 0 does so."""
        raise NotImplementedError

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Count."""
        self._before = self._steps()
        self._last = epoch if self.unit == "epoch" else self._before
        if not self._before:
            self.clear()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Collect, if it is time."""
        if self.unit == "step":
            # Counted, since to read the optimizer's number would wait for the device.
            optimizer = getattr(self._model.optimizer, "inner_optimizer", self._model.optimizer)
            steps = (batch + 1) // (optimizer.gradient_accumulation_steps or 1)
            self._reach(self._before + steps, self._before + steps)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Collect, if it is time."""
        if self.unit == "epoch":
            self._reach(epoch + 1, self._steps())

    def _reach(self, now: int, step: int) -> None:
        last, self._last = self._last, now
        # Keras may run several steps at once, and then gives the last one's number.
        if (now - self.start) // self.every <= max(0, (last - self.start) // self.every):
            return
        optimizer = getattr(self._model.optimizer, "inner_optimizer", self._model.optimizer)
        is_sampling = getattr(optimizer, "is_sampling", None)
        if is_sampling is None or ops.convert_to_numpy(is_sampling(step - 1)):
            self.collect(step)

    def _steps(self) -> int:
        # Not `_model`: on JAX this brings the state of the training into the variables.
        return int(ops.convert_to_numpy(self.model.optimizer.iterations))

    def _none(self) -> str:
        when = f"every {self.every} {self.unit}(s), after {self.start}"
        return f"Nothing, or too little, was collected: {when}. Train for longer, or lower `start`."


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Snapshots(Collector):
    """Collect whole weight sets, batch-norm statistics included: samples, snapshots.

    Each snapshot takes as much memory as the network, or as much disk. With a folder each is a file
    of its own, written whole or not at all; on a full disk it stays in memory, with a warning, and
    is written with the next one. A run that `Checkpoint` resumes goes on in the same folder.

    Args:
        every: take one after every so many epochs, or steps.
        start: how many to leave out first (burn-in).
        unit: "epoch" or "step", of the two numbers.
        folder: for the files; None keeps the snapshots in memory.

    Example:
        >>> import keras, numpy as np, tfp_ibnn as ibnn
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> snapshots = ibnn.Snapshots(every=2, start=2)
        >>> x = np.ones((4, 3), "float32")
        >>> log = model.fit(x, x[:, :1], epochs=6, verbose=0, callbacks=[snapshots])
        >>> snapshots.posterior().count
        2

    References:
        Huang et al., Snapshot Ensembles: Train 1, Get M for Free, arXiv 1704.00109.
    """

    def __init__(
        self,
        every: int = 1,
        start: int = 0,
        unit: str = "epoch",
        folder: str | os.PathLike | None = None,
    ) -> None:
        super().__init__(every, start, unit)
        self.folder = None if folder is None else str(folder)
        self.clear()

    def clear(self) -> None:
        """Forget what is in memory, or raise if the folder holds another run's."""
        self._kept: dict[int, list[np.ndarray]] = {}
        if getattr(self, "_before", None) == 0 and self._files():
            remedy = "Choose another folder, or restore the run's checkpoint before `fit`."
            raise ValueError(f"`folder` {self.folder!r} holds another run's snapshots. {remedy}")

    def collect(self, step: int) -> None:
        """Keep the weights after a step of the optimizer."""
        self._kept[step] = [storable(w) for w in self.model.weights]
        self._write()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Write what could not be written before."""
        self._write()

    def posterior(self, model: keras.Model | None = None) -> WeightSets:
        """Return all snapshots as weight sets; those of a folder need a model in a new process."""
        model = self.model if model is None else model
        if model is None:
            raise ValueError("`model` is missing: build the network that the snapshots are of.")
        sets = {int(path.stem.split("_")[1]): _read(path) for path in self._files()}
        sets.update(self._kept)
        if not sets:
            raise ValueError(self._none())
        return WeightSets.of(model, [values for _, values in sorted(sets.items())])

    def _files(self) -> list[Path]:
        return [] if self.folder is None else sorted(Path(self.folder).glob("step_*.npz"))

    def _write(self) -> None:
        if self.folder is None:
            return
        for step in list(self._kept):
            path = Path(self.folder) / f"step_{step:010d}.npz"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with files.replacing(path) as temporary:
                    np.savez(temporary, *self._kept[step])
            except OSError as error:
                state = f"It stays in memory, as {len(self._kept)} do; those written are whole"
                remedy = "Free some space: the next snapshot tries again."
                message = f"{path} could not be written ({error}). {state}. {remedy}"
                warnings.warn(message, stacklevel=2)
                return
            del self._kept[step]


def _read(path: Path) -> list[np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return [file[f"arr_{number}"] for number in range(len(file.files))]
    except Exception as error:  # broken bytes make numpy and zipfile raise nearly anything
        raise ValueError(f"{path} is not a whole snapshot ({error}). Delete it.") from error
