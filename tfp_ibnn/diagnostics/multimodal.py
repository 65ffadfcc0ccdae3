"""How many modes a posterior has, up to the symmetries of a network."""

from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.spatial.distance import cdist

from tfp_ibnn._core import checks
from tfp_ibnn.diagnostics.symmetries import canonical, checked_rows
from tfp_ibnn.diagnostics.targets import PosteriorDensity

_MOST_NUMBERS = 50
_MOST_CLIMBING_STEPS = 1000
_MODE_DEPTH = 1.0  # nats by which log q must fall between two modes
_PATH_POINTS = 33
_BENDS = 100
_NEIGHBORS = 3  # higher summits to which bent paths are tried


class Modes(NamedTuple):
    """The modes that `modes` found, the highest first.

    Attributes:
        locations: (K, size), where they are.
        log_probs: (K,), log q there.
        masses: (K,), the share of draws that climbed to each.
        unseen: the estimated share of the posterior's mass at modes that were not found.
    """

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
    1.5 %. `unseen`, by Good and Turing, is the share of draws that are alone at their mode. Costs
    about 100 to 1,100 gradients of log q, each at all draws together.

    Args:
        posterior: as for `log_weights`; or, with `starts`, any object that has `size`, and `values`
            and `gradients` of rows, such as the target of `diagnostics.hmc`.
        draws: how many draws of the posterior climb.
        starts: (N, size), rows to climb from in place of draws.
        model: the model whose weights, all of them, the posterior is over: summits that are
            copies of each other by its symmetries then count as one; see `canonical`.
        seed: of the draws; equal seeds give equal modes.

    Returns:
        `Modes`: the `locations`, `log_probs` and `masses` of the modes, and the mass `unseen`.

    Raises:
        ValueError: if the posterior is over more than 50 numbers, or has no highest point.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> posterior = ibnn.NormalAffine()
        >>> posterior.build((2,))
        >>> ibnn.diagnostics.modes(posterior).masses.tolist()
        [1.0]
    """
    is_target = starts is not None and hasattr(posterior, "gradients")
    density = posterior if is_target else PosteriorDensity(posterior)
    if density.size > _MOST_NUMBERS:
        raise ValueError(
            f"`posterior` is over {density.size} numbers, more than {_MOST_NUMBERS}. "
            "Compare what draws predict: diagnostics.disagreement(predictions)."
        )
    draws = checks.positive_integer("draws", draws)
    if starts is None:
        rows, _ = density.sample_and_log_prob(draws, seed)
    else:
        rows = checked_rows(starts, density.size, "starts")
    landscape = _Landscape(density, rows)
    summits = landscape.climb(rows)
    if model is not None:
        summits = canonical(model, summits * landscape.scale) / landscape.scale
    highest, counts = np.unique(_merge(landscape, summits), return_counts=True)
    locations = summits[highest]
    return Modes(
        locations * landscape.scale,
        landscape.heights(locations),
        counts / len(rows),
        np.sum(counts == 1) / len(rows),
    )


class _Landscape:
    """Log q in coordinates in which some rows have a deviation of 1."""

    def __init__(self, density: Any, rows: np.ndarray) -> None:
        self._density = density
        deviation = rows.std(axis=0)
        self.scale = np.where(deviation > 1e-9, deviation, 1.0)

    def heights(self, x: np.ndarray) -> np.ndarray:
        """Return log q (N,) at x (N, size)."""
        return self._density.values(x * self.scale)

    def slopes(self, x: np.ndarray) -> np.ndarray:
        """Return the gradients (N, size) of log q."""
        return self._density.gradients(x * self.scale) * self.scale

    def climb(self, rows: np.ndarray) -> np.ndarray:
        """Return the summits (N, size) that rows climb to, the highest first, or raise."""

        def descent(flat: np.ndarray) -> tuple[float, np.ndarray]:
            x = flat.reshape(rows.shape)
            return -self.heights(x).sum(), -self.slopes(x).ravel()

        start = rows / self.scale
        climbed = minimize(
            descent,
            start.ravel(),
            jac=True,
            method="L-BFGS-B",
            options={"maxfun": _MOST_CLIMBING_STEPS},
        )
        summits = climbed.x.reshape(rows.shape)
        heights = self.heights(summits)
        if not np.isfinite(heights).all():
            raise ValueError(
                "`posterior` has no highest point that ascent finds: log q is not finite."
            )
        return summits[np.argsort(-heights)]

    def barriers(self, starts: np.ndarray, ends: np.ndarray, bends: int = 0) -> np.ndarray:
        """Return how far log q falls below the lower ends of paths.

        Args:
            starts: (N, size), one end of each path.
            ends: (N, size), the other end.
            bends: how many steps bend the paths upwards; 0 leaves them straight.

        Returns:
            Falls (N,) in nats, 0 or above.
        """
        paths = np.linspace(starts, ends, _PATH_POINTS, axis=1)
        for step in range(bends):
            self._bend(paths, 1 - step / bends)
        count, points, size = paths.shape
        heights = self.heights(paths.reshape(-1, size))
        heights = heights.reshape(count, points)
        at_ends = heights[:, [0, -1]]
        lower_ends = at_ends.min(axis=1)
        return lower_ends - heights.min(axis=1)

    def _bend(self, paths: np.ndarray, share: float) -> None:
        """Move paths (N, points, size) in place, upwards by a share of the points' spacing."""
        inner = paths[:, 1:-1]
        before = paths[:, :-2]
        after = paths[:, 2:]
        tangents = (after - before) / 2
        lengths = _length(tangents)
        tangents /= lengths
        size = inner.shape[-1]
        slopes = self.slopes(inner.reshape(-1, size))
        slopes = slopes.reshape(inner.shape)
        across = slopes - _along(tangents, slopes)
        # Along the path, each point moves to between its neighbors, which evens the distances.
        middle = (after + before) / 2
        to_middle = _along(tangents, middle - inner)
        spacing = lengths.mean(axis=1, keepdims=True)
        steps = across * share * spacing
        inner += steps / _length(across)
        inner += to_middle


