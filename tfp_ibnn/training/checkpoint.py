"""Checkpoints from which a run resumes as if it had never stopped."""

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from tfp_ibnn._core import checks, files
from tfp_ibnn._core.serialization import fits, storable

_PARTS = ("model", "optimizer")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read, or that belongs to another model."""


class _Saved(NamedTuple):
    """What a checkpoint holds."""

    epochs: int
    logs: list[dict[str, float]]
    values: dict[str, list[np.ndarray]]
    """The values of the variables of each of `_PARTS`, in order."""


class Checkpoint(keras.callbacks.Callback):
    """Save all that a run needs to resume, at the end of every epoch.

    That is: the weights, the optimizer, every random state (noise, dropout, augmentation), which
    Keras's own files leave out, the epoch and the logs. A run that is killed while it writes leaves
    the epoch before. Resuming is exact, to float tolerance, if the order of the data is a function
    of the epoch, as in `ibnn.data.ShuffledBatches`. Callbacks such as ReduceLROnPlateau begin anew.

    Args:
        path: of the file, ending in `.npz`. Its folder must exist.

    Example:
        The same lines begin a run and resume it:

            batches = ibnn.data.ShuffledBatches(x, y, 128, seed=0)
            checkpoint = ibnn.Checkpoint("run/checkpoint.npz")
            model.compile(...)
            done = checkpoint.restore(model)
            callbacks = [batches.follow(), checkpoint]
            model.fit(batches, shuffle=False, epochs=50, initial_epoch=done, callbacks=callbacks)
    """

    def __init__(self, path: str | os.PathLike) -> None:
        super().__init__()
        self.path = Path(path)
        if self.path.suffix != ".npz":
            raise ValueError(f"`path` must end in .npz; got {str(path)!r}.")
        self.logs: list[dict[str, float]] = []  # of all epochs, over all parts of a run

    def restore(self, model: keras.Model) -> int:
        """Load the file, if it exists, into a compiled model.

        Args:
            model: a built and compiled model, such as the one that was saved.

        Returns:
            How many epochs are done; 0 without a file.

        Raises:
            CheckpointError: If the file is damaged, or of another model. The model is then as it
                was.
        """
        epochs, pairs = self.read(model)
        for variable, value in pairs:
            variable.assign(value)
        return epochs

    def read(self, model: keras.Model) -> tuple[int, list[tuple[keras.Variable, np.ndarray]]]:
        """Return how many epochs are done, and what `restore` would assign."""
        if not self.path.exists():
            return 0, []
        variables = _variables(model)
        saved = self._read_file()
        pairs = []
        for part in _PARTS:
            self._check_shapes(part, variables[part], saved.values[part])
            pairs += zip(variables[part], saved.values[part], strict=True)
        for variable, value in pairs:
            if not fits(value, keras.backend.standardize_dtype(variable.dtype)):
                raise CheckpointError(
                    f"{self.path} belongs to another run: {variable.path} is {variable.dtype}, and "
                    f"saved as {value.dtype}."
                )
        self.logs = saved.logs
        return saved.epochs, pairs

    def _read_file(self) -> _Saved:
        """Return what the file holds, or raise."""
        try:
            return _load(self.path)
        except Exception as error:  # broken bytes make numpy and zipfile raise nearly anything
            text = " ".join(str(error).split())
            raise CheckpointError(
                f"{self.path} is not a whole checkpoint ({type(error).__name__}: {text}). Delete "
                "it to begin again."
            ) from error

    def _check_shapes(
        self, part: str, variables: list[keras.Variable], values: list[np.ndarray]
    ) -> None:
        """Raise if values are not those of the variables of a part, by number and shapes."""
        shapes = [tuple(variable.shape) for variable in variables]
        if shapes != [value.shape for value in values]:
            raise CheckpointError(
                f"{self.path} belongs to another run: its {part} has {len(values)} variables of "
                f"other shapes than the {len(shapes)} here."
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        finite = {}
        for name, value in (logs or {}).items():
            if math.isfinite(value):  # JSON has no NaN
                finite[name] = float(value)
        self.logs = [*self.logs[:epoch], finite]
        record: dict[str, Any] = {"epochs": epoch + 1, "logs": self.logs}
        values = {}
        arrays = {}
        for part, variables in _variables(self.model).items():
            values[part] = [storable(variable) for variable in variables]
            record[part] = len(variables)
            arrays |= {f"{part}/{number}": value for number, value in enumerate(values[part])}
        record["sha256"] = _digest(record, values)
        with files.replacing(self.path) as temporary:
            np.savez(temporary, record=np.array(json.dumps(record)), **arrays)


def _load(path: Path) -> _Saved:
    """Return what a file holds; raise anything where it is damaged."""
    values = {}
    with np.load(path, allow_pickle=False) as file:
        record = json.loads(str(file["record"]))
        for part in _PARTS:
            values[part] = [file[f"{part}/{number}"] for number in range(record[part])]
    saved = _Saved(checks.whole("epochs", record["epochs"]), list(record["logs"]), values)
    digest = record.pop("sha256", None)  # files of earlier versions have none
    if digest not in (None, _digest(record, values)):
        raise ValueError("its SHA-256 is another")
    return saved


def _variables(model: keras.Model) -> dict[str, list[keras.Variable]]:
    """Return the variables of a compiled model, by `_PARTS`."""
    if getattr(model, "optimizer", None) is None:
        raise ValueError(f"Model {model.name!r} must be compiled before a checkpoint is restored.")
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return {"model": model.variables, "optimizer": model.optimizer.variables}


def _digest(record: dict[str, Any], values: dict[str, list[np.ndarray]]) -> str:
    """Return the SHA-256 of what a file holds, as text."""
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
    for part in _PARTS:
        for value in values[part]:
            if not isinstance(value, np.ndarray):  # of what is none, numpy gives the bytes
                raise ValueError("a part of it is not an array")
            digest.update(f"{value.dtype.str} {value.shape}".encode())
            digest.update(value.tobytes())
    return digest.hexdigest()
