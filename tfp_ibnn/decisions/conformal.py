"""Conformal prediction: sets and intervals that hold the truth with a chosen probability."""

import math
from typing import Any

import keras
import numpy as np
from keras import ops
from scipy.stats import binomtest

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.decisions.fitted import Fitted
from tfp_ibnn.metrics.detection import finite_vector
from tfp_ibnn.prediction.predictive import Categorical, Gaussian, Labels, Point
from tfp_ibnn.weights.likelihood import classes, numbers


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Conformal(Fitted):
    """Sets of classes, or intervals, that hold the truth with probability `coverage` or more.

    The probability is over calibration sets and new examples, which must be exchangeable; the model
    may be wrong. The threshold q is the ceil((n + 1) coverage)-th smallest of n scores:

    - "lac": 1 - p_y. A set holds the classes with 1 - p <= q: the smallest sets (arXiv 1609.00451).
    - "aps": the sum of the probabilities from the largest down to p_y. A set holds the classes down
      to the one at which the sum reaches q, that one included (2006.02544).
    - "raps": "aps" with `penalty` * max(0, rank - `k`) added, for smaller sets (2009.14193).
    - "split", of numbers: |y - mean|, divided by the predicted deviation of a Gaussian head.
    - "cqr": how far y lies outside of two quantiles: the outputs of a "point" head of size 2, or
      else the interval of a `MonteCarlo`, whose `interval` is `coverage` unless given (1905.03222).

    Args:
        model: a `MonteCarlo`, or a model or posterior that `MonteCarlo` takes.
        method: one of the above; None takes "lac" for classes, and "split" for numbers.
        coverage: between 0 and 1.
        by: "class" gives each class a threshold, so that each is covered; or None.
        randomized: a seed. Then u p, with u uniform, is subtracted from the scores of "aps" and
            "raps": coverage is exact, and sets can be empty. It is not exported, nor are `groups`.
        k: of "raps", the number of classes without a penalty.
        penalty: of "raps".
        **kwargs: those of `keras.Model`.

    Example:
        >>> import keras, numpy as np, tfp_ibnn as ibnn
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Softmax()])
        >>> y = np.arange(90) % 3
        >>> sets = ibnn.Conformal(model, "aps").fit(3 * np.eye(3)[y], y)
        >>> sets.predict(np.array([[3.0, 0, 0], [2, 2, 0]]))
        array([[ True, False, False],
               [ True,  True, False]])
    """

    def __init__(
        self,
        model: Any,
        method: str | None = None,
        coverage: float = 0.9,
        by: str | None = None,
        randomized: int | None = None,
        k: int = 1,
        penalty: float = 0.1,
        **kwargs: Any,
    ) -> None:
        coverage = checks.probability("coverage", coverage)
        super().__init__(model, {"interval": coverage} if method == "cqr" else {}, **kwargs)
        self.coverage, self._kind = coverage, self.inner._predictive
        self._is_set = isinstance(self._kind, Categorical)
        choices = ("lac", "aps", "raps") if self._is_set else ("split", "cqr")
        self.method = method = checks.one_of("method", method or choices[0], choices)
        self.by = checks.one_of("by", by, (None, "class") if self._is_set else (None,))
        if randomized is not None and method not in ("aps", "raps"):
            raise ValueError(f"`randomized` is for 'aps' and 'raps'; `method` is {method!r}.")
        if isinstance(randomized, bool):
            raise ValueError(f"`randomized` must be None or a seed, such as 0; got {randomized}.")
        self.randomized = None if randomized is None else checks.whole("randomized", randomized)
        self.k, self.penalty = checks.whole("k", k), checks.non_negative("penalty", penalty)

    def fit(self, x: Any, y: Any, groups: Any = None, **options: Any) -> "Conformal":
        """Calibrate with examples that the model was not trained on, and return the object.

        `y` are classes or numbers. `groups`, whole numbers (N,), give each group a threshold, so
        that each is covered; `predict` and `evaluate` then take them too. Options are of `predict`.
        """
        parts = self._run(x, options)
        y = self._targets(parts, y)
        groups = _groups(groups, len(y))
        if self._is_set:
            scores = self._scores(parts, 0)[np.arange(len(y)), y]
        else:
            scores = np.maximum(parts["low"] - y, y - parts["high"]) / parts["scale"]
        labels, classes = (y, parts["score"].shape[1]) if self.by else (0, 1)
        cells = groups * classes + labels
        ends = np.cumsum(np.bincount(cells, minlength=(groups.max() + 1) * classes))
        cells = np.split(scores[np.argsort(cells, kind="stable")], ends[:-1])
        self.keep({"thresholds": np.reshape([*map(self._threshold, cells)], (-1, classes))})
        return self

    def predict(self, x: Any, groups: Any = None, **options: Any) -> np.ndarray:
        """Return sets, booleans (N, classes), or intervals (N, 2); the options are Keras's."""
        return self._by_groups(self._run(x, options), groups)

    def evaluate(self, x: Any, y: Any, groups: Any = None, **options: Any) -> dict[str, float]:
        """Return `coverage`, its exact 95 % interval `lower` to `upper`, and the mean `size`."""
        parts = self._run(x, options)
        y, answer = self._targets(parts, y), self._by_groups(parts, groups)
        if self._is_set:
            covered, size = answer[np.arange(len(y)), y], answer.sum(axis=1)
        else:
            covered = (answer[:, 0] <= y) & (y <= answer[:, 1])
            size = np.maximum(answer[:, 1] - answer[:, 0], 0)
        ends = binomtest(int(covered.sum()), len(y)).proportion_ci()
        found = (covered.mean(), *ends, size.mean())
        return dict(zip(("coverage", "lower", "upper", "size"), map(float, found), strict=True))

    @property
    def thresholds(self) -> np.ndarray:
        """What `fit` found, (groups, 1), or (groups, classes) with `by`."""
        return ops.convert_to_numpy(self.arrays["thresholds"])

    def call(self, inputs: Any) -> dict[str, Tensor]:
        """Return the dict of `MonteCarlo` for one batch, with the `set` or `interval`."""
        prediction, limits = self.inner.average(inputs), self.arrays["thresholds"]
        if limits.shape[0] > 1 or self.randomized is not None:
            raise ValueError("Sets by groups, and randomized ones, are for `predict` alone.")
        answer = self._answer(self._parts(prediction), limits)
        return {**prediction, "set" if self._is_set else "interval": answer}

    serve = call

    def _run(self, x: Any, options: dict[str, Any]) -> dict[str, Any]:
        parts = self._parts(self.inner.predict(x, **{"verbose": 0, **options}))
        return {name: ops.convert_to_numpy(part) for name, part in parts.items()}

    def _parts(self, prediction: dict[str, Any]) -> dict[str, Any]:
        """Return what thresholds act on: (N, classes) of sets, (N,) of intervals."""
        prediction = {name: ops.cast(x, "float32") for name, x in prediction.items()}
        p = low = high = prediction["mean"]
        if self.method == "cqr" and type(self._kind) is Point and p.shape[-1] == 2:
            low, high = p[..., :1], p[..., 1:]
        elif self.method == "cqr":
            low, high = prediction["lower"], prediction["upper"]
        if len(p.shape) != 2 or (type(self._kind) is not Categorical and low.shape[-1] != 1):
            wanted = "classes (N, K), or one number per example, (N, 1)"
            raise ValueError(f"`model` must predict {wanted}; it predicts {tuple(p.shape)}.")
        if not self._is_set:
            has_scale = self.method == "split" and isinstance(self._kind, Gaussian)
            scale = ops.sqrt(prediction["total_variance"]) if has_scale else ops.ones_like(low)
            return {"low": low[:, 0], "high": high[:, 0], "scale": scale[:, 0]}
        p = ops.concatenate([1 - p, p], axis=1) if isinstance(self._kind, Labels) else p
        if self.method == "lac":
            return {"score": 1 - p}
        order = ops.argsort(-p, axis=1)  # equal ones stay in order
        total = ops.cumsum(ops.take_along_axis(p, order, axis=1), axis=1)
        if self.method == "raps":
            excess = np.maximum(np.arange(1, p.shape[1] + 1) - self.k, 0)
            total = total + (self.penalty * excess).astype("float32")
        # `before` is the score of the class one rank higher; the first class is in every set.
        before = ops.concatenate([ops.zeros_like(total[:, :1]), total[:, :-1]], axis=1)
        rank = ops.argsort(order, axis=1)
        score, before = (ops.take_along_axis(x, rank, axis=1) for x in (total, before))
        return {"score": score, "before": before, "probability": p}

    def _by_groups(self, parts: dict[str, Any], groups: Any) -> np.ndarray:
        limits, count = self.thresholds, len(next(iter(parts.values())))
        answer = self._answer(parts, limits[_groups(groups, count, len(limits))])
        return ops.convert_to_numpy(answer)

    def _scores(self, parts: dict[str, Any], stream: int) -> Any:
        if self.randomized is None:
            return parts["score"]
        u = np.random.default_rng([self.randomized, stream]).random((len(parts["score"]), 1))
        return parts["score"] - u.astype("float32") * parts["probability"]

    def _answer(self, parts: dict[str, Any], limits: Any) -> Any:
        """Return sets or intervals by thresholds of each example, or of all."""
        if not self._is_set:
            distance = limits[:, 0] * parts["scale"]
            return ops.stack([parts["low"] - distance, parts["high"] + distance], axis=1)
        if self.method == "lac" or self.randomized is not None:
            return self._scores(parts, 1) <= limits
        return parts["before"] < limits

    def _targets(self, parts: dict[str, Any], y: Any) -> np.ndarray:
        if not self._is_set:
            return finite_vector("y", numbers(y, 1, "`y`"), len(parts["low"]))
        found = classes(y, parts["score"].shape[1], "`y`")
        return finite_vector("y", found, len(parts["score"])).astype(int)

    def _threshold(self, scores: np.ndarray) -> float:
        rank = math.ceil((len(scores) + 1) * self.coverage - 1e-9)
        if rank > len(scores):
            needed = math.ceil(self.coverage / (1 - self.coverage) - 1e-9)
            wanted = f"{needed} examples, of each class and group if they are covered separately"
            raise ValueError(f"coverage={self.coverage} needs {wanted}; got {len(scores)}.")
        return np.sort(scores)[rank - 1]


def _groups(groups: Any, count: int, known: int | None = None) -> np.ndarray:
    if groups is None and known in (None, 1):
        return np.zeros(count, int)
    if groups is None:
        raise ValueError("`groups` must be given, as they were to `fit`; got None.")
    found = finite_vector("groups", groups, count)
    if np.any((found < 0) | (found % 1 > 0) | (found >= (known or np.inf))):
        raise ValueError(f"`groups` must be whole numbers that `fit` saw; got {np.unique(found)}.")
    return found.astype(int)
