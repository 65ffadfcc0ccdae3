"""Conformal prediction for outputs with positions: pixels of images, and steps of sequences.

The pixels of an image are not exchangeable with those of others: they have its difficulty in
common. So all counts are of images here, and a pixel has a share in its image.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from scipy.stats import binomtest

from tfp_ibnn.data.datasets import is_dataset
from tfp_ibnn.data.examples import Examples, some_at_a_time
from tfp_ibnn.data.positions import rows_of_labels
from tfp_ibnn.decisions.groups import group_ids, places_of_groups
from tfp_ibnn.prediction.padding import (
    Masks,
    mask_of_arrays,
    output_masks,
    weight_of_positions,
)

MOST_PIXELS = 10_000
"""How many pixels of an image a threshold is computed from."""

_ROUNDING = 1e-9  # of sums of shares


class Pixels(NamedTuple):
    """What the pixels of one image score, and their shares in it, which sum to 1."""

    scores: np.ndarray
    shares: np.ndarray


class _Batch(NamedTuple):
    """Predictions for some images."""

    parts: dict[str, np.ndarray]  # what limits act on, a row per pixel
    y: np.ndarray | None  # labels of the rows
    weight: np.ndarray  # (images, pixels); 0 of those that do not count
    positions: tuple[int, ...]  # (images, ...)

    def counted(self) -> "_Batch":
        """Return the same with only those rows that count."""
        if self.y is None:
            raise ValueError("The labels are missing: give `y`, or a dataset of batches (x, y).")
        counts = np.ravel(self.weight) > 0
        parts = {name: part[counts] for name, part in self.parts.items()}
        return self._replace(parts=parts, y=self.y[counts])


class _Scored(NamedTuple):
    """What the pixels of an image that are covered by one threshold score."""

    number: int  # of the image in its batch
    column: int  # of the threshold
    scores: np.ndarray
    weight: np.ndarray


def pixels_of(scores: np.ndarray, weight: np.ndarray, rng: np.random.Generator) -> Pixels:
    """Return the pixels of an image, at random `MOST_PIXELS` of them if there are more.

    A sample has the same share of pixels above any threshold in the mean, so that the guarantee
    stays what it is.

    Args:
        scores: of all pixels that count.
        weight: how much each counts, above 0.
        rng: source of the choice.
    """
    shares = weight / weight.sum()
    if len(scores) <= MOST_PIXELS:
        return Pixels(scores, shares)
    chosen = rng.choice(len(scores), MOST_PIXELS, p=shares)
    return Pixels(scores[chosen], np.full(MOST_PIXELS, 1 / MOST_PIXELS))


def image_score(scores: np.ndarray, weight: np.ndarray, share: float) -> float:
    """Return the smallest threshold that covers a share of an image's pixels.

    Args:
        scores: of all pixels that count.
        weight: how much each counts, above 0.
        share: of the pixels, by their weights.
    """
    order = np.argsort(scores)
    covered = np.cumsum(weight[order]) / weight.sum()
    place = np.searchsorted(covered, share - _ROUNDING)
    last = len(order) - 1
    smallest = order[min(place, last)]
    return float(scores[smallest])


def pixel_threshold(images: list[Pixels], coverage: float) -> float:
    """Return the threshold that covers the mean share of pixels, by conformal risk control.

    The share of an image's pixels above a threshold is a loss between 0 and 1 that falls as the
    threshold rises. With n exchangeable images, its mean over a new image is at most 1 - coverage
    for the smallest threshold at which the n losses sum to at most (n + 1) (1 - coverage) - 1
    (arXiv 2208.02814).

    Args:
        images: enough of them: (n + 1) (1 - coverage) is at least 1.
        coverage: between 0 and 1.
    """
    count = len(images)
    allowed = (count + 1) * (1 - coverage) - 1
    scores = np.concatenate([image.scores for image in images])
    shares = np.concatenate([image.shares for image in images])
    order = np.argsort(-scores)
    down_to = np.cumsum(shares[order])
    # Below this one, the sum of what is above would be too large.
    place = np.searchsorted(down_to, allowed + _ROUNDING, side="right")
    last = len(order) - 1
    smallest = order[min(place, last)]
    return float(scores[smallest])


class OfImages:
    """What `Conformal` does for outputs with positions."""

    def fit_images(
        self, x: Any, y: Any, groups: Any, sample_weight: Any, options: dict[str, Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return thresholds (groups, columns), and the ids of the groups.

        Args:
            x: inputs, or a dataset.
            y: labels of all positions, for arrays.
            groups: of the images, or None.
            sample_weight: of the positions, or None.
            options: `batch_size` and `verbose`.
        """
        cells: dict[tuple[int, int], list[Any]] = {}
        rng = np.random.default_rng(0)
        columns = 1
        for batch, ids in self._batches_of_images(x, y, groups, sample_weight, options):
            if self.by is not None:
                columns = batch.parts["score"].shape[1]
            for image in self._scores_of_images(batch):
                group = int(ids[image.number])
                kept = self._kept(image.scores, image.weight, rng)
                of_cell = cells.setdefault((group, int(image.column)), [])
                of_cell.append(kept)
        return self._limits_of_cells(cells, columns)

    def _limits_of_cells(
        self, cells: dict[tuple[int, int], list[Any]], columns: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the threshold of each group and column by its images, and the groups."""
        groups = sorted({group for group, _ in cells})
        if not groups:
            groups = [0]
        limits = np.empty((len(groups), columns))
        for row, column in np.ndindex(limits.shape):
            of_cell = cells.get((groups[row], column), [])
            limits[row, column] = self._limit(of_cell)
        return limits, np.array(groups)

    def predict_images(self, x: Any, groups: Any, options: dict[str, Any]) -> np.ndarray:
        """Return sets (N, ..., classes) or intervals (N, ..., 2).

        Args:
            x: inputs, or a dataset.
            groups: of the images, or None.
            options: `batch_size` and `verbose`.
        """
        answers = []
        for batch, ids in self._batches_of_images(x, None, groups, None, options):
            answer = self._answer_of_batch(batch, ids, groups)
            answers.append(answer.reshape(*batch.positions, -1))
        return np.concatenate(answers)

    def evaluate_images(
        self, x: Any, y: Any, groups: Any, sample_weight: Any, options: dict[str, Any]
    ) -> dict[str, float]:
        """Return what `evaluate` does, and the coverage of pixels and of images.

        Args:
            x: inputs, or a dataset.
            y: labels of all positions, for arrays.
            groups: of the images, or None.
            sample_weight: of the positions, or None.
            options: `batch_size` and `verbose`.
        """
        shares = []
        sizes = []
        for batch, ids in self._batches_of_images(x, y, groups, sample_weight, options):
            answer = self._answer_of_batch(batch, ids, groups)
            counts = np.ravel(batch.weight) > 0
            counted = batch.counted()
            labels = self._targets(counted.parts, counted.y)
            is_covered, size = self._judged(answer[counts], labels)
            shares.append(_means(is_covered, counts, batch.weight))
            sizes.append(_means(size, counts, batch.weight))
        shares = np.concatenate(shares)
        is_image_covered = shares >= self.share - _ROUNDING
        is_promised = is_image_covered if self.per == "image" else shares
        lower, upper = _interval(is_promised)
        return {
            "coverage": float(is_promised.mean()),
            "lower": float(lower),
            "upper": float(upper),
            "size": float(np.mean(np.concatenate(sizes))),
            "pixel_coverage": float(shares.mean()),
            "image_coverage": float(is_image_covered.mean()),
        }

    def _batches_of_images(
        self, x: Any, y: Any, groups: Any, sample_weight: Any, options: dict[str, Any]
    ) -> Iterator[tuple[_Batch, np.ndarray]]:
        """Yield the predictions for some images at a time, and the ids of their groups."""
        masks = output_masks(self.inner)
        start = 0
        for batch in _batches(x, y, groups, sample_weight, options):
            predicted = self._predicted(batch, masks)
            count = len(predicted.weight)
            ids = None
            if groups is not None:
                ids = np.ravel(groups)[start : start + count]
            start += count
            yield predicted, group_ids(ids, count)

    def _predicted(self, batch: Examples, masks: Masks | None) -> _Batch:
        prediction = self.inner.predict_on_batch(batch.x)
        *positions, _ = np.shape(prediction["mean"])
        positions = tuple(positions)
        tensors = self._parts(prediction, None)
        parts = keras.tree.map_structure(ops.convert_to_numpy, tensors)
        mask = None if masks is None else mask_of_arrays(masks, batch.x)
        weight = weight_of_positions(batch.weight, mask, positions)
        labels = None
        if batch.y is not None:
            labels = rows_of_labels(batch.y, positions)
        # Sums of shares in float32 would miss a share of 0.9 of ten pixels.
        by_image = weight.reshape(positions[0], -1).astype("float64")
        return _Batch(parts, labels, by_image, positions)

    def _scores_of_images(self, batch: _Batch) -> Iterator[_Scored]:
        """Yield what the pixels of each image score, with `by` those of each class."""
        counted = batch.counted()
        labels = self._targets(counted.parts, counted.y)
        scores = self._scores(counted.parts, labels)
        is_counted = batch.weight > 0
        weight = batch.weight[is_counted]
        counts = is_counted.sum(axis=1)
        end = 0
        for number, count in enumerate(counts):
            start = end
            end = start + count
            rows = np.arange(start, end)
            own_labels = labels[rows]
            for column in self._columns(own_labels):
                chosen = rows
                if self.by is not None:
                    chosen = rows[own_labels == column]
                yield _Scored(number, column, scores[chosen], weight[chosen])

    def _columns(self, labels: np.ndarray) -> Iterable[int]:
        """Return the columns of the thresholds by which the pixels of an image are covered."""
        if not len(labels):
            return ()
        return (0,) if self.by is None else np.unique(labels)

    def _kept(self, scores: np.ndarray, weight: np.ndarray, rng: np.random.Generator) -> Any:
        """Return what a threshold needs of an image."""
        if self.per == "image":
            return image_score(scores, weight, self.share)
        return pixels_of(scores, weight, rng)

    def _limit(self, images: list[Any]) -> float:
        """Return the threshold by some images, or raise if there are too few."""
        self._check_enough(len(images))
        if self.per == "image":
            return self._threshold(np.array(images))
        return pixel_threshold(images, self.coverage)

    def _answer_of_batch(self, batch: _Batch, ids: np.ndarray, groups: Any) -> np.ndarray:
        """Return sets or intervals, a row per pixel."""
        limits = ops.convert_to_numpy(self.arrays["limits"])
        count, pixels = batch.weight.shape
        given = None if groups is None else ids
        places = places_of_groups(given, self._group_ids, count)
        of_images = limits[places]
        of_rows = np.repeat(of_images, pixels, axis=0)
        answer = self._answer(batch.parts, of_rows)
        return ops.convert_to_numpy(answer)


def _batches(
    x: Any, y: Any, groups: Any, sample_weight: Any, options: dict[str, Any]
) -> Iterator[Examples]:
    """Yield some images of arrays or of a dataset at a time."""
    others = options.keys() - {"batch_size", "verbose"}
    if others:
        raise ValueError(f"`{min(others)}` is not for outputs with positions: leave it out.")
    batch_size = options.get("batch_size")
    if groups is not None and is_dataset(x):
        raise ValueError("`groups` are for arrays: give arrays x and y.")
    if groups is not None:
        group_ids(groups, Examples(x).size)
    for batch in some_at_a_time(x, y, sample_weight, batch_size, options.get("verbose", 0)):
        inputs = keras.tree.map_structure(ops.convert_to_numpy, batch.x)
        yield batch._replace(x=inputs)


def _interval(covered: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the mean of booleans, or of shares, of images."""
    count = len(covered)
    if covered.dtype == bool:
        interval = binomtest(int(covered.sum()), count).proportion_ci()
        return interval.low, interval.high
    mean = covered.mean()
    deviation = 1.0
    if count > 1:
        deviation = covered.std(ddof=1)
    margin = 1.96 * deviation / np.sqrt(count)
    lower = max(mean - margin, 0.0)
    upper = min(mean + margin, 1.0)
    return lower, upper


def _means(values: np.ndarray, counts: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the weighted means of each image that has a pixel that counts.

    Args:
        values: of the pixels that count.
        counts: whether each of all pixels does, (images * pixels,).
        weight: of all pixels, (images, pixels).
    """
    whole = np.zeros(weight.size)
    whole[counts] = values
    by_image = whole.reshape(weight.shape)
    sums = np.sum(by_image * weight, axis=1)
    totals = weight.sum(axis=1)
    has_pixels = totals > 0
    return sums[has_pixels] / totals[has_pixels]
