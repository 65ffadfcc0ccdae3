"""The scores of `OODDetector`, one class each, that compare features with those of training."""

from typing import Any, Self

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor, matmul
from tfp_ibnn._core.unrolling import map_first_axis
from tfp_ibnn.data.positions import MOST_POSITIONS
from tfp_ibnn.decisions.scores import check_softmax
from tfp_ibnn.likelihoods.categorical import classes
from tfp_ibnn.metrics.detection import finite_vector

_AT_ONCE = 8192  # training examples that a batch is compared with
_MOST_NEIGHBORS = 10_000  # positions that others are compared with, unless `bank` says how many
_SHORTEST = 1e-12  # length of features that are brought to length 1

Arrays = dict[str, Any]  # what a score learns, by name: weights of the detector, in its files too


class FeatureScore:
    """How unusual inputs are, by features (N, d) of a network; higher is more unusual.

    A new score is a subclass with `learn` and `of_features`, and an entry in `FEATURE_SCORES`.
    """

    name: str
    features = "features"
    """What an error calls the features."""
    needs_logits = False
    """Whether the features must be the inputs of a last Dense layer, which `learn` is given."""
    takes_classes = False
    """Whether `learn` is given the classes of the examples."""

    @property
    def most_positions(self) -> int:
        """How many positions, such as pixels, `learn` is given at most."""
        return MOST_POSITIONS

    @classmethod
    def with_options(cls, k: int, bank: int | None) -> Self:
        """Return the score by the options of the detector, which most scores have no use for.

        Args:
            k: which of the nearest neighbors is compared with.
            bank: how many training examples to keep.

        Returns:
            The score.
        """
        return cls()

    def check(self, likelihood: Any) -> None:
        """Raise if a model whose outputs mean that does not have the score."""

    def learn(self, features: np.ndarray, y: Any, layer: keras.layers.Layer) -> Arrays:
        """Return what the score needs to know of the training data.

        Args:
            features: (N, d), in float64.
            y: classes, (N,) or one-hot, or None.
            layer: the layer whose inputs the features are.

        Returns:
            Arrays by name.
        """
        raise NotImplementedError

    def of_features(self, features: Tensor, arrays: Arrays) -> Tensor:
        """Return the scores of features.

        Args:
            features: (N, d).
            arrays: what `learn` returned, and the `center` (d,) of the training features.

        Returns:
            Scores (N,).
        """
        raise NotImplementedError

    def upgraded(self, arrays: Arrays) -> Arrays:
        """Return the arrays of a file, which may be of an earlier version, as they are now."""
        return arrays


class Energy(FeatureScore):
    """Minus the log-sum-exp of the logits (arXiv 2010.03759)."""

    name = "energy"
    needs_logits = True

    def check(self, likelihood: Any) -> None:
        check_softmax(self.name, likelihood)

    def learn(self, features: np.ndarray, y: Any, layer: keras.layers.Layer) -> Arrays:
        kernel, *biases = (weight.astype("float64") for weight in layer.get_weights())
        kernel = kernel.reshape(features.shape[1], -1)  # that of a convolution has more axes
        bias = np.zeros(kernel.shape[1]) + sum(biases)
        return {"kernel": kernel, "bias": bias}

    def of_features(self, features: Tensor, arrays: Arrays) -> Tensor:
        logits = matmul(features, arrays["kernel"]) + arrays["bias"]
        return -ops.logsumexp(logits, axis=1)


class VirtualLogit(Energy):
    """The energy plus the scaled length outside of the principal subspace (2203.10807)."""

    name = "vim"

    def learn(self, features: np.ndarray, y: Any, layer: keras.layers.Layer) -> Arrays:
        head = super().learn(features, y, layer)
        kernel = head["kernel"]
        bias = head["bias"]
        origin = -np.linalg.pinv(kernel.T) @ bias
        outside = _outside_of_principal(features - origin)
        residuals = (features - origin) @ outside
        lengths = np.linalg.norm(residuals, axis=1)
        length = lengths.mean()
        height = _logit_height(features @ kernel + bias)
        varies = features.std(axis=0).any()
        if not height > 0 or not length > 0 or not varies:
            raise ValueError(
                "score='vim' needs features and logits that vary over the training data; these do "
                "not: take score='max_probability' or 'entropy'."
            )
        return {
            **head,
            "origin": origin,
            "outside": outside,
            "alpha": height / length,
        }

    def of_features(self, features: Tensor, arrays: Arrays) -> Tensor:
        energy = super().of_features(features, arrays)
        residuals = matmul(features - arrays["origin"], arrays["outside"])
        length = ops.norm(residuals, axis=1)
        return energy + arrays["alpha"] * length


