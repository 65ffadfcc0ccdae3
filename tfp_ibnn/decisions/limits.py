"""What thresholds act on: the scores of predictions, and the sets or intervals that they give."""

import math
from typing import Any

import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.decisions.class_scores import ClassScores
from tfp_ibnn.likelihoods import Labels
from tfp_ibnn.likelihoods.categorical import classes
from tfp_ibnn.likelihoods.numbers import finite_numbers
from tfp_ibnn.metrics.detection import finite_vector

# How far a number may be from the same example's in another batch, another graph or a file, by its
# size. Scores this close count as ties.
_SAME_NUMBER = 4 * float(np.finfo("float32").eps)
_ROUNDING = 1e-9  # of a product of `coverage`


class Limited:
    """The sets or intervals of a `Conformal`, by its thresholds."""

    def _parts(self, prediction: dict[str, Any], u: Any) -> dict[str, Any]:
        """Return what limits act on: (N, classes) of sets, (N,) of intervals.

        Of outputs with positions N is the number of all positions.
        """
        prediction = {name: ops.cast(x, "float32") for name, x in prediction.items()}
        low, high = self._ends(prediction)
        mean = prediction["mean"]
        is_single = self._likelihood.is_softmax or low.shape[-1] == 1
        has_rank = len(mean.shape) == 2 or self._has_positions
        if not has_rank or not is_single:
            raise ValueError(
                "`model` must predict classes (N, K), or one number per example, (N, 1), or so at "
                "the positions of a Functional or Sequential model; it predicts "
                f"{tuple(mean.shape)}. ibnn.MonteCarlo takes such a model, and "
                "ibnn.TemperatureScaling if it predicts classes."
            )
        mean = _as_rows(mean)
        low = _as_rows(low)
        high = _as_rows(high)
        if self._is_set:
            if isinstance(self._likelihood, Labels):
                mean = ops.concatenate([1 - mean, mean], axis=1)
            return ClassScores(self.method, self.k, self.penalty).of(mean, u)
        if self.method == "split" and self._likelihood.predicts_scale:
            variance = _as_rows(prediction["total_variance"])
            scale = ops.sqrt(variance)
        else:
            scale = ops.ones_like(low)
        return {"low": low[:, 0], "high": high[:, 0], "scale": scale[:, 0]}

    def _ends(self, prediction: dict[str, Any]) -> tuple[Any, Any]:
        """Return the lower and the upper ends that limits widen, the mean but for "cqr"."""
        mean = prediction["mean"]
        if self.method != "cqr":
            return mean, mean
        if self._likelihood.free_scale and mean.shape[-1] == 2:
            return mean[..., :1], mean[..., 1:]
        return prediction["lower"], prediction["upper"]

    def _answer(self, parts: dict[str, Any], limits: Any) -> Any:
        """Return sets or intervals by the limits of each example, or of all."""
        if self._is_set:
            is_in = parts["score"] <= limits + parts["margin"]
            if "before" in parts:
                is_in = is_in | (parts["before"] < limits)
            return is_in
        distance = limits[:, 0] * parts["scale"]
        low = parts["low"]
        high = parts["high"]
        size = ops.abs(distance)
        low_margin = _SAME_NUMBER * (ops.abs(low) + size)
        high_margin = _SAME_NUMBER * (ops.abs(high) + size)
        low_end = low - distance - low_margin
        high_end = high + distance + high_margin
        return ops.stack([low_end, high_end], axis=1)

    def _scores(self, parts: dict[str, Any], y: np.ndarray) -> np.ndarray:
        """Return the scores of what is true."""
        if self._is_set:
            return parts["score"][np.arange(len(y)), y]
        below = parts["low"] - y
        above = y - parts["high"]
        return np.maximum(below, above) / parts["scale"]

    def _judged(self, answer: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return whether sets or intervals hold the truth, and their sizes."""
        if self._is_set:
            return answer[np.arange(len(y)), y], answer.sum(axis=1)
        low, high = answer.T
        is_covered = (low <= y) & (y <= high)
        return is_covered, np.maximum(high - low, 0)

    def _targets(self, parts: dict[str, Any], y: Any) -> np.ndarray:
        if not self._is_set:
            return finite_vector("y", finite_numbers(y, 1, "`y`"), len(parts["low"]))
        found = classes(y, parts["score"].shape[1], "`y`")
        return finite_vector("y", found, len(parts["score"])).astype(int)

    def _threshold(self, scores: np.ndarray) -> float:
        """Return the smallest limit that has the coverage, or raise if no score is high enough."""
        self._check_enough(len(scores))
        rank = math.ceil((len(scores) + 1) * self.coverage - _ROUNDING)
        return np.sort(scores)[rank - 1]

    def _check_enough(self, count: int) -> None:
        """Raise if there are too few examples, or images, for the coverage."""
        odds = self.coverage / (1 - self.coverage)
        least = math.ceil(odds - _ROUNDING)
        if count < least:
            raise ValueError(
                f"coverage={self.coverage} needs {least} examples, of each class and group if they "
                f"are covered separately; got {count}."
            )


def _as_rows(x: Tensor) -> Tensor:
    """Return a tensor (N, ..., width) as (rows, width)."""
    width = x.shape[-1]
    return ops.reshape(x, (-1, width))
