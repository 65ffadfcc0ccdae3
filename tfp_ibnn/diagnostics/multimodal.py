"""How many modes a posterior has."""

from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.spatial.distance import cdist

from tfp_ibnn._core import checks
from tfp_ibnn.diagnostics.density import PosteriorDensity

_MOST = 50


class Modes(NamedTuple):
    """Modes (K, size), the highest first; log q and shares of the draws (K,); the mass not seen."""

    locations: np.ndarray
    log_probs: np.ndarray
    masses: np.ndarray
    unseen: float


def modes(posterior: Any, draws: int = 200, *, starts: Any = None, seed: int = 0) -> Modes:
    """Find the modes of a posterior over at most 50 numbers.

    Draws climb log q by L-BFGS. Two summits are one mode if log q falls by less than a nat below
    the lower on the best path found between them, straight or bent upwards; on rugged densities
    that may count too many. A mode of mass m is missed with probability (1 - m)^draws: 5 % for m =
    1.5 %. `unseen`, by Good and Turing, is the share of draws alone at their mode. Costs some 100
    to 1,100 gradients of log q, each at all draws together.
    `posterior` is as for `log_weights`; or, with `starts`, rows to climb from, any object that has
    `size`, and `values` and `gradients` of rows, such as the target of `diagnostics.hmc`.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> posterior = ibnn.NormalAffine()
        >>> posterior.build((2,))
        >>> ibnn.diagnostics.modes(posterior).masses.tolist()
        [1.0]
    """
    q = PosteriorDensity(posterior) if starts is None else posterior
    if q.size > _MOST:
        remedy = "Compare what draws predict: diagnostics.disagreement(predictions)"
        raise ValueError(f"`posterior` is over {q.size} numbers, more than {_MOST}. {remedy}.")
    w = q.sample(checks.positive_integer("draws", draws), seed) if starts is None else starts
    w = np.reshape(np.asarray(w, "float64"), (-1, q.size))
    scale, log_prob = (
        np.where(w.std(axis=0) > 1e-9, w.std(axis=0), 1.0),
        getattr(q, "values", None) or q.log_prob,
    )
    value, slope = (lambda x: log_prob(x * scale)), (lambda x: q.gradients(x * scale) * scale)

    def minus(flat: np.ndarray) -> tuple[float, np.ndarray]:
        rows = flat.reshape(w.shape)
        return -value(rows).sum(), -slope(rows).ravel()

    options = {"jac": True, "method": "L-BFGS-B", "options": {"maxfun": 1000}}
    top = minimize(minus, (w / scale).ravel(), **options).x.reshape(w.shape)
    top = top[np.argsort(-value(top))]
    own = np.arange(len(top))
    far = np.where(own[:, None] > own, cdist(top, top), np.inf)  # from the higher ones
    near = far.argmin(axis=1)
    parent = np.where(_barriers(value, slope, top, top[near]) < 1, near, own)
    roots = np.flatnonzero(parent == own)
    pairs = [(i, j) for i in roots for j in roots[np.argsort(far[i, roots])[:3]] if j < i]
    if pairs:
        i, j = np.transpose(pairs)
        joined = _barriers(value, slope, top[i], top[j], bends=100) < 1
        parent[i[joined]] = j[joined]
    for i in own:  # those above it are done
        parent[i] = parent[parent[i]]
    kept, counts = np.unique(parent, return_counts=True)
    shares = counts / len(top)
    return Modes(top[kept] * scale, value(top[kept]), shares, float(shares[counts == 1].sum()))


def _barriers(value: Any, slope: Any, start: Any, end: Any, bends: int = 0) -> np.ndarray:
    """Return how far log q falls below the lower ends of paths, straight or bent upwards."""
    path = start[:, None] + np.linspace(0, 1, 33)[:, None] * (end - start)[:, None]
    rows = (-1, path.shape[-1])
    for step in range(bends):
        ways = slope(path.reshape(rows)).reshape(path.shape)[:, 1:-1]
        along = (path[:, 2:] - path[:, :-2]) / 2
        size, along = _length(along).mean(axis=1, keepdims=True), along / _length(along)
        ways -= along * np.sum(ways * along, axis=-1, keepdims=True)
        aside = (path[:, 2:] + path[:, :-2]) / 2 - path[:, 1:-1]
        # Up, across the path; and along it, to even distances.
        path[:, 1:-1] += ways * (1 - step / bends) * size / _length(ways)
        path[:, 1:-1] += along * np.sum(aside * along, axis=-1, keepdims=True)
    heights = value(path.reshape(rows)).reshape(path.shape[:2])
    return np.minimum(heights[:, 0], heights[:, -1]) - heights.min(axis=1)


def _length(x: np.ndarray) -> np.ndarray:
    return np.linalg.norm(x, axis=-1, keepdims=True) + 1e-30
