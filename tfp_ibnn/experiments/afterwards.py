"""What finished predictions give without more training: a temperature, and averages over seeds."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfp_ibnn.experiments.scoring import Scores
from tfp_ibnn.experiments.summary import SCORES
from tfp_ibnn.prediction import TemperatureScaling

__all__ = ["averaged", "crosswise", "folder_of", "predictions", "scaled"]

Row = dict[str, Any]


def scaled(
    rows: Sequence[Row], runs: str | os.PathLike, held_out: Mapping[str, str | os.PathLike]
) -> list[Row]:
    """Return the scores of each run when its predictions have a temperature.

    Args:
        rows: one a run.
        runs: the folder of the runs.
        held_out: the folder of a run of each method that was scored on images which it had not
            seen. Its temperature is that of all runs of the method; others are left out.
    """
    found = []
    for method, folder in held_out.items():
        model = _temperature(*predictions(folder))
        for row in rows:
            if row["method"] == method:
                mean, labels = predictions(folder_of(row, runs))
                scores = _scores(_predict(model, mean), labels)
                found.append(_scaled(row, float(model.temperature), False, scores))
    return found


def crosswise(rows: Sequence[Row], runs: str | os.PathLike) -> list[Row]:
    """Return the scores of each run when halves of its predictions have each other's temperature.

    That is for methods without a run on held-out images: every second test image is scored at the
    temperature fitted to the others, and these at the temperature fitted to those.

    Args:
        rows: one a run.
        runs: the folder of the runs.
    """
    found = []
    for row in rows:
        mean, labels = predictions(folder_of(row, runs))
        at_temperature, temperatures = np.empty_like(mean), []
        for mine in (0, 1):
            model = _temperature(mean[1 - mine :: 2], labels[1 - mine :: 2])
            temperatures.append(float(model.temperature))
            at_temperature[mine::2] = _predict(model, mean[mine::2])
        scores = _scores(at_temperature, labels)
        found.append(_scaled(row, float(np.mean(temperatures)), True, scores))
    return found


def averaged(
    rows: Sequence[Row], predictions_of: Callable[[Row], tuple[np.ndarray, np.ndarray]]
) -> list[Row]:
    """Return the scores of each method's ensemble: the mean prediction of its seeds.

    Args:
        rows: one a run.
        predictions_of: gives the class probabilities of a run, (images, classes), and the labels.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["budget"], row["method"]), []).append(row)
    found = []
    for (budget, method), group in groups.items():
        if len(group) > 1:
            each = [predictions_of(row) for row in group]
            scores = _scores(np.mean([mean for mean, _ in each], axis=0), each[0][1])
            seeds = [row["seed"] for row in group]
            found.append({"budget": budget, "method": method, "seeds": seeds, **scores})
    return found


def folder_of(row: Row, runs: str | os.PathLike) -> Path:
    """Return the folder of a run."""
    return Path(runs) / row["budget"] / row["dataset"] / row["method"] / f"seed{row['seed']}"


def predictions(folder: str | os.PathLike) -> tuple[np.ndarray, np.ndarray]:
    """Return the class probabilities of a finished run, (images, classes), and the labels."""
    with np.load(Path(folder) / "probabilities.npz") as found:
        return found["probabilities"].astype("float64"), found["labels"].astype("int32")


def _temperature(mean: np.ndarray, labels: np.ndarray) -> TemperatureScaling:
    return TemperatureScaling(_as_they_are(mean), from_logits=False).fit(mean, labels)


def _predict(model: keras.Model, mean: np.ndarray) -> np.ndarray:
    return keras.ops.convert_to_numpy(model(mean))


def _scaled(row: Row, temperature: float, crosswise: bool, scores: Row) -> Row:
    known = {key: row[key] for key in ("budget", "method", "seed")}
    return {**known, "temperature": temperature, "crosswise": crosswise, **scores}


def _as_they_are(probabilities: np.ndarray) -> keras.Model:
    """Return a classifier that takes predictions for its inputs."""
    inputs = keras.Input(probabilities.shape[1:])
    return keras.Model(inputs, keras.layers.Identity()(inputs))


def _scores(mean: np.ndarray, labels: np.ndarray) -> Row:
    found = Scores(mean, np.zeros(len(mean)), labels, 1).summary()
    return {key: found[key] for key in SCORES}
