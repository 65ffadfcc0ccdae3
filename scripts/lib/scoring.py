"""Scores of a model on labelled images, and models that a run has saved."""

import dataclasses
from pathlib import Path

import keras
import numpy as np
from scipy.special import entr, softmax

import tfp_ibnn as ibnn
from lib.folder import RunError, read_record
from lib.settings import DATASETS

# What every run has, and how tables call it; and the OOD images of the model's own dataset.
SCORES = {"accuracy": "accuracy", "nll": "NLL", "brier": "Brier", "ece": "ECE"}
HELD_OUT = "held-out classes"
_BATCH = 500
_DROPOUTS = ("Dropout", "Dropout1D", "Dropout2D", "Dropout3D")


@dataclasses.dataclass(frozen=True)
class Scores:
    """Predictions for labelled examples, and how good they are."""

    mean: np.ndarray  # class probabilities, (examples, classes)
    epistemic: np.ndarray  # what the draws disagree about, in nats, (examples,)
    labels: np.ndarray
    samples: int

    def scores(self):
        metrics = ibnn.metrics
        scores = {"nll": metrics.negative_log_likelihood, "brier": metrics.brier_score}
        scores["ece"] = metrics.expected_calibration_error
        accuracy = float(np.mean(self.mean.argmax(axis=-1) == self.labels))
        found = {name: float(score(self.mean, self.labels)) for name, score in scores.items()}
        return {"accuracy": accuracy, **found}

    def summary(self):
        """Return the scores, with the number of samples behind them."""
        return {**self.scores(), "samples": self.samples}

    def line(self):
        scores = ", ".join(f"{SCORES[key]} {value:.4f}" for key, value in self.scores().items())
        return f"{scores} ({len(self.labels):,} images, {self.samples} draws)"

    @property
    def entropy(self):
        return entr(self.mean).sum(axis=-1)

    def arrays(self):
        """Return probabilities and labels in a small form, from which any score can be computed."""
        small = {"epistemic": self.epistemic.astype("float16")}
        small["probabilities"] = self.mean.astype("float32")
        return {**small, "labels": self.labels.astype("uint8")}


class Scorer:
    """Scores a model of logits, as often as wanted while it trains.

    A stochastic model is averaged over its posterior, a deterministic one with dropout layers over
    dropout, by `monte_carlo`; any other is taken as it is, and `monte_carlo` is None.
    """

    def __init__(self, model, samples, seed=0):
        self.model, self.monte_carlo = model, None
        is_stochastic = bool(ibnn.stochastic_layers(model))
        if is_stochastic or _has_dropout(model):
            options = {"seed": seed, "dropout": not is_stochastic}
            self.monte_carlo = ibnn.MonteCarlo(model, samples, **options)

    def score(self, images, labels):
        # Points are small, and many.
        options = {"batch_size": 10_000 if np.ndim(images) == 2 else _BATCH, "verbose": 0}
        if self.monte_carlo is None:
            logits = self.model.predict(images, **options).astype("float64")
            return Scores(softmax(logits, axis=-1), np.zeros(len(images)), labels, 1)
        found = self.monte_carlo.predict(images, **options)
        return Scores(found["mean"], found["epistemic"], labels, self.monte_carlo.samples)

    def draws(self, images):
        """Return the class probabilities of each draw, (images, draws, classes)."""
        if self.monte_carlo is None:
            return self.score(images, None).mean[:, None]
        options = {**self.monte_carlo.options(), "return_samples": True}
        return ibnn.MonteCarlo(self.model, **options).predict(images, verbose=0)["samples"]

    def export(self, path, overwrite=False):
        """Write what is scored as a SavedModel, see `ibnn.export`; the backend is TensorFlow."""
        average = self.monte_carlo or ibnn.MonteCarlo(self.model, samples=1)
        ibnn.export(average, path, overwrite=overwrite)


def _has_dropout(layer):
    """Whether a model, or one inside of it, has a dropout layer with a rate above 0."""
    inner = [*getattr(layer, "layers", ()), getattr(layer, "layer", None)]
    drops = type(layer).__name__.endswith(_DROPOUTS) and getattr(layer, "rate", 0) > 0
    return drops or any(_has_dropout(part) for part in inner if part is not None)


def read_model(path, dataset, classes=None):
    """Return a saved classifier of a dataset's images, ready to be scored, or raise RunError."""
    if not path.is_file():
        raise RunError(f"The model {path} does not exist.")
    try:
        model = keras.saving.load_model(path, compile=False)
    except Exception as error:  # broken bytes make Keras, zipfile and HDF5 raise nearly anything
        reason = [*str(error).strip().splitlines(), type(error).__name__][0]
        raise RunError(f"The model {path} cannot be read: {reason}") from error
    known = DATASETS[dataset]
    wanted = f"{known.image_shape} to {(classes or len(known.classes),)}"
    sides = [getattr(model, side, None) or [] for side in ("inputs", "outputs")]
    shapes = [" and ".join(str(tuple(part.shape)[1:]) for part in side) for side in sides]
    if (found := " to ".join(shape or "something unknown" for shape in shapes)) != wanted:
        raise RunError(f"The model {path} does not fit {dataset}: it maps {found}, not {wanted}.")
    last = getattr(model.layers[-1], "layer", model.layers[-1])  # inside of a wrapper
    kind = "softmax" if isinstance(last, keras.layers.Softmax) else None
    kind = kind or getattr(getattr(last, "activation", None), "__name__", None)
    if kind in ("softmax", "sigmoid", "log_softmax"):
        raise RunError(f"The model {path} must return logits; it ends in a {kind}.")
    # Compiled for its loss, which says that the output is logits. Its optimizer is not needed.
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def trained_on(model):
    """Return the `dataset` and the `classes`, if only some, of a model, by the settings beside."""
    path = Path(model).with_name("settings.json")
    if not Path(model).exists():
        raise RunError(f"The model {model} does not exist.")
    if not path.exists():
        raise RunError(f"No {path} names the dataset of the model: give --dataset.")
    record = read_record(path)
    if record.get("dataset") not in DATASETS:
        raise RunError(
            f"{path} names no known dataset ({record.get('dataset')!r}): give --dataset."
        )
    return {key: record[key] for key in ("dataset", "classes") if record.get(key) is not None}
