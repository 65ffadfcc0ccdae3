"""Conformal prediction: sets and intervals that hold the truth with a chosen probability."""

import math
from typing import Any

import keras
import numpy as np
from keras import ops
from scipy.stats import binomtest

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.data.datasets import is_dataset
from tfp_ibnn.data.examples import unpacked
from tfp_ibnn.decisions.fitted import Fitted
from tfp_ibnn.decisions.hashing import uniform, uniform_of_arrays
from tfp_ibnn.likelihoods import Categorical, Gaussian, Labels
from tfp_ibnn.likelihoods.categorical import classes
from tfp_ibnn.likelihoods.numbers import finite_numbers
from tfp_ibnn.metrics.detection import finite_vector

# How far a prediction may be from the same example's in another batch, another graph or a file: in
# a probability, after the exponential, and in a number. Scores this close count as ties.
_SAME_PROBABILITY = 1e-5
_SAME_NUMBER = 4 * float(np.finfo("float32").eps)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Conformal(Fitted):
    """Sets of classes, or intervals, that hold the truth with probability `coverage` or more.

    The probability is over calibration sets and new examples, which must be exchangeable; the model
    may be wrong. The threshold q is the ceil((n + 1) coverage)-th smallest of n scores. What ties
    with q is in, and all rounding is outward: ties can only raise the coverage.

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
            "raps": coverage is exact, and sets can be empty. u is a hash of the seed and of the
            example's inputs, in float32: an example has the same set alone, in any batch, and
            exported. Identical inputs share their u, so their scores can tie: where many are
            identical, coverage is above `coverage`, as it is without u.
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
        self.coverage = coverage
        self._likelihood = self.inner.likelihood
        self._is_set = self._likelihood.is_classifier
        choices = ("lac", "aps", "raps") if self._is_set else ("split", "cqr")
        self.method = method = checks.one_of("method", method or choices[0], choices)
        self.by = checks.one_of("by", by, (None, "class") if self._is_set else (None,))
        if randomized is not None and method not in ("aps", "raps"):
            raise ValueError(f"`randomized` is for 'aps' and 'raps'; `method` is {method!r}.")
        if isinstance(randomized, bool):
            raise ValueError(f"`randomized` must be None or a seed, such as 0; got {randomized}.")
        self.randomized = None if randomized is None else checks.whole("randomized", randomized)
        self._group_ids: np.ndarray | None = None
        self.k, self.penalty = checks.whole("k", k), checks.non_negative("penalty", penalty)

    def fit(self, x: Any, y: Any = None, groups: Any = None, **options: Any) -> "Conformal":
        """Calibrate with examples that the model was not trained on, and return the object.

        Args:
            x: inputs; or a dataset of batches (x, y), read once: a `tf.data.Dataset`, a `PyDataset`
                or a generator.
            y: classes or numbers, for arrays.
            groups: any whole numbers (N,), for arrays. They give each group a threshold, so that
                each is covered; `predict` and `evaluate` then take them too.
            **options: of Keras's `predict`, such as `batch_size` or `verbose` (0); of datasets
                `verbose` alone.
        """
        parts, y = self._run_labelled(x, y, groups, options)
        y = self._targets(parts, y)
        ids, groups = np.unique(_group_ids(groups, len(y)), return_inverse=True)
        if self._is_set:
            scores = parts["score"][np.arange(len(y)), y]
        else:
            scores = np.maximum(parts["low"] - y, y - parts["high"]) / parts["scale"]
        labels, classes = (y, parts["score"].shape[1]) if self.by else (0, 1)
        cells = groups * classes + labels
        ends = np.cumsum(np.bincount(cells, minlength=len(ids) * classes))
        cells = np.split(scores[np.argsort(cells, kind="stable")], ends[:-1])
        limits = np.reshape([*map(self._threshold, cells)], (-1, classes))
        self.keep({"limits": _rounded_up(limits)})
        self._group_ids = ids
        return self

    def predict(self, x: Any, groups: Any = None, **options: Any) -> np.ndarray:
        """Return sets, booleans (N, classes), or intervals (N, 2); the options are Keras's."""
        if self.randomized is not None and is_dataset(x):
            parts, _ = self._run_batches(x, options)
        else:
            parts = self._run(x, options)
        return self._by_groups(parts, groups)

    def evaluate(
        self, x: Any, y: Any = None, groups: Any = None, **options: Any
    ) -> dict[str, float]:
        """Return `coverage`, its exact 95 % interval `lower` to `upper`, and the mean `size`.

        The arguments are those of `fit`.
        """
        parts, y = self._run_labelled(x, y, groups, options)
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
        """What `fit` found, (groups, 1) in the order of the ids; (groups, classes) with `by`."""
        limits = ops.convert_to_numpy(self.arrays["limits"])
        return limits + 1 if self._is_set else limits

    def save_own_variables(self, store: Any) -> None:
        super().save_own_variables(store)
        if self._group_ids is not None:  # beside the weights, which hold no integers of 64 bits
            store["groups"] = self._group_ids

    def load_own_variables(self, store: Any) -> None:
        arrays = {name: np.asarray(store[name]) for name in store.keys()}
        ids = arrays.pop("groups", None)
        if "thresholds" in arrays:  # of version 0.1.0, which rounded them to the nearest number
            thresholds = np.nextafter(arrays.pop("thresholds"), np.float32(np.inf))
            arrays["limits"] = _rounded_up(thresholds - np.float64(self._is_set))
        self.keep(arrays)
        # Files of version 0.1.0 have no ids: theirs were 0, 1, 2, ...
        self._group_ids = np.arange(len(arrays["limits"])) if ids is None and arrays else ids

    def call(self, inputs: Any) -> dict[str, Tensor]:
        """Return the dict of `MonteCarlo` for one batch, with the `set` or `interval`."""
        prediction, limits = self.inner.average(inputs), self.arrays["limits"]
        if limits.shape[0] > 1:
            raise ValueError("Sets by groups are for `predict` alone.")
        u = None if self.randomized is None else uniform(inputs, self.randomized)
        answer = self._answer(self._parts(prediction, u), limits)
        return {**prediction, "set" if self._is_set else "interval": answer}

    serve = call

    def _run_labelled(
        self, x: Any, y: Any, groups: Any, options: dict[str, Any]
    ) -> tuple[dict[str, Any], Any]:
        """Return what `_run` does, and the labels, of arrays or of a dataset."""
        if not is_dataset(x):
            return self._run(x, options), y
        if y is not None:
            raise ValueError("`y` must come from `x`, a dataset of batches (x, y): omit it.")
        if groups is not None:
            raise ValueError("`groups` are for arrays: give arrays x and y.")
        parts, y = self._run_batches(x, options)
        if y is None:
            raise ValueError("`x` must give batches (x, y) with labels; got inputs alone.")
        return parts, y

    def _run_batches(self, x: Any, options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Return what `_run` does, and the labels, in one pass, since it may be shuffled."""
        others = options.keys() - {"verbose"}
        if others:
            raise ValueError(f"`{min(others)}` is for arrays: `x` is a {type(x).__name__}.")
        found = []
        for inputs, labels, weight in unpacked(x, "x", options.get("verbose", 0)):
            if weight is not None:
                raise ValueError("`x` must give batches (x, y): sets take no `sample_weight`.")
            inputs = keras.tree.map_structure(ops.convert_to_numpy, inputs)
            u = None if self.randomized is None else uniform_of_arrays(inputs, self.randomized)
            parts = self._parts(self.inner.predict_on_batch(inputs), u)
            parts = {name: ops.convert_to_numpy(part) for name, part in parts.items()}
            found.append((parts, None if labels is None else ops.convert_to_numpy(labels)))
        return keras.tree.map_structure(_joined, *found)

    def _run(self, x: Any, options: dict[str, Any]) -> dict[str, Any]:
        u = None if self.randomized is None else uniform_of_arrays(x, self.randomized)
        prediction = self.inner.predict(x, **{"verbose": 0, **options})
        parts = self._parts(prediction, u)
        return {name: ops.convert_to_numpy(part) for name, part in parts.items()}

    def _parts(self, prediction: dict[str, Any], u: Any) -> dict[str, Any]:
        """Return what limits act on: (N, classes) of sets, (N,) of intervals."""
        prediction = {name: ops.cast(x, "float32") for name, x in prediction.items()}
        p = low = high = prediction["mean"]
        if self.method == "cqr" and self._likelihood.free_scale and p.shape[-1] == 2:
            low, high = p[..., :1], p[..., 1:]
        elif self.method == "cqr":
            low, high = prediction["lower"], prediction["upper"]
        if len(p.shape) != 2 or (type(self._likelihood) is not Categorical and low.shape[-1] != 1):
            raise ValueError(
                "`model` must predict classes (N, K), or one number per example, (N, 1); it "
                f"predicts {tuple(p.shape)}. ibnn.MonteCarlo takes such a model, and "
                "ibnn.TemperatureScaling if it predicts classes."
            )
        if self._is_set:
            is_one_label = isinstance(self._likelihood, Labels)
            return self._class_scores(ops.concatenate([1 - p, p], axis=1) if is_one_label else p, u)
        has_scale = self.method == "split" and isinstance(self._likelihood, Gaussian)
        scale = ops.sqrt(prediction["total_variance"]) if has_scale else ops.ones_like(low)
        return {"low": low[:, 0], "high": high[:, 0], "scale": scale[:, 0]}

    def _class_scores(self, p: Any, u: Any) -> dict[str, Any]:
        """Return each class's `score`, less 1, and the `margin` within which scores are the same.

        The 1 is left out because float32 has many numbers next to 0 and few next to 1: to an
        overconfident network all wrong classes would have the score 1.
        """
        if self.method == "lac":
            return {"score": -p, "margin": _SAME_PROBABILITY * p}
        order = ops.argsort(-p, axis=1)  # equal ones stay in order
        ascending = ops.flip(ops.take_along_axis(p, order, axis=1), axis=1)
        remaining = ops.flip(ops.cumsum(ascending, axis=1), axis=1)  # from each class down
        below = ops.concatenate([remaining[:, 1:], ops.zeros_like(p[:, :1])], axis=1)
        excess = np.maximum(np.arange(1, p.shape[1] + 1) - self.k, 0)
        penalty = (self.penalty * (self.method == "raps") * excess).astype("float32")
        score, margin = penalty - below, _SAME_PROBABILITY * (penalty + below)
        # `before` is the score of the class one rank higher; the first class is in every set.
        before = ops.concatenate([ops.full_like(p[:, :1], -np.inf), score[:, :-1]], axis=1)
        rank = ops.argsort(order, axis=1)
        score, before, margin = (
            ops.take_along_axis(x, rank, axis=1) for x in (score, before, margin)
        )
        if u is None:
            return {"score": score, "before": before, "margin": margin}
        taken_off = u[:, None] * p
        return {"score": score - taken_off, "margin": margin + _SAME_PROBABILITY * taken_off}

    def _by_groups(self, parts: dict[str, Any], groups: Any) -> np.ndarray:
        limits = ops.convert_to_numpy(self.arrays["limits"])
        count = len(next(iter(parts.values())))
        answer = self._answer(parts, limits[self._rows(groups, count)])
        return ops.convert_to_numpy(answer)

    def _rows(self, groups: Any, count: int) -> np.ndarray:
        """Return the place of each example's group among those that `fit` saw."""
        known = self._group_ids
        if groups is None and len(known) == 1:
            return np.zeros(count, int)
        if groups is None:
            raise ValueError("`groups` must be given, as they were to `fit`; got None.")
        found = _group_ids(groups, count)
        unknown = np.setdiff1d(found, known)
        if len(unknown):
            raise ValueError(
                f"`groups` has {_listed(unknown)}, of which `fit` saw no example; it saw "
                f"{_listed(known)}."
            )
        return np.searchsorted(known, found)

    def _answer(self, parts: dict[str, Any], limits: Any) -> Any:
        """Return sets or intervals by the limits of each example, or of all."""
        if self._is_set:
            is_in = parts["score"] <= limits + parts["margin"]
            return is_in | (parts["before"] < limits) if "before" in parts else is_in
        low, high = parts["low"], parts["high"]
        distance = limits[:, 0] * parts["scale"]
        low_margin = _SAME_NUMBER * (ops.abs(low) + ops.abs(distance))
        high_margin = _SAME_NUMBER * (ops.abs(high) + ops.abs(distance))
        return ops.stack([low - distance - low_margin, high + distance + high_margin], axis=1)

    def _targets(self, parts: dict[str, Any], y: Any) -> np.ndarray:
        if not self._is_set:
            return finite_vector("y", finite_numbers(y, 1, "`y`"), len(parts["low"]))
        found = classes(y, parts["score"].shape[1], "`y`")
        return finite_vector("y", found, len(parts["score"])).astype(int)

    def _threshold(self, scores: np.ndarray) -> float:
        rank = math.ceil((len(scores) + 1) * self.coverage - 1e-9)
        if rank > len(scores):
            needed = math.ceil(self.coverage / (1 - self.coverage) - 1e-9)
            wanted = f"{needed} examples, of each class and group if they are covered separately"
            raise ValueError(f"coverage={self.coverage} needs {wanted}; got {len(scores)}.")
        return np.sort(scores)[rank - 1]


def _joined(*parts: Any) -> Any:
    return None if parts[0] is None else np.concatenate(parts)


def _rounded_up(values: np.ndarray) -> np.ndarray:
    """Return the smallest numbers of float32 that are not below the values."""
    nearest = values.astype("float32")
    above = np.nextafter(nearest, np.float32(np.inf))
    return np.where(nearest < values, above, nearest)


def _group_ids(groups: Any, count: int) -> np.ndarray:
    """Return the group of each example as an integer: 0 without groups."""
    if groups is None:
        return np.zeros(count, "int64")
    found = np.ravel(np.asarray(groups))
    if len(found) != count:
        raise ValueError(f"`groups` must be {count} ids, one per example; got {len(found)}.")
    is_whole = found.dtype.kind in "biu"
    if found.dtype.kind == "f":
        is_whole = np.all((np.floor(found) == found) & (np.abs(found) < 2.0**63))
    if not is_whole:
        raise ValueError(
            f"`groups` must be whole numbers, such as np.unique(names, return_inverse=True)[1]; "
            f"got {_listed(found)}."
        )
    return found.astype("int64")


def _listed(values: np.ndarray, most: int = 8) -> str:
    """Return the first of some values as text."""
    return ", ".join(map(str, values[:most].tolist())) + ", ..." * (len(values) > most)
