"""A model that a run has saved, and what the run says of it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from tfp_ibnn import data
from tfp_ibnn._core import backend
from tfp_ibnn.conversion.outputs import activation_of
from tfp_ibnn.experiments.folder import RunError, read_record

__all__ = ["read_model", "trained_on"]


def read_model(path: Path, dataset: str, classes: int | None = None) -> keras.Model:
    """Return a saved classifier of a dataset's images, ready to be scored, or raise RunError.

    Args:
        path: of the `.keras` file.
        dataset: whose images it takes.
        classes: number of the first classes that it knows; None is all.
    """
    if not path.is_file():
        raise RunError(f"The model {path} does not exist.")
    try:
        model = keras.saving.load_model(path, compile=False)
    except Exception as error:  # broken bytes make Keras, zipfile and HDF5 raise nearly anything
        reason = [*str(error).strip().splitlines(), type(error).__name__][0]
        raise RunError(f"The model {path} cannot be read: {reason}") from error
    known = data.DATASETS[dataset]
    expected = [(None, *known.image_shape)], [(None, classes or len(known.classes))]
    shapes = [
        [tuple(part.shape) for part in getattr(model, side, None) or []]
        for side in ("inputs", "outputs")
    ]
    if shapes != list(expected):
        raise RunError(
            f"The model {path} does not fit {dataset}: it maps {_shapes(shapes[0])} to "
            f"{_shapes(shapes[1])}, not {_shapes(expected[0])} to {_shapes(expected[1])}."
        )
    if (activation := activation_of(model)) in ("softmax", "sigmoid", "log_softmax"):
        raise RunError(f"The model {path} must return logits; it ends in a {activation}.")
    # Compiled for its loss, which says that the output is logits. Its optimizer is not needed.
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=backend.jit_pays(),
    )
    return model


def trained_on(model: str | os.PathLike) -> dict[str, Any]:
    """Return the dataset that a model was trained on, by the `settings.json` beside it.

    Along with `dataset` comes `classes`, if it knows only some.
    """
    path = Path(model).with_name("settings.json")
    if not Path(model).exists():
        raise RunError(f"The model {model} does not exist.")
    if not path.exists():
        raise RunError(f"There is no {path} that names the dataset of the model: say --dataset.")
    record = read_record(path)
    name = record.get("dataset")
    if name not in data.DATASETS:
        raise RunError(f"{path} names no known dataset ({name!r}): say --dataset.")
    return {key: record[key] for key in ("dataset", "classes") if record.get(key) is not None}


def _shapes(shapes: Sequence[tuple[int | None, ...]]) -> str:
    return " and ".join(str(shape[1:]) for shape in shapes) or "something unknown"
