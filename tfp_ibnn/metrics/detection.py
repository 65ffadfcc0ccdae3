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

    Returns:
        The area under the ROC curve, from 0 to 1; 0.5 is chance.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> ibnn.metrics.auroc(known=[0.1, 0.2, 0.4], unknown=[0.3, 0.9])
        0.8333
    """
    false, true = _flagged(known, unknown)
    steps = np.diff(false)
    sums = true[1:] + true[:-1]
    heights = sums / 2
    area = np.sum(steps * heights)
    whole_area = false[-1] * true[-1]
    return float(area / whole_area)


def aupr(known: Any, unknown: Any) -> float:
    """Return the average precision, summed in steps; chance gives the share of unknown inputs.

    Args:
        known: (...) uncertainties of inputs like the training data.
        unknown: (...) uncertainties of inputs from elsewhere; the positive class.

    Returns:
        The area under the curve of precision and recall, from 0 to 1.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> ibnn.metrics.aupr(known=[0.1, 0.2, 0.4], unknown=[0.3, 0.9])
        0.8333
    """
    false, true = _flagged(known, unknown)
    flagged = false + true
    precision = true[1:] / flagged[1:]
    steps = np.diff(true)
    area = np.sum(steps * precision)
    return float(area / true[-1])


def fpr_at_95_tpr(known: Any, unknown: Any) -> float:
    """Return the least fraction of known inputs flagged when 95 % of the unknown ones are.

    Args:
        known: (...) uncertainties of inputs like the training data.
        unknown: (...) uncertainties of inputs from elsewhere; the positive class.

    Returns:
        The false positive rate, from 0 to 1; lower is better.
    """
    false, true = _flagged(known, unknown)
    true_rate = true / true[-1]
    enough = true_rate >= 0.95
    fewest = np.min(false[enough])
    return float(fewest / false[-1])


def ood_scores(known: Any, unknown: Any) -> dict[str, float]:
    """Return how well an uncertainty separates unknown inputs from known ones.

    Args:
        known: (...) uncertainties of inputs like the training data.
        unknown: (...) uncertainties of inputs from elsewhere; the positive class.

    Returns:
        A dict with these keys:

        - "auroc": the area under the ROC curve, see `auroc`; higher is better;
        - "aupr": the average precision, see `aupr`; higher is better;
        - "fpr95": the false positive rate at a true positive rate of 95 %, see `fpr_at_95_tpr`;
            lower is better.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> ibnn.metrics.ood_scores(known=[0.1, 0.2], unknown=[0.3, 0.9])
        {'auroc': 1.0, 'aupr': 1.0, 'fpr95': 0.0}
    """
    return {
        "auroc": auroc(known, unknown),
        "aupr": aupr(known, unknown),
        "fpr95": fpr_at_95_tpr(known, unknown),
    }


def risk_coverage(uncertainty: Any, loss: Any) -> RiskCoverage:
    """Return the mean loss of the most certain predictions; those equally certain share theirs.

    Reference: Geifman et al., Bias-Reduced Uncertainty Estimation, arXiv 1805.08206.

    Args:
        uncertainty: (...), higher is less certain.
        loss: (...), of each prediction: whether it is wrong, its negative log-likelihood, ...

    Returns:
        A `RiskCoverage`: the curve, `coverage` and `risk`, its `area`, and `excess_area`.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> ibnn.metrics.risk_coverage([0.1, 0.9, 0.5, 0.2], loss=[0, 1, 1, 0]).risk
        array([0.    , 0.    , 0.3333, 0.5   ])
    """
    uncertainty = finite_vector("uncertainty", uncertainty)
    loss = finite_vector("loss", loss, len(uncertainty))
    _, group, size = np.unique(uncertainty, return_inverse=True, return_counts=True)
    shared = np.bincount(group, weights=loss) / size
    by_certainty = shared[np.sort(group)]
    kept = np.arange(1, len(loss) + 1)
    risk = np.cumsum(by_certainty) / kept
    best_risk = np.cumsum(np.sort(loss)) / kept
    area = float(np.mean(risk))
    best_area = float(np.mean(best_risk))
    return RiskCoverage(
        coverage=kept / len(loss),
        risk=risk,
        area=area,
        excess_area=area - best_area,
    )


def _flagged(known: Any, unknown: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return how many known and unknown inputs are flagged, by falling threshold: none to all."""
    known = finite_vector("known", known)
    unknown = finite_vector("unknown", unknown)
    both = np.concatenate([known, unknown])
    levels = np.unique(both)
    thresholds = np.append(levels, np.inf)
    thresholds = thresholds[::-1]
    return _reaching(known, thresholds), _reaching(unknown, thresholds)


def _reaching(values: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Return how many values are at each threshold or above it."""
    ascending = np.sort(values)
    below = np.searchsorted(ascending, thresholds)
    return len(values) - below


def finite_vector(name: str, values: Any, count: int | None = None) -> np.ndarray:
    """Return finite numbers in float64 along one axis, or raise.

    Args:
        name: of the argument, for errors.
        values: array of numbers, of any shape.
        count: how many there must be; None for any number from 1 on.

    Returns:
        The numbers (count,).
    """
    array = np.asarray(values)
    flat = array.astype("float64").ravel()
    if not flat.size:
        raise ValueError(f"`{name}` must hold at least one number; got none.")
    if count not in (None, len(flat)):
        raise ValueError(f"`{name}` must hold {count} numbers, one per example; got {len(flat)}.")
    is_finite = np.isfinite(flat)
    if not is_finite.all():
        place = np.argmin(is_finite)
        raise ValueError(f"`{name}` must be finite; got {flat[place]} at example {place}.")
    return flat
