"""Scores of classes, of which `Conformal` makes sets."""

from typing import NamedTuple

import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor

# How far a probability may be from the same example's in another batch, another graph or a file,
# after the exponential. Scores this close count as ties.
_SAME_PROBABILITY = 1e-5


class ClassScores(NamedTuple):
    """How unlikely each class is of an example, by one of the methods of `Conformal`.

    Attributes:
        method: "lac", "aps" or "raps".
        k: of "raps", the number of classes without a penalty.
        penalty: of "raps".
    """

    method: str
    k: int
    penalty: float

    def of(self, p: Tensor, u: Tensor | None) -> dict[str, Tensor]:
        """Return each class's score, less 1, and the margin within which scores are the same.

        The 1 is left out because float32 has many numbers next to 0 and few next to 1: to an
        overconfident network all wrong classes would have the score 1.

        Args:
            p: (N, classes), probabilities.
            u: (N,), uniform numbers for exact coverage, or None.

        Returns:
            Arrays (N, classes): "score", "margin", and without u for "aps" and "raps" "before", the
            score of the class one rank higher.
        """
        if self.method == "lac":
            return {"score": -p, "margin": _SAME_PROBABILITY * p}
        order = ops.argsort(-p, axis=1)  # equal ones stay in order
        descending = ops.take_along_axis(p, order, axis=1)
        below = _sums_below(descending)
        penalty = self._penalties(p.shape[1])
        score = penalty - below
        margin = _SAME_PROBABILITY * (penalty + below)
        # The first class is in every set.
        lowest = ops.full_like(p[:, :1], -np.inf)
        higher = score[:, :-1]
        before = ops.concatenate([lowest, higher], axis=1)
        rank = ops.argsort(order, axis=1)
        score = ops.take_along_axis(score, rank, axis=1)
        before = ops.take_along_axis(before, rank, axis=1)
        margin = ops.take_along_axis(margin, rank, axis=1)
        if u is None:
            return {"score": score, "before": before, "margin": margin}
        subtracted = u[:, None] * p
        return {
            "score": score - subtracted,
            "margin": margin + _SAME_PROBABILITY * subtracted,
        }

    def _penalties(self, classes: int) -> np.ndarray:
        """Return the penalty of each rank, (classes,)."""
        if self.method != "raps":
            return np.zeros(classes, "float32")
        ranks = np.arange(1, classes + 1)
        excess = np.maximum(ranks - self.k, 0)
        return (self.penalty * excess).astype("float32")


def _sums_below(descending: Tensor) -> Tensor:
    """Return the sums of what comes after each of descending numbers (N, classes)."""
    ascending = ops.flip(descending, axis=1)
    sums = ops.cumsum(ascending, axis=1)
    remaining = ops.flip(sums, axis=1)  # from each class down
    nothing = ops.zeros_like(remaining[:, :1])
    return ops.concatenate([remaining[:, 1:], nothing], axis=1)
