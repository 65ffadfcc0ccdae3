"""Independent answers, by numpy and in float64: what predictions, scores and losses must be."""

from typing import Any

import numpy as np
from scipy import special, stats

__all__ = [
    "gaussian_kl",
    "interval_mass",
    "losses_of",
    "normal_kl",
    "scale",
    "scores",
    "statistics",
]

BINS = 15


def _entropy(p: np.ndarray) -> np.ndarray:
    return special.entr(p).sum(axis=-1)


def _of_classes(p: np.ndarray) -> dict[str, np.ndarray]:
    """Return the statistics of class probabilities (draws, ..., classes)."""
    mean = p.mean(axis=0)
    aleatoric = _entropy(p).mean(axis=0)
    variance = p.var(axis=0)
    return {
        "mean": mean,
        "variance": variance,
        "total_variance": variance.sum(axis=-1),
        "entropy": _entropy(mean),
        "aleatoric": aleatoric,
        "epistemic": special.rel_entr(p, mean).sum(axis=-1).mean(axis=0),
    }


def _of_labels(yes: np.ndarray) -> dict[str, np.ndarray]:
    both = np.stack([1 - yes, yes], axis=-1)
    found = _of_classes(both)
    own = {"mean": yes.mean(axis=0), "variance": yes.var(axis=0), "total_variance": yes.var(axis=0)}
    return {**found, **own}


def _of_numbers(loc: np.ndarray, variance: np.ndarray) -> dict[str, np.ndarray]:
    aleatoric, epistemic = variance.mean(axis=0), loc.var(axis=0)
    return {
        "mean": loc.mean(axis=0),
        "aleatoric": aleatoric,
        "epistemic": epistemic,
        "total_variance": aleatoric + epistemic,
    }


def public_draws(draws: np.ndarray, kind: str, from_logits: Any) -> np.ndarray:
    """Return outputs as probabilities or numbers, less the standard deviations."""
    if kind == "softmax":
        return special.softmax(draws, axis=-1) if from_logits else draws
    if kind == "sigmoid":
        return special.expit(draws) if from_logits else draws
    return np.split(draws, 2, axis=-1)[0] if kind == "gaussian" else draws


def statistics(draws: np.ndarray, kind: str, from_logits: Any) -> dict[str, np.ndarray]:
    """Return what `MonteCarlo` predicts from the outputs (draws, examples, ...) of all draws."""
    public = public_draws(draws, kind, from_logits)
    if kind == "softmax":
        found = _of_classes(public)
    elif kind == "sigmoid":
        found = _of_labels(public)
    else:
        scale = np.split(draws, 2, axis=-1)[1] if kind == "gaussian" else np.zeros_like(draws)
        found = _of_numbers(public, scale**2)
    found["samples"] = np.moveaxis(public, 0, 1)
    if len(draws) > 1:
        found["standard_error"] = public.std(axis=0, ddof=1) / len(draws) ** 0.5
    return found


def quantiles(draws: np.ndarray, kind: str, from_logits: Any, level: float) -> list[np.ndarray]:
    """Return the ends of the central interval of the draws."""
    ends = [(1 - level) / 2, (1 + level) / 2]
    return list(np.quantile(public_draws(draws, kind, from_logits), ends, axis=0))


def interval_mass(draws: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the share of Gaussians (draws, ..., 2 D) that lies below ends (..., D)."""
    loc, scale = np.split(draws, 2, axis=-1)
    return stats.norm.cdf(ends, loc, scale).mean(axis=0)


def losses_of(kind: str, y: np.ndarray, found: dict[str, np.ndarray]) -> np.ndarray:
    """Return the loss of each example or position, of a prediction by `MonteCarlo`."""
    mean = found["mean"]
    if kind == "softmax":
        return -_log(np.take_along_axis(mean, y[..., None], axis=-1))[..., 0]
    if kind == "sigmoid":
        return -_log(np.where(y > 0.5, mean, 1 - mean))
    if kind == "gaussian":
        variance = found["total_variance"]
        return -stats.norm.logpdf(y, mean, np.sqrt(variance)).sum(axis=-1)
    return np.square(y - mean).mean(axis=-1)


def _log(p: np.ndarray) -> np.ndarray:
    """Return the logarithm, for a probability of 0 that of the smallest number, as a score has."""
    return np.log(np.maximum(p, np.finfo(p.dtype).tiny))


def scores(
    kind: str, y: np.ndarray, found: dict[str, np.ndarray], weight: np.ndarray
) -> dict[str, float]:
    """Return the scores of `MonteCarlo.evaluate`; weights (examples, ...) are of each position."""
    losses, mean = losses_of(kind, y, found), found["mean"]
    weight = np.broadcast_to(
        np.reshape(weight, weight.shape + (1,) * (losses.ndim - weight.ndim)), losses.shape
    )
    if kind == "point":
        return {"rmse": np.average(losses, weights=weight) ** 0.5}
    result = {"nll": np.average(losses, weights=weight)}
    if kind == "gaussian":
        squares = np.square(y - mean).mean(axis=-1)
        return {**result, "rmse": np.average(squares, weights=weight) ** 0.5}
    if kind == "softmax":
        p, labels = mean.reshape(-1, mean.shape[-1]), y.reshape(-1)
    else:
        p, labels = np.stack([1 - mean, mean], axis=-1).reshape(-1, 2), y.reshape(-1).astype(int)
    return {**result, **_class_scores(p, labels, weight.reshape(-1))}


def _class_scores(p: np.ndarray, labels: np.ndarray, weight: np.ndarray) -> dict[str, float]:
    right = p.argmax(axis=-1) == labels
    squares = np.square(p - np.eye(p.shape[-1])[labels]).sum(axis=-1)
    confidence = p.max(axis=-1)
    # In float32 a third is on an edge as well.
    edges = (np.arange(1, BINS) / BINS).astype("float32")
    which = np.searchsorted(edges, confidence.astype("float32"), side="left")
    gaps = np.bincount(which, weight * (right - confidence), BINS)
    return {
        "accuracy": np.average(right, weights=weight),
        "brier": np.average(squares, weights=weight),
        "ece": np.abs(gaps).sum() / weight.sum(),
    }


def scale(raw: np.ndarray) -> np.ndarray:
    """Return the standard deviations that posteriors have for their parameters."""
    return 1e-6 + np.logaddexp(0, raw)


def normal_kl(loc: np.ndarray, scale: np.ndarray, prior_loc: Any, prior_scale: Any) -> np.ndarray:
    """Return KL[N(loc, scale^2) || N(prior_loc, prior_scale^2)] of each number."""
    ratio = scale / prior_scale
    return 0.5 * (ratio**2 + ((loc - prior_loc) / prior_scale) ** 2 - 1) - np.log(ratio)


def gaussian_kl(
    loc: np.ndarray, covariance: np.ndarray, prior_loc: float, prior_scale: float
) -> float:
    """Return KL[N(loc, covariance) || N(prior_loc, prior_scale^2)] of a vector."""
    size, variance = len(loc), prior_scale**2
    trace, distance = np.trace(covariance) / variance, np.sum((loc - prior_loc) ** 2) / variance
    log_det = size * np.log(variance) - np.linalg.slogdet(covariance)[1]
    return 0.5 * (trace + distance - size + log_det)