def _outside_of_principal(deviations: np.ndarray) -> np.ndarray:
    """Return directions (d, m) of the least variance, the complement of the principal subspace."""
    count, width = deviations.shape
    principal = _principal_size(width)
    if count <= principal:
        raise ValueError(f"{width} features need more than {principal} examples; got {count}.")
    values, vectors = np.linalg.eigh(deviations.T @ deviations)  # the smallest values first
    # Dead units have no variance. Were all that is outside of that kind, there would be no scale.
    has_variance = values > 1e-10 * values[-1]
    dimensions = int(np.sum(has_variance))
    if dimensions <= principal:
        principal = dimensions // 2
    return vectors[:, : width - principal]


def _principal_size(width: int) -> int:
    """Return the dimensions of the principal subspace of features, as in the reference."""
    if width >= 2048:
        return 1000
    if width >= 768:
        return 512
    return width // 2


def _logit_height(logits: np.ndarray) -> float:
    """Return the mean of the largest logit, by which the residual is scaled."""
    largest = logits.max(axis=1).mean()
    if largest > 0:
        return largest
    # To shift all logits changes no probability; with a negative scale, less would be unusual.
    return largest - logits.mean()


class Mahalanobis(FeatureScore):
    """The squared distance to the nearest class mean, by the covariance within classes."""

    name = "mahalanobis"
    takes_classes = True

    def learn(self, features: np.ndarray, y: Any, layer: keras.layers.Layer) -> Arrays:
        labels = self._labels(y, len(features))
        center = features.mean(axis=0)
        means = np.stack([features[labels == c].mean(axis=0) for c in np.unique(labels)])
        if 2 * len(means) > len(features):
            raise ValueError(
                "`y` must hold classes with several examples each; got "
                f"{len(means)} for {len(features)} examples."
            )
        within = _whitening(features - means[labels])
        if not within.shape[1]:
            raise ValueError(
                f"score={self.name!r} needs features that vary within classes; these do not."
            )
        return {
            "within": within,
            "means": (means - center) @ within,
            "whole": self._whole(features - center),
        }

    def of_features(self, features: Tensor, arrays: Arrays) -> Tensor:
        white = matmul(features - arrays["center"], arrays["within"])

        # One class at a time: a^2 + b^2 - 2 a b has no digits left where classes are tight.
        def to_mean(mean: Tensor) -> Tensor:
            return ops.sum(ops.square(white - mean), axis=1)

        distances = map_first_axis(to_mean, arrays["means"])
        return ops.min(distances, axis=0)

    def _labels(self, y: Any, count: int) -> np.ndarray:
        """Return classes from 0 on (N,); without labels all examples are of one class."""
        if y is None:
            y = np.zeros(count)
        if np.ndim(y) == 2 and np.shape(y)[1] > 1:
            y = classes(y, np.shape(y)[1], "`y`, if not of the shape (N,),")
        y = finite_vector("y", y, count)
        _, labels = np.unique(y, return_inverse=True)
        return labels

    def _whole(self, deviations: np.ndarray) -> np.ndarray:
        """Return the map to unit covariance of all features, whose distance is subtracted."""
        return np.zeros((deviations.shape[1], 0))  # nothing is


class RelativeMahalanobis(Mahalanobis):
    """The same, less the squared distance to the mean of all, by their covariance (2106.09022)."""

    name = "relative_mahalanobis"

    def learn(self, features: np.ndarray, y: Any, layer: keras.layers.Layer) -> Arrays:
        if y is None:
            raise ValueError("`y` must hold the classes for 'relative_mahalanobis'; got None.")
        return super().learn(features, y, layer)

    def of_features(self, features: Tensor, arrays: Arrays) -> Tensor:
        to_nearest = super().of_features(features, arrays)
        white = matmul(features - arrays["center"], arrays["whole"])
        to_center = ops.sum(ops.square(white), axis=1)
        return to_nearest - to_center

    def _whole(self, deviations: np.ndarray) -> np.ndarray:
        return _whitening(deviations)


