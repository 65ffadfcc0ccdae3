"""MC dropout at a tuned rate: what a practitioner may try before anything else."""

from contextlib import contextmanager

import keras
import numpy as np

import tfp_ibnn as ibnn
from lib.probabilities import best_temperature, nll, scaled
from tfp_ibnn.prediction.dropout import DROPOUTS

NAME = "MC dropout at a tuned rate + temperature"
FACTORS = (0.5, 1.0, 1.5)
"""What all rates of a network are multiplied by."""
MOST = 0.9
"""The largest rate."""


def tuned_dropout(model, validation, test, samples, seed):
    """Return the scores on test data, with the rate and temperature that suit validation data.

    Args:
        model: a trained classifier; without dropout layers there are no scores, an empty dict.
        validation: (x, y), on which rate and temperature are chosen together.
        test: (x, y).
        samples: number of draws.
        seed: of the draws.
    """
    if not dropout_layers(model):
        return {}
    trials = []
    for factor in FACTORS:
        with rates_times(model, factor):
            averaged = ibnn.MonteCarlo(model, samples=samples, dropout=True, seed=seed)
            held = probabilities(averaged, *validation)
            temperature = best_temperature(*held)
            score = nll(scaled(held[0], temperature), held[1])
            trials.append((score, factor, temperature, probabilities(averaged, *test)))
    _, factor, temperature, (p, y) = min(trials, key=lambda trial: trial[0])
    p = scaled(p, temperature)
    return {
        "accuracy": float(np.mean(p.argmax(-1) == y)),
        "NLL": nll(p, y),
        "ECE": float(ibnn.metrics.expected_calibration_error(p, y)),
        "T": temperature,
        "factor": factor,
        "passes": float(samples),
        "trainings": 0.0,
    }


def dropout_layers(model):
    """Return the dropout layers of a model, those of models inside it included."""
    found = []
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            found += dropout_layers(layer)
        elif isinstance(layer, DROPOUTS):
            found.append(layer)
    return found


@contextmanager
def rates_times(model, factor):
    """Multiply the rates of a model's dropout layers, and restore them."""
    layers = dropout_layers(model)
    rates = [layer.rate for layer in layers]
    for layer, rate in zip(layers, rates, strict=True):
        layer.rate = min(MOST, factor * rate)
    try:
        yield
    finally:
        for layer, rate in zip(layers, rates, strict=True):
            layer.rate = rate


def probabilities(averaged, x, y):
    """Return the mean probabilities (rows, classes) and the labels (rows,) of all positions."""
    p = averaged.predict(x, batch_size=250, verbose=0)["mean"].astype("float64")
    return p.reshape(-1, p.shape[-1]), np.ravel(y)
