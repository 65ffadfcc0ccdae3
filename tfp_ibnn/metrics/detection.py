"""What an uncertainty, such as the entropy, is for: detecting unknown inputs, and abstaining."""

from typing import Any, NamedTuple

import numpy as np


class RiskCoverage(NamedTuple):
    """The mean loss of the predictions that a model keeps when it abstains from the least certain.

    Attributes:
        coverage: (examples,), the fraction kept: 1 / N, 2 / N, ... 1.
        risk: (examples,), the mean loss of those.
        area: mean of `risk` over all coverages (AURC); lower is better.
        excess_area: `area` less that of the best order possible, the one by the loss itself.
    """

    coverage: np.ndarray
    risk: np.ndarray
    area: float
    excess_area: float


def auroc(known: Any, unknown: Any) -> float:
    """Return the chance that an unknown input has the higher uncertainty; ties count half.

    Reference: Hendrycks and Gimpel, arXiv 1610.02136.

    Args:
        known: (...) uncertainties of inputs like the training data.
        unknown: (...) uncertainties of inputs from elsewhere; the positive class.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> ibnn.metrics.auroc(known=[0.1, 0.2, 0.4], unknown=[0.3, 0.9])
        0.8333
    """
    false, true = _flagged(known, unknown)
    area = np.sum(np.diff(false) * (true[1:] + true[:-1])) / 2
    return float(area / (false[-1] * true[-1]))


def aupr(known: Any, unknown: Any) -> float:
    """Return the average precision, summed in steps; chance gives the share of unknown inputs."""
    false, true = _flagged(known, unknown)
    precision = true[1:] / (false + true)[1:]
    return float(np.sum(np.diff(true) * precision) / true[-1])


def fpr_at_95_tpr(known: Any, unknown: Any) -> float:
    """Return the least fraction of known inputs flagged when 95 % of the unknown ones are."""
    false, true = _flagged(known, unknown)
    return float(np.min(false[true / true[-1] >= 0.95]) / false[-1])


def ood_scores(known: Any, unknown: Any) -> dict[str, float]:
    """Return `auroc`, `aupr` and, as "fpr95", `fpr_at_95_tpr`; the arguments are `auroc`'s."""
    scores = {"auroc": auroc, "aupr": aupr, "fpr95": fpr_at_95_tpr}
    return {name: score(known, unknown) for name, score in scores.items()}


def risk_coverage(uncertainty: Any, loss: Any) -> RiskCoverage:
    """Return the mean loss of the most certain predictions; those equally certain share theirs.

    Reference: Geifman et al., Bias-Reduced Uncertainty Estimation, arXiv 1805.08206.

    Args:
        uncertainty: (...), higher is less certain.
        loss: (...), of each prediction: whether it is wrong, its negative log-likelihood, ...

    Example:
        >>> import tfp_ibnn as ibnn
        >>> ibnn.metrics.risk_coverage([0.1, 0.9, 0.5, 0.2], loss=[0, 1, 1, 0]).risk
        array([0.    , 0.    , 0.3333, 0.5   ])
    """
    uncertainty = finite_vector("uncertainty", uncertainty)
    loss = finite_vector("loss", loss, len(uncertainty))
    _, group, size = np.unique(uncertainty, return_inverse=True, return_counts=True)
    shared = np.bincount(group, weights=loss) / size
    kept = np.arange(1, len(loss) + 1)
    risk, best = (np.cumsum(x) / kept for x in (shared[np.sort(group)], np.sort(loss)))
    area = float(np.mean(risk))
    return RiskCoverage(kept / len(loss), risk, area, area - float(np.mean(best)))


def _flagged(known: Any, unknown: Any) -> list[np.ndarray]:
    """Return how many known and unknown inputs are flagged, by falling threshold: none to all."""
    sets = [np.sort(finite_vector("known", known)), np.sort(finite_vector("unknown", unknown))]
    thresholds = np.append(np.unique(np.concatenate(sets)), np.inf)[::-1]
    return [len(values) - np.searchsorted(values, thresholds) for values in sets]


def finite_vector(name: str, values: Any, count: int | None = None) -> np.ndarray:
    """Return finite numbers in float64 along one axis, `count` if given, or raise."""
    flat = np.asarray(values).astype("float64").ravel()
    if not flat.size:
        raise ValueError(f"`{name}` must hold at least one number; got none.")
    if count not in (None, len(flat)):
        raise ValueError(f"`{name}` must hold {count} numbers, one per example; got {len(flat)}.")
    bad = np.flatnonzero(~np.isfinite(flat))
    if bad.size:
        raise ValueError(f"`{name}` must be finite; got {flat[bad[0]]} at example {bad[0]}.")
    return flat
