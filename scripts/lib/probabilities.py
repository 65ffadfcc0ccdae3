"""Scores of class probabilities (examples, classes), and temperatures for them."""

import numpy as np
from scipy import optimize

LEAST = 1e-30


def nll(probabilities, y):
    """Return the mean of minus the log-probability of the labels, in nats."""
    of_labels = probabilities[np.arange(len(y)), y]
    return float(-np.mean(np.log(np.maximum(of_labels, LEAST))))


def entropy(probabilities):
    """Return the entropy of each prediction, in nats."""
    return -np.sum(probabilities * np.log(np.maximum(probabilities, LEAST)), axis=-1)


def scaled(probabilities, temperature):
    """Return the probabilities whose logits are divided by a temperature."""
    powers = np.maximum(probabilities, LEAST) ** (1 / temperature)
    return powers / powers.sum(axis=-1, keepdims=True)


def best_temperature(probabilities, y):
    """Return the temperature of the least NLL, between exp(-2) and exp(3)."""
    found = optimize.minimize_scalar(
        lambda log: nll(scaled(probabilities, np.exp(log)), y), bounds=(-2, 3), method="bounded"
    )
    return float(np.exp(found.x))
