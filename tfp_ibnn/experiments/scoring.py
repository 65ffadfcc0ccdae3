"""Scores of a model on labelled images."""

import dataclasses
import os
from typing import Any

import keras
import numpy as np
from scipy.special import entr, softmax

from tfp_ibnn import metrics
from tfp_ibnn._core.keras_internals import nested_layers
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.prediction.dropout import DROPOUTS
from tfp_ibnn.prediction.export import export
from tfp_ibnn.prediction.monte_carlo import MonteCarlo

__all__ = ["Scorer", "Scores"]

_BATCH = 500


@dataclasses.dataclass(frozen=True)
class Scores:
    """Predictions for labelled examples, and how good they are."""

    mean: np.ndarray
    """Class probabilities, (examples, classes)."""
    epistemic: np.ndarray
    """What the draws disagree about, in nats, (examples,); zeros for a deterministic model."""
    labels: np.ndarray
    samples: int

    def summary(self) -> dict[str, Any]:
        """Return accuracy, NLL, Brier score and ECE, with the number of samples behind them."""
        return {
            "accuracy": float(np.mean(self.mean.argmax(axis=-1) == self.labels)),
            "nll": float(metrics.negative_log_likelihood(self.mean, self.labels)),
            "brier": float(metrics.brier_score(self.mean, self.labels)),
            "ece": float(metrics.expected_calibration_error(self.mean, self.labels)),
            "samples": self.samples,
        }

    def line(self) -> str:
        """Return the scores as a line of text."""
        found = self.summary()
        return (
            f"accuracy {found['accuracy']:.4f}, NLL {found['nll']:.4f}, Brier {found['brier']:.4f},"
            f" ECE {found['ece']:.4f} ({len(self.labels):,} images, {self.samples} draws)"
        )

    @property
    def entropy(self) -> np.ndarray:
        """The total uncertainty, in nats, (examples,)."""
        return entr(self.mean).sum(axis=-1)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return probabilities and labels in a small form, from which any score can be had."""
        return {
            "probabilities": self.mean.astype("float32"),
            "epistemic": self.epistemic.astype("float16"),
            "labels": self.labels.astype("uint8"),
        }


class Scorer:
    """Scores a model of logits, as often as wanted while it trains.

    A stochastic model is averaged over its posterior, a deterministic one with dropout layers over
    dropout; any other is taken as it is.

    Args:
        model: with logits as its output.
        samples: draws, where the model has any.
        seed: of the draws.
    """

    def __init__(self, model: keras.Model, samples: int, seed: int = 0) -> None:
        self.model = model
        self.monte_carlo: MonteCarlo | None = None
        """What averages the draws, or None if there are none."""
        drops = any(isinstance(part, DROPOUTS) and part.rate for part in nested_layers(model))
        if drops or stochastic_layers(model):
            only_dropout = not stochastic_layers(model)
            self.monte_carlo = MonteCarlo(model, samples, seed=seed, dropout=only_dropout)

    def score(self, images: np.ndarray, labels: np.ndarray) -> Scores:
        """Predict images and compare with their labels."""
        if self.monte_carlo is None:
            logits = self.model.predict(images, batch_size=_BATCH, verbose=0).astype("float64")
            return Scores(softmax(logits, axis=-1), np.zeros(len(images)), labels, 1)
        found = self.monte_carlo.predict(images, batch_size=_BATCH, verbose=0)
        return Scores(found["mean"], found["epistemic"], labels, self.monte_carlo.samples)

    def export(self, path: str | os.PathLike, overwrite: bool = False) -> None:
        """Write what is scored as a SavedModel, see `ibnn.export`; the backend is TensorFlow."""
        export(self.monte_carlo or MonteCarlo(self.model, samples=1), path, overwrite=overwrite)
