"""Conformal prediction: sets and intervals that hold the truth with a chosen probability."""

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.serialization import ConfiguredLayer
from tfp_ibnn.decisions.decide import clopper_pearson
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.metrics._base import checked
from tfp_ibnn.metrics.detection import finite_vector
from tfp_ibnn.prediction.head import PredictionWrapper
from tfp_ibnn.prediction.monte_carlo import MonteCarlo
from tfp_ibnn.prediction.predictive import Categorical, Gaussian, Labels, Point

Parts = dict[str, Any]


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Conformal(ConfiguredLayer, PredictionWrapper, keras.Model):
    """Sets of classes, or intervals, that hold the truth with probability `coverage` or more.

    The probability is over calibration sets and new examples, which must be exchangeable; the model
    may be wrong. The threshold q is the ceil((n + 1) coverage)-th smallest of n scores:

    - "lac": 1 - p_y. A set holds the classes with 1 - p <= q: the smallest sets on average.
    - "aps": the sum of the probabilities from the largest down to p_y. A set holds the classes down
      to the one at which the sum reaches q, that one included: it is never empty.
    - "raps": "aps" with `penalty` * max(0, rank - `k`) added: large sets become smaller.
    - "split", of numbers: |y - mean|, divided by the predicted deviation of a Gaussian head.
    - "cqr": how far y lies outside of two quantiles: the outputs of a "point" head of size 2, or
      else the interval of a `MonteCarlo`, whose `interval` is `coverage` unless given.

    A Keras model, for `.keras` files and `export`: a call returns what `predict` does, but by the
    largest threshold of all groups and not randomized, which covers as much or more.

    Args:
        model: a `MonteCarlo`, or a model or posterior that `MonteCarlo` takes.
        method: one of the above.
        coverage: between 0 and 1.
        by: "class" gives each class a threshold, so that each is covered; or None.
        randomized: a seed. Then u p, with u uniform, is subtracted from the scores of "aps" and
            "raps": coverage is exact, and sets can be empty.
        k: of "raps", the number of classes without a penalty.
        penalty: of "raps".
        **kwargs: those of `keras.Model`.

    References:
        arXiv 1609.00451 (LAC), 2006.02544 (APS), 2009.14193 (RAPS), 1905.03222 (CQR).
    """

    arguments = ("method", "coverage", "by", "randomized", "k", "penalty")

    def __init__(
        self,
        model: Any,
        method: str = "lac",
        coverage: float = 0.9,
        by: str | None = None,
        randomized: int | None = None,
        k: int = 1,
        penalty: float = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**{"autocast": False, **kwargs})
        self.coverage = checks.probability("coverage", coverage)
        self.inner = with_seed(model, **({"interval": coverage} if method == "cqr" else {}))
        self.thresholds, self._kind, self.built = None, self.inner._predictive, True
        self._is_set = isinstance(self._kind, Categorical)
        choices = ("lac", "aps", "raps") if self._is_set else ("cqr", "split")
        self.method = checks.one_of("method", method, choices)
        self.by = checks.one_of("by", by, (None, "class") if self._is_set else (None,))
        if randomized is not None and method not in ("aps", "raps"):
            raise ValueError(f"`randomized` is for 'aps' and 'raps'; `method` is {method!r}.")
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
        found = [self._threshold(scores[cells == i]) for i in range((groups.max() + 1) * classes)]
        self.thresholds = np.reshape(found, (-1, classes))
        return self

    def predict(self, x: Any, groups: Any = None, **options: Any) -> np.ndarray:
        """Return sets, booleans (N, classes), or intervals (N, 2); the options are Keras's."""
        return self._answer(self._run(x, options), groups)

    def evaluate(self, x: Any, y: Any, groups: Any = None, **options: Any) -> dict[str, float]:
        """Return `coverage`, the share covered, and `size`, the mean of a set or interval.

        `lower` and `upper` are the exact (Clopper-Pearson) 95 % interval of the share.
        """
        parts = self._run(x, options)
        y, answer = self._targets(parts, y), self._answer(parts, groups)
        if self._is_set:
            covered, size = answer[np.arange(len(y)), y], answer.sum(axis=1).mean()
        else:
            covered = (answer[:, 0] <= y) & (y <= answer[:, 1])
            size = np.maximum(answer[:, 1] - answer[:, 0], 0).mean()
        lower, upper = clopper_pearson(int(covered.sum()), len(y))
        return {
            "coverage": float(covered.mean()),
            "lower": lower,
            "upper": upper,
            "size": float(size),
        }

    def call(self, inputs: Any) -> Tensor:
        parts = self._parts(self.inner(inputs))
        return self._cover(parts, self._fitted().max(axis=0))

    def save_own_variables(self, store: Any) -> None:
        store["thresholds"] = self._fitted()

    def load_own_variables(self, store: Any) -> None:
        self.thresholds = np.asarray(store["thresholds"])

    def _fitted(self) -> np.ndarray:
        if self.thresholds is None:
            raise ValueError("The thresholds are not known: call `fit` with calibration data.")
        return self.thresholds

    def _run(self, x: Any, options: dict[str, Any]) -> Parts:
        parts = self._parts(self.inner.predict(x, **{"verbose": 0, **options}))
        return {name: ops.convert_to_numpy(part) for name, part in parts.items()}

    def _parts(self, prediction: Parts) -> Parts:
        """Return what thresholds act on: (N, classes) of sets, (N,) of intervals."""
        prediction = {name: ops.convert_to_tensor(x) for name, x in prediction.items()}
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
        p = ops.concatenate([1 - p, p], axis=-1) if isinstance(self._kind, Labels) else p
        if self.method == "lac":
            return {"score": 1 - p}
        order = ops.argsort(-p, axis=-1)
        rank = ops.argsort(order, axis=-1)
        total = ops.cumsum(ops.take_along_axis(p, order, axis=-1), axis=-1)
        if self.method == "raps":
            above = ops.arange(1, p.shape[-1] + 1, dtype=p.dtype) - self.k
            total = total + self.penalty * ops.maximum(above, 0)
        # `before` is the score of the class one rank higher; the first class is in every set.
        before = ops.concatenate([ops.zeros_like(total[:, :1]), total[:, :-1]], axis=-1)
        score, before = (ops.take_along_axis(x, rank, axis=-1) for x in (total, before))
        return {"score": score, "before": before, "probability": p}

    def _scores(self, parts: Parts, stream: int) -> np.ndarray:
        if self.randomized is None:
            return parts["score"]
        u = np.random.default_rng([self.randomized, stream]).random((len(parts["score"]), 1))
        return parts["score"] - u * parts["probability"]

    def _cover(self, parts: Parts, limits: np.ndarray) -> Any:
        if self._is_set:
            return parts["score"] <= limits if self.method == "lac" else parts["before"] < limits
        distance = limits[..., 0] * parts["scale"]
        return ops.stack([parts["low"] - distance, parts["high"] + distance], axis=-1)

    def _answer(self, parts: Parts, groups: Any) -> np.ndarray:
        limits, count = self._fitted(), len(next(iter(parts.values())))
        limits = limits[_groups(groups, count, len(limits))]
        if self.randomized is not None:
            return self._scores(parts, 1) <= limits
        return np.asarray(self._cover(parts, limits))

    def _targets(self, parts: Parts, y: Any) -> np.ndarray:
        if not self._is_set:
            return finite_vector("y", y, len(parts["low"]))
        uniform = np.full_like(parts["score"], 1 / parts["score"].shape[1])
        return checked(uniform, y, names=("model(x)", "y", "")).targets.argmax(axis=1)

    def _threshold(self, scores: np.ndarray) -> np.float32:
        rank = math.ceil((len(scores) + 1) * self.coverage - 1e-9)
        if rank > len(scores):
            needed = math.ceil(self.coverage / (1 - self.coverage) - 1e-9)
            wanted = f"{needed} examples, of each class and group if they are covered separately"
            raise ValueError(f"coverage={self.coverage} needs {wanted}; got {len(scores)}.")
        return np.float32(np.sort(scores)[rank - 1])


def with_seed(model: Any, **defaults: Any) -> MonteCarlo:
    """Return a `MonteCarlo` with a seed, so that later calls see the draws that `fit` saw."""
    if not isinstance(model, MonteCarlo):
        is_plain = isinstance(model, keras.Model) and not stochastic_layers(model)
        model = MonteCarlo(model, samples=1 if is_plain else 128)
    options = model.options()
    missing = {k: v for k, v in {"seed": 0, **defaults}.items() if options[k] is None}
    return type(model)(model.inner, **{**options, **missing}) if missing else model


def _groups(groups: Any, count: int, known: int | None = None) -> np.ndarray:
    """Return the group of each example, or raise; `known` is how many groups `fit` saw."""
    if groups is None and known in (None, 1):
        return np.zeros(count, int)
    found = finite_vector("groups", () if groups is None else groups, count)
    if np.any((found < 0) | (found % 1 > 0) | (found >= (known or np.inf))):
        raise ValueError(f"`groups` must be whole numbers that `fit` saw; got {np.unique(found)}.")
    return found.astype(int)