def _merge(landscape: _Landscape, summits: np.ndarray) -> np.ndarray:
    """Return for each summit, the highest first, the index of the highest one of its mode.

    A summit joins the nearest higher one if the straight path there has no deep gap. Those that
    join none try bent paths to a few of each other.
    """
    indices = np.arange(len(summits))
    is_higher = indices[:, None] > indices  # of a row's summit, which summits are higher
    distances = cdist(summits, summits)
    distances = np.where(is_higher, distances, np.inf)
    nearest = distances.argmin(axis=1)
    neighbors = summits[nearest]
    falls = landscape.barriers(summits, neighbors)
    parents = np.where(falls < _MODE_DEPTH, nearest, indices)
    roots = np.flatnonzero(parents == indices)
    pairs = _close_pairs(roots, distances)
    if pairs:
        lower, higher = np.transpose(pairs)
        falls = landscape.barriers(summits[lower], summits[higher], bends=_BENDS)
        is_joined = falls < _MODE_DEPTH
        parents[lower[is_joined]] = higher[is_joined]
    for index in indices:  # from the highest on, so that a parent has its final one already
        parents[index] = parents[parents[index]]
    return parents


def _close_pairs(indices: np.ndarray, distances: np.ndarray) -> list[tuple[int, int]]:
    """Return pairs (lower, higher) of each summit with those of its neighbors that are higher."""
    pairs = []
    for lower in indices:
        by_distance = indices[np.argsort(distances[lower, indices])]
        for higher in by_distance[:_NEIGHBORS]:
            if higher < lower:
                pairs.append((lower, higher))
    return pairs


def _along(directions: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Return the part of vectors (..., size) that lies along directions of length 1."""
    return directions * np.sum(vectors * directions, axis=-1, keepdims=True)


def _length(vectors: np.ndarray) -> np.ndarray:
    return np.linalg.norm(vectors, axis=-1, keepdims=True) + 1e-30
