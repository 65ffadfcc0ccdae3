"""Conformal prediction: sets and intervals that hold the truth with a chosen probability."""

from typing import Any

import keras
import numpy as np
from keras import ops
from scipy.stats import binomtest

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn.data.datasets import is_dataset
from tfp_ibnn.data.examples import unpacked
from tfp_ibnn.decisions.fitted import Fitted, has_positions
from tfp_ibnn.decisions.groups import group_ids, places_of_groups
from tfp_ibnn.decisions.hashing import uniform, uniform_of_arrays
from tfp_ibnn.decisions.images import OfImages
from tfp_ibnn.decisions.limits import Limited


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Conformal(OfImages, Limited, Fitted):
    """Sets of classes, or intervals, that hold the truth with probability `coverage` or more.

    The probability is over calibration sets and new examples, which must be exchangeable; the model
    may be wrong. The threshold q is the ceil((n + 1) coverage)-th smallest of n scores. What ties
    with q is in, and all rounding is outward: ties can only raise the coverage.

    Outputs with positions (N, ..., K), such as pixels or time steps, have a set or interval each.
    The pixels of an image are not exchangeable with those of others, so n is the number of images,
    which count equally, and `per` says what is promised:

    - "pixel": of a new image, the share of pixels that are covered is `coverage` or more in the
      mean. q is the smallest number for which the shares of pixels above it, summed over the
      images, are at most (n + 1) (1 - coverage) - 1: conformal risk control (2208.02814).
    - "image": with probability `coverage` or more, at least the `share` of a new image's pixels is
      covered. An image's score is the smallest threshold that covers this share.

    - "lac": 1 - p_y. A set holds the classes with 1 - p <= q: the smallest sets (arXiv 1609.00451).
    - "aps": the sum of the probabilities from the largest down to p_y. A set holds the classes down
      to the one at which the sum reaches q, that one included (2006.02544).
    - "raps": "aps" with `penalty` * max(0, rank - `k`) added, for smaller sets (2009.14193).
    - "split", of numbers: |y - mean|, divided by the predicted deviation of a Gaussian head.
    - "cqr": how far y lies outside of two quantiles: the outputs of a "point" head of size 2, or
      else the interval of a `MonteCarlo`, of a `QuantileHead` perhaps, whose `interval` is
      `coverage` unless given (1905.03222).

    Args:
        model: a `MonteCarlo`, or a model or posterior that `MonteCarlo` takes.
        method: one of the above; None takes "lac" for classes, and "split" for numbers.
        coverage: between 0 and 1.
        by: "class" gives each class a threshold, so that each is covered; or None.
        randomized: a seed. Then u p, with u uniform, is subtracted from the scores of "aps" and
            "raps": coverage is exact, and sets can be empty. u is a hash of the seed and of the
            example's inputs, numbers in float32 or strings: an example has the same set alone, in
            any batch, and exported. Identical inputs share their u, so their scores can tie: where
            many are identical, coverage is above `coverage`, as it is without u.
        k: of "raps", the number of classes without a penalty.
        penalty: of "raps".
        per: what is covered, "pixel" or "image", for outputs with positions; see above.
        share: of an image's pixels, between 0 and 1, for `per="image"`.
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
        per: str = "pixel",
        share: float = 0.9,
        **kwargs: Any,
    ) -> None:
        coverage = checks.probability("coverage", coverage)
        defaults = {"interval": coverage} if method == "cqr" else {}
        super().__init__(model, defaults, **kwargs)
        self.coverage = coverage
        self._likelihood = self.inner.likelihood
        self._is_set = self._likelihood.is_classifier
        methods = ("lac", "aps", "raps") if self._is_set else ("split", "cqr")
        if method is None:
            method = methods[0]
        self.method = checks.one_of("method", method, methods)
        groupings = (None, "class") if self._is_set else (None,)
        self.by = checks.one_of("by", by, groupings)
        self.randomized = self._checked_seed(randomized)
        self.k = checks.whole("k", k)
        self.penalty = checks.non_negative("penalty", penalty)
        self.per = checks.one_of("per", per, ("pixel", "image"))
        self.share = checks.probability("share", share)
        self._has_positions = has_positions(self.inner)
        self._group_ids: np.ndarray | None = None

    def _checked_seed(self, randomized: Any) -> int | None:
        if randomized is None:
            return None
        if self.method not in ("aps", "raps"):
            raise ValueError(f"`randomized` is for 'aps' and 'raps'; `method` is {self.method!r}.")
        if has_positions(self.inner):
            raise ValueError("`randomized` is for outputs without positions: leave it out.")
        if isinstance(randomized, bool):
            raise ValueError(f"`randomized` must be None or a seed, such as 0; got {randomized}.")
        return checks.whole("randomized", randomized)

    def fit(
        self, x: Any, y: Any = None, groups: Any = None, sample_weight: Any = None, **options: Any
    ) -> "Conformal":
        """Calibrate with examples that the model was not trained on, and return the object.

        Args:
            x: inputs; or a dataset of batches (x, y), read once: a `tf.data.Dataset`, a `PyDataset`
                or a generator.
            y: classes or numbers, (N,) or, at positions, (N, ...), for arrays.
            groups: any whole numbers (N,), for arrays. They give each group a threshold, so that
                each is covered; `predict` and `evaluate` then take them too.
            sample_weight: how much each position counts in its image, (N, ...), for arrays; a
                dataset gives it as the third part of a batch. 0 leaves it out, as a mask does.
            **options: of Keras's `predict`, such as `batch_size` or `verbose` (0); of datasets
                `verbose` alone.

        Returns:
            The object itself, whose `thresholds` are now known.

        Raises:
            ValueError: if there are too few examples for the coverage, of a class or group too if
                they are covered separately.
        """
        if self._has_positions:
            limits, ids = self.fit_images(x, y, groups, sample_weight, options)
        else:
            _check_no_weight(sample_weight)
            limits, ids = self._fit_examples(x, y, groups, options)
        self.keep({"limits": _rounded_up(limits)})
        self._group_ids = ids
        return self

    def _fit_examples(
        self, x: Any, y: Any, groups: Any, options: dict[str, Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return thresholds (groups, columns), and the ids of the groups."""
        parts, y = self._run_labelled(x, y, groups, options)
        y = self._targets(parts, y)
        groups = group_ids(groups, len(y))
        ids, places = np.unique(groups, return_inverse=True)
        scores = self._scores(parts, y)
        columns = 1
        cells = places
        if self.by is not None:
            columns = parts["score"].shape[1]
            cells = places * columns + y
        by_cell = _split(scores, cells, len(ids) * columns)
        limits = [self._threshold(scores) for scores in by_cell]
        return np.reshape(limits, (-1, columns)), ids

    def predict(self, x: Any, groups: Any = None, **options: Any) -> np.ndarray:
        """Return sets of classes or intervals.

        Args:
            x: inputs, or a dataset of batches, as for `fit`.
            groups: whole numbers (N,), if `fit` was given some.
            **options: of Keras's `predict`, such as `batch_size` or `verbose` (0).

        Returns:
            Sets, booleans (N, classes), or intervals (N, 2), the lower end first; at positions
            (N, ..., classes) or (N, ..., 2).
        """
        if self._has_positions:
            return self.predict_images(x, groups, options)
        if self.randomized is not None and is_dataset(x):
            parts, _ = self._run_batches(x, options)
        else:
            parts = self._run(x, options)
        return self._by_groups(parts, groups)

    def evaluate(
        self, x: Any, y: Any = None, groups: Any = None, sample_weight: Any = None, **options: Any
    ) -> dict[str, float]:
        """Return how often sets or intervals hold the truth, and their mean size.

        Args:
            x: inputs; or a dataset of batches (x, y), as for `fit`.
            y: classes or numbers, for arrays.
            groups: whole numbers (N,), if `fit` was given some.
            sample_weight: as for `fit`.
            **options: of Keras's `predict`, such as `batch_size` or `verbose` (0).

        Returns:
            A dict with these keys:

            - "coverage": the share of examples whose set or interval holds the truth; at positions,
                one of the next two, as `per` says;
            - "pixel_coverage" and "image_coverage", at positions only: the mean over images of the
                share of pixels that are covered, and the share of images of which at least the
                `share` is;
            - "lower" and "upper": the 95 % interval of the coverage, exact (Clopper-Pearson), or,
                of pixels, by the normal approximation for the mean of images;
            - "size": the mean number of classes in a set, or length of an interval.
        """
        if self._has_positions:
            return self.evaluate_images(x, y, groups, sample_weight, options)
        _check_no_weight(sample_weight)
        parts, y = self._run_labelled(x, y, groups, options)
        y = self._targets(parts, y)
        answer = self._by_groups(parts, groups)
        is_covered, sizes = self._judged(answer, y)
        covered = int(is_covered.sum())
        lower, upper = binomtest(covered, len(y)).proportion_ci()
        return {
            "coverage": float(is_covered.mean()),
            "lower": float(lower),
            "upper": float(upper),
            "size": float(sizes.mean()),
        }

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
            nearest = arrays.pop("thresholds")
            thresholds = np.nextafter(nearest, np.float32(np.inf))
            one = np.float64(self._is_set)
            arrays["limits"] = _rounded_up(thresholds - one)
        if ids is None and arrays:  # of version 0.1.0, whose ids were 0, 1, 2, ...
            ids = np.arange(len(arrays["limits"]))
        self.keep(arrays)
        self._group_ids = ids

    def call(self, inputs: Any) -> dict[str, Tensor]:
        """Return the dict of `MonteCarlo` for one batch, with a set or interval.

        Args:
            inputs: the batch.

        Returns:
            What `MonteCarlo` gives, and "set", booleans (N, ..., classes), or "interval",
            (N, ..., 2).

        Raises:
            ValueError: if `fit` was given several groups.
        """
        prediction = self.inner.average(inputs)
        limits = self.arrays["limits"]
        if limits.shape[0] > 1:
            raise ValueError("Sets by groups are for `predict` alone.")
        u = None if self.randomized is None else uniform(inputs, self.randomized)
        parts = self._parts(prediction, u)
        answer = self._answer(parts, limits)
        if self._has_positions:
            *positions, _ = ops.shape(prediction["mean"])
            answer = ops.reshape(answer, (*positions, answer.shape[-1]))
        name = "set" if self._is_set else "interval"
        return {**prediction, name: answer}

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
        batches = []
        for inputs, labels, weight in unpacked(x, "x", options.get("verbose", 0)):
            if weight is not None:
                raise ValueError("`x` must give batches (x, y): sets take no `sample_weight`.")
            inputs = keras.tree.map_structure(ops.convert_to_numpy, inputs)
            prediction = self.inner.predict_on_batch(inputs)
            parts = self._parts(prediction, self._uniform_of(inputs))
            if labels is not None:
                labels = ops.convert_to_numpy(labels)
            batches.append((_as_arrays(parts), labels))
        return keras.tree.map_structure(_joined, *batches)

    def _run(self, x: Any, options: dict[str, Any]) -> dict[str, Any]:
        u = self._uniform_of(x)  # which checks that these are arrays
        prediction = self.inner.predict(x, **{"verbose": 0, **options})
        return _as_arrays(self._parts(prediction, u))

    def _uniform_of(self, x: Any) -> np.ndarray | None:
        """Return a uniform number for each example of arrays, (N,), if there is a seed."""
        if self.randomized is None:
            return None
        return uniform_of_arrays(x, self.randomized)

    def _by_groups(self, parts: dict[str, Any], groups: Any) -> np.ndarray:
        """Return sets or intervals by the limits of each example's group."""
        limits = ops.convert_to_numpy(self.arrays["limits"])
        count = len(next(iter(parts.values())))
        places = places_of_groups(groups, self._group_ids, count)
        answer = self._answer(parts, limits[places])
        return ops.convert_to_numpy(answer)


def _check_no_weight(sample_weight: Any) -> None:
    if sample_weight is not None:
        raise ValueError("`sample_weight` is for outputs with positions only: leave it out.")


def _split(values: np.ndarray, cells: np.ndarray, count: int) -> list[np.ndarray]:
    """Return the values (N,) of each of `count` cells, by the cell of each value."""
    order = np.argsort(cells, kind="stable")
    ends = np.cumsum(np.bincount(cells, minlength=count))
    return np.split(values[order], ends[:-1])


def _as_arrays(parts: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: ops.convert_to_numpy(part) for name, part in parts.items()}


def _joined(*parts: Any) -> Any:
    return None if parts[0] is None else np.concatenate(parts)


def _rounded_up(values: np.ndarray) -> np.ndarray:
    """Return the smallest numbers of float32 that are not below the values."""
    nearest = values.astype("float32")
    above = np.nextafter(nearest, np.float32(np.inf))
    return np.where(nearest < values, above, nearest)
