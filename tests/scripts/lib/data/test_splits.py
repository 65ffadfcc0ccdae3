"""The validation split: sizes, shares, order, and the frozen choice."""

import numpy as np
import pytest

from lib.data import validation_split

pytestmark = pytest.mark.once


def labels(*counts, seed=0):
    y = np.repeat(np.arange(len(counts)), counts)
    return np.random.RandomState(seed).permutation(y).astype(np.int32)


@pytest.mark.parametrize("size", [1, 7, 10, 100, 333, 499])
@pytest.mark.parametrize("counts", [(50,) * 10, (5, 45, 150, 300), (499, 1)])
def test_every_class_keeps_its_share(size, counts):
    y = labels(*counts)
    x = np.arange(len(y))
    (x_train, y_train), (x_val, y_val) = validation_split(x, y, size)
    assert len(x_val) == len(y_val) == size
    assert len(x_train) == len(y_train) == 500 - size
    shares = np.bincount(y_val, minlength=len(counts))
    assert np.all(np.abs(shares - size * np.array(counts) / 500) < 1)
    # A partition, in order, with each label at its image.
    np.testing.assert_array_equal(np.sort(np.concatenate([x_train, x_val])), x)
    assert np.all(np.diff(x_train) > 0)
    assert np.all(np.diff(x_val) > 0)
    np.testing.assert_array_equal(y[x_val], y_val)
    np.testing.assert_array_equal(y[x_train], y_train)


def test_seed_decides():
    x, y = np.arange(60), labels(20, 20, 20)
    first, again, other = (validation_split(x, y, 9, seed=seed)[1][0] for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_choice_is_frozen():
    x, y = np.arange(12), np.arange(12) % 3
    _, (x_val, y_val) = validation_split(x, y, 4, seed=1)
    assert x_val.tolist() == [1, 6, 9, 11]
    assert y_val.tolist() == [1, 0, 0, 2]


def test_images_and_types_are_kept():
    x = np.arange(10 * 4 * 4 * 3, dtype=np.uint8).reshape(10, 4, 4, 3)
    y = labels(5, 5)
    (x_train, y_train), (x_val, _) = validation_split(x, y, 2)
    assert x_train.shape == (8, 4, 4, 3)
    assert x_val.dtype == np.uint8
    assert y_train.dtype == np.int32
    x_train[:] = 0
    assert x.any()  # copies


def test_labels_need_not_start_at_zero():
    y = np.array([-7, 90, -7, 90])
    _, (_, y_val) = validation_split(np.arange(4), y, 2)
    assert sorted(y_val) == [-7, 90]


@pytest.mark.parametrize(
    ("x", "y", "size", "seed", "message"),
    [
        (np.zeros(4), np.zeros((4, 2), int), 1, 0, "`y` must be integers .*`y.argmax"),
        (np.zeros(4), np.zeros(4), 1, 0, "`y` must be integers of shape \\(N,\\); got float64"),
        (np.zeros(3), np.zeros(4, int), 1, 0, "`x` must have as many rows as `y`, 4; got .*(3,)"),
        (np.zeros(()), np.zeros(4, int), 1, 0, "`x` must have as many rows"),
        (np.zeros(4), np.zeros(4, int), 4, 0, "`size` must be .* from 1 to 3; got 4"),
        (np.zeros(4), np.zeros(4, int), 0, 0, "`size` must be a whole number from 1 to 3"),
        (np.zeros(4), np.zeros(4, int), 0.5, 0, "`size` must be a whole number from 1 to 3"),
    ],
)
def test_errors(x, y, size, seed, message):
    with pytest.raises(ValueError, match=message):
        validation_split(x, y, size, seed)
