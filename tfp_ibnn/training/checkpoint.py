"""Checkpoints from which a run resumes as if it had never stopped."""

import hashlib
import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfp_ibnn._core import checks, files
from tfp_ibnn._core.serialization import fits, storable


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read, or that belongs to another model."""


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
            done, callbacks = checkpoint.restore(model), [batches.follow(), checkpoint]
            model.fit(batches, shuffle=False, epochs=50, initial_epoch=done, callbacks=callbacks)
    """

    def __init__(self, path: str | os.PathLike) -> None:
        super().__init__()
        self.path = Path(path)
        if self.path.suffix != ".npz":
            raise ValueError(f"`path` must end in .npz; got {str(path)!r}.")
        self.logs: list[dict[str, float]] = []  # of all epochs, over all parts of a run

    def restore(self, model: keras.Model) -> int:
        """Load the file, if it exists, into a compiled model; return how many epochs are done."""
        epochs, values = self.read(model)
        for variable, value in values:
            variable.assign(value)
        return epochs

    def read(self, model: keras.Model) -> tuple[int, list[tuple[keras.Variable, np.ndarray]]]:
        """Return how many epochs are done, and what `restore` would assign."""
        if not self.path.exists():
            return 0, []
        own = _parts(model)
        try:
            with np.load(self.path, allow_pickle=False) as file:
                record = json.loads(str(file["record"]))
                saved = {p: [file[f"{p}/{i}"] for i in range(record[p])] for p in own}
            epochs, logs = checks.whole("epochs", record["epochs"]), list(record["logs"])
            # Files of earlier versions have none.
            if record.pop("sha256", None) not in (None, _digest(record, saved)):
                raise ValueError("its SHA-256 is another")
        except Exception as error:  # broken bytes make numpy and zipfile raise nearly anything
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            problem = f"{self.path} is not a whole checkpoint ({reason})"
            raise CheckpointError(f"{problem}. Delete it to begin again.") from error
        pairs, other = [], f"{self.path} belongs to another run: "
        for part, variables in own.items():
            shapes = [tuple(variable.shape) for variable in variables]
            if shapes != [value.shape for value in saved[part]]:
                counts = f"{len(saved[part])} variables of other shapes than the {len(shapes)} here"
                raise CheckpointError(f"{other}its {part} has {counts}.")
            pairs += zip(variables, saved[part], strict=True)
        for variable, value in pairs:
            if not fits(value, keras.backend.standardize_dtype(variable.dtype)):
                types = f"is {variable.dtype}, and saved as {value.dtype}"
                raise CheckpointError(f"{other}{variable.path} {types}.")
        self.logs = logs
        return epochs, pairs

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # JSON has no NaN: what is not finite is left out.
        finite = {key: float(x) for key, x in (logs or {}).items() if math.isfinite(x)}
        self.logs = [*self.logs[:epoch], finite]
        parts = {part: list(map(storable, own)) for part, own in _parts(self.model).items()}
        record = {"epochs": epoch + 1, "logs": self.logs, **{p: len(x) for p, x in parts.items()}}
        record["sha256"] = _digest(record, parts)
        arrays = {f"{p}/{i}": x for p, values in parts.items() for i, x in enumerate(values)}
        with files.replacing(self.path) as temporary:
            np.savez(temporary, record=np.array(json.dumps(record)), **arrays)


def _parts(model: keras.Model) -> dict[str, list[keras.Variable]]:
    if getattr(model, "optimizer", None) is None:
        raise ValueError(f"Model {model.name!r} must be compiled before a checkpoint is restored.")
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return {"model": model.variables, "optimizer": model.optimizer.variables}


def _digest(record: dict[str, Any], parts: dict[str, list[np.ndarray]]) -> str:
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
    for value in itertools.chain(*parts.values()):
        if not isinstance(value, np.ndarray):  # of what is none, numpy gives the bytes
            raise ValueError("a part of it is not an array")
        digest.update(f"{value.dtype.str} {value.shape}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()