def _whitening(deviations: np.ndarray) -> np.ndarray:
    """Return the map to unit covariance, on the subspace that has variance."""
    covariance = deviations.T @ deviations / len(deviations)
    values, vectors = np.linalg.eigh(covariance)
    has_variance = values > 1e-7 * values.max()
    deviation = np.sqrt(values[has_variance])
    return vectors[:, has_variance] / deviation


class NearestNeighbors(FeatureScore):
    """The distance of features, of length 1, to the k-th nearest of training (2204.06507)."""

    name = "knn"

    def __init__(self, k: int, bank: int | None) -> None:
        self.k = k
        self.bank = bank

    @property
    def most_positions(self) -> int:
        return self.bank or _MOST_NEIGHBORS

    @classmethod
    def with_options(cls, k: int, bank: int | None) -> Self:
        return cls(k, bank)

    def learn(self, features: np.ndarray, y: Any, layer: keras.layers.Layer) -> Arrays:
        rng = np.random.default_rng(0)
        order = rng.permutation(len(features))
        bank = features[order[: self.bank]]
        if self.k > len(bank):
            raise ValueError(f"k={self.k} neighbors need as many examples; got {len(bank)}.")
        length = np.linalg.norm(bank, axis=1, keepdims=True)
        unit = bank / np.maximum(length, _SHORTEST)
        return _bank_arrays(unit)

    def of_features(self, features: Tensor, arrays: Arrays) -> Tensor:
        length = ops.norm(features, axis=1, keepdims=True)
        length = ops.maximum(length, _SHORTEST)
        unit = features / length
        # The order is found by products with what is left of them: else close ones look the same.
        bank = arrays["bank"]
        shifted = unit - arrays["middle"]
        columns = self._nearest_columns(shifted, bank, arrays["spread"])
        farthest = columns[:, -1]
        neighbors = ops.take(bank, farthest, axis=1)
        # The distance itself is the length of a difference.
        difference = unit - ops.transpose(neighbors)
        return ops.norm(difference, axis=1)

    def upgraded(self, arrays: Arrays) -> Arrays:
        if "bank" in arrays and "middle" not in arrays:  # of version 0.1.0
            columns = arrays["bank"].astype("float64")
            return arrays | _bank_arrays(columns.T)
        return arrays

    def _nearest_columns(self, shifted: Tensor, bank: Tensor, spread: Tensor) -> Tensor:
        """Return the columns (N, k) of the bank that are nearest, the nearest first."""
        closest = shifted[:, :0]
        columns = ops.cast(closest, "int32")
        for first in range(0, bank.shape[1], _AT_ONCE):
            block = slice(first, first + _AT_ONCE)
            products = matmul(shifted, bank[:, block])
            closeness = 2 * products - spread[block]
            closest, columns = self._merged(closest, columns, closeness, first)
        return columns

    def _merged(
        self, closest: Tensor, columns: Tensor, closeness: Tensor, first: int
    ) -> tuple[Tensor, Tensor]:
        """Return the k closest of those known and of a block that begins at a column."""
        known = closest.shape[1]
        candidates = ops.concatenate([closest, closeness], axis=1) if known else closeness
        count = min(self.k, candidates.shape[1])
        closest, places = ops.top_k(candidates, count)
        of_block = first + places - known
        if not known:
            return closest, of_block
        of_known = ops.minimum(places, known - 1)
        earlier = ops.take_along_axis(columns, of_known, axis=1)
        return closest, ops.where(places < known, earlier, of_block)


def _bank_arrays(unit: np.ndarray) -> Arrays:
    """Return features of length 1 as columns, their mean, and their squared distances to it."""
    middle = unit.mean(axis=0)
    squares = (unit - middle) ** 2
    return {
        "bank": unit.T,
        "middle": middle,
        "spread": np.sum(squares, axis=1),
    }


FEATURE_SCORES: dict[str, type[FeatureScore]] = {
    score.name: score
    for score in (Energy, VirtualLogit, Mahalanobis, RelativeMahalanobis, NearestNeighbors)
}
