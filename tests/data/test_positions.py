"""Samples of positions."""

import numpy as np
import pytest

from tfp_ibnn.data.positions import PositionSample, rows_of_labels

pytestmark = pytest.mark.once

ROWS = {"number": np.arange(50), "pair": np.arange(100).reshape(50, 2)}


def sampled(size, batch, seed=0, count=50):
    sample = PositionSample(size, seed)
    for start in range(0, count, batch):
        sample.add({name: part[:count][start : start + batch] for name, part in ROWS.items()})
    return sample


def test_all_are_kept_in_order_where_there_are_few():
    sample = sampled(50, 7)
    np.testing.assert_array_equal(sample.rows()["pair"], ROWS["pair"])
    assert sample.factor == 1


def test_a_sample_is_the_same_in_batches_of_any_size():
    rows = [sampled(10, batch).rows() for batch in (1, 7, 50)]
    for other in rows[1:]:
        np.testing.assert_array_equal(rows[0]["number"], other["number"])
    assert len(rows[0]["number"]) == 10
    np.testing.assert_array_equal(rows[0]["pair"][:, 0], 2 * rows[0]["number"])
    sample = sampled(10, 3)
    assert sample.factor == 5
    assert sample.total == 50


def test_each_position_is_as_likely():
    counts = np.zeros(50)
    for seed in range(300):
        counts[sampled(10, 9, seed).rows()["number"]] += 1
    # 60 each, with a standard deviation of 6.9
    assert 30 < counts.min()
    assert counts.max() < 90


def test_few_wait_in_memory():
    sample = PositionSample(10)
    for _ in range(100):
        sample.add(ROWS)
        assert sample._waiting <= 70


def test_labels_of_positions():
    labels = np.arange(12).reshape(2, 3, 2)
    np.testing.assert_array_equal(rows_of_labels(labels, (2, 3, 2)), np.arange(12))
    assert rows_of_labels(labels, (2, 3)).shape == (6, 2)
    for wrong in (labels[:, :2], labels[..., None, None], labels[0]):
        with pytest.raises(ValueError, match=r"`y` must have a label at each position .*\(2, 3, 2"):
            rows_of_labels(wrong, (2, 3, 2))
