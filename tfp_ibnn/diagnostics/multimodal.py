"""How many modes a posterior has, up to the symmetries of a network."""

from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
from keras.layers import Dense
from scipy.optimize import linear_sum_assignment, minimize
from scipy.spatial.distance import cdist

from tfp_ibnn._core import checks
from tfp_ibnn.conversion.graph import Graph
from tfp_ibnn.diagnostics.targets import PosteriorDensity
from tfp_ibnn.likelihoods.numbers import finite_numbers
from tfp_ibnn.weights.features import check_network

_MOST = 50
_PROBE = np.outer(np.geomspace(0.01, 100, 30), [1, -1]).astype("float32")


class Modes(NamedTuple):
    """Modes (K, size), the highest first; log q and shares of the draws (K,); the mass not seen."""

    locations: np.ndarray
    log_probs: np.ndarray
    masses: np.ndarray
    unseen: float


def modes(
    posterior: Any, draws: int = 200, *, starts: Any = None, model: Any = None, seed: int = 0
) -> Modes:
    """Find the modes of a posterior over at most 50 numbers.

    Draws climb log q by L-BFGS. Two summits are one mode if log q falls by less than a nat below
    the lower on the best path found between them, straight or bent upwards; on rugged densities
    that may count too many. A mode of mass m is missed with probability (1 - m)^draws: 5 % for m =
    1.5 %. `unseen`, by Good and Turing, is the share of draws alone at their mode. Costs some 100
    to 1,100 gradients of log q, each at all draws together.
    `posterior` is as for `log_weights`; or, with `starts`, rows to climb from, any object that has
    `size`, and `values` and `gradients` of rows, such as the target of `diagnostics.hmc`. Of all
    weights of a `model`, summits that are copies by its symmetries are one; see `canonical`.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> posterior = ibnn.NormalAffine()
        >>> posterior.build((2,))
        >>> ibnn.diagnostics.modes(posterior).masses.tolist()
        [1.0]
    """
    is_target = starts is not None and hasattr(posterior, "gradients")
    q = posterior if is_target else PosteriorDensity(posterior)
    if q.size > _MOST:
        remedy = "Compare what draws predict: diagnostics.disagreement(predictions)"
        raise ValueError(f"`posterior` is over {q.size} numbers, more than {_MOST}. {remedy}.")
    draws = checks.positive_integer("draws", draws)
    w = q.sample_and_log_prob(draws, seed)[0] if starts is None else _rows(starts, q.size, "starts")
    scale, shape = np.where(w.std(axis=0) > 1e-9, w.std(axis=0), 1.0), w.shape
    value, slope = (lambda x: q.values(x * scale)), (lambda x: q.gradients(x * scale) * scale)
    options = {"jac": True, "method": "L-BFGS-B", "options": {"maxfun": 1000}}
    options["fun"] = lambda x: (-value(x.reshape(shape)).sum(), -slope(x.reshape(shape)).ravel())
    top = minimize(x0=(w / scale).ravel(), **options).x.reshape(shape)
    if not np.isfinite(value(top)).all():
        raise ValueError("`posterior` has no highest point that ascent finds: log q is not finite.")
    top = top[np.argsort(-value(top))]
    top = top if model is None else canonical(model, top * scale) / scale
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
    return Modes(top[kept] * scale, value(top[kept]), counts / len(w), sum(counts == 1) / len(w))


def canonical(model: Any, draws: Any) -> np.ndarray:
    """Return draws (..., size) of all weights, each as the copy of it that is close to the first.

    Copies give the same function: units are permuted; negated if the activation is odd (tanh); and
    rescaled if it is homogeneous (relu), so that what comes in and goes out has equal norms, the
    likeliest under a Gaussian prior. `model` is a chain of Dense layers. Costs O(units^3) a draw.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> model = keras.Sequential([keras.Input((1,)), *map(keras.layers.Dense, (1, 1))])
        >>> ibnn.diagnostics.canonical(model, [[2, 0, 2, 0], [-1, 0, -9, 0]])[1].tolist()
        [3.0, 0.0, 3.0, 0.0]
    """
    check_network(model)
    steps = Graph(model, lambda _: True).layers
    dense = [x for x in steps if type(x).__name__ not in ("Dropout", "GaussianHead")]
    if {type(x) for x in dense} != {Dense} or len({*dense}) < len(dense):
        got = ", ".join(type(x).__name__ for x in steps)
        raise ValueError(f"`model` must be a chain of Dense layers, each used once; got {got}.")
    ends = np.cumsum([x.count_params() for x in dense])
    rows, hidden = _rows(draws, ends[-1], "draws"), []
    # The bias is a kernel's last row; a unit is a column of it, and a row of the next one.
    parts = zip(dense, np.split(rows, ends[:-1], axis=1), strict=True)
    parts = [(x, part.reshape(len(rows), -1, x.units)) for x, part in parts]
    for (x, into), (_, after) in pairwise(parts):
        f, g, h = (x.activation(factor * _PROBE) for factor in (1.0, 2.0, -1.0))
        others = (x.activation(_PROBE * np.float32(factors)) for factors in ((1, 3), (3, 1)))
        alone = all(np.allclose(f[:, k], other[:, k]) for k, other in enumerate(others))
        same, odd = alone and np.allclose(g, 2 * f), alone and np.allclose(h, -f)
        hidden.append((into, after[:, : x.units], same, odd))
    for into, out, *_ in [units for units in hidden if units[2]] * 100:  # at once if it is one
        ratio = np.sum(out**2, axis=2) / np.maximum(np.sum(into**2, axis=1), 1e-60) + 1e-60
        into *= ratio[:, None] ** 0.25
        out *= ratio[..., None] ** -0.25
    for row, sweep, (into, out, _, odd) in product(range(len(rows)), range(10), hidden):
        gain = into[0].T @ into[row] + min(sweep, 1) * out[0] @ out[row].T  # at first not in order
        _, own = pairs = linear_sum_assignment(np.abs(gain) if odd else gain, maximize=True)
        sign = np.where(odd & (gain[pairs] < 0), -1.0, 1.0)
        into[row], out[row] = into[row][:, own] * sign, out[row][own] * sign[:, None]
    return rows.reshape(np.shape(draws))


def _rows(given: Any, size: int, name: str) -> np.ndarray:
    """Return a copy in float64, (rows, size), or raise."""
    if not np.size(given):
        raise ValueError(f"`{name}` must be at least one row of {size} numbers; got none.")
    given = np.reshape(np.array(given, "float64"), (-1, *np.shape(given)[-1:]))
    return finite_numbers(given, size, f"`{name}`")


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
