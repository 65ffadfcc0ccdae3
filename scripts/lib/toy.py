"""Four Gaussian clusters in the plane: a problem whose best possible answer is known.

Three clusters belong to class 0; the fourth, class 1, lies between them. All are round, of one
width, and equally frequent, so Bayes' rule gives the true class probabilities, which no classifier
can beat. The places are such that the best accuracy is the original report's, 95.3 %.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import entr, softmax

from lib import checks

CENTRES = np.array([[-2.0, 0.0], [2.0, 0.0], [0.0, 2.4], [0.0, -0.2]])
"""The means of the clusters, (4, 2)."""
CLASSES = np.array([0, 0, 0, 1])
"""The class of each cluster, (4,)."""
SCALE = 0.58
"""The standard deviation of every cluster, in every direction."""
CENTRES.setflags(write=False)
CLASSES.setflags(write=False)


def sample(size: int, seed: int | Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Draw points, float32 (size, 2), and their classes, integers (size,), by a seed of NumPy.

    Example:
        >>> from lib import toy
        >>> x, y = toy.sample(1000, seed=0)
        >>> x.shape, round(float(y.mean()), 3)
        ((1000, 2), 0.263)
    """
    size = checks.KINDS["count"]("size", size)
    random = np.random.default_rng(seed)
    cluster = random.integers(len(CENTRES), size=size)
    points = CENTRES[cluster] + SCALE * random.standard_normal((size, 2))
    return points.astype("float32"), CLASSES[cluster]


def true_probabilities(points: Any) -> np.ndarray:
    """Return the true probability of each class at points (..., 2), by Bayes' rule, (..., 2).

    p(class | x) is proportional to the sum of exp(-|x - c|^2 / 2 SCALE^2) over its centres c.

    Example:
        >>> from lib import toy
        >>> toy.true_probabilities([[0.0, -0.2], [1.0, -0.1]]).round(3).tolist()
        [[0.005, 0.995], [0.5, 0.5]]
    """
    points = np.asarray(points, dtype="float64")
    if points.ndim < 1 or points.shape[-1] != 2:
        raise ValueError(f"`points` must have the shape (..., 2); got the shape {points.shape}.")
    distance = np.square(points[..., None, :] - CENTRES).sum(axis=-1)
    # Not the densities: far from all clusters they underflow to 0 / 0.
    cluster = softmax(-distance / (2 * SCALE**2), axis=-1)
    return np.stack([cluster[..., CLASSES == k].sum(axis=-1) for k in (0, 1)], axis=-1)


def bayes_scores(step: float = 0.02) -> dict[str, float]:
    """Return the expected accuracy, NLL and Brier score of Bayes' rule; its ECE is 0.

    They are integrals over a grid of the plane; half the `step` changes none of them by 1e-6.

    Example:
        >>> from lib import toy
        >>> {name: round(value, 4) for name, value in toy.bayes_scores().items()}
        {'accuracy': 0.9534, 'nll': 0.119, 'brier': 0.0694}
    """
    step = checks.KINDS["positive"]("step", step)
    low, high = CENTRES.min(axis=0) - 7 * SCALE, CENTRES.max(axis=0) + 7 * SCALE
    across, up = (np.arange(a, b + step, step) for a, b in zip(low, high, strict=True))
    points = np.stack(np.meshgrid(across, up), axis=-1)
    square = np.square((points[..., None, :] - CENTRES) / SCALE).sum(axis=-1)
    weight = np.exp(-square / 2).mean(axis=-1) * step**2 / (2 * np.pi * SCALE**2)
    p = true_probabilities(points)
    scores = {"accuracy": p.max(-1), "nll": entr(p).sum(-1), "brier": 1 - np.square(p).sum(-1)}
    return {name: float(np.sum(weight * score)) for name, score in scores.items()}
