"""One reader of arrays and datasets."""

import keras
import numpy as np
import pytest

from tfp_ibnn.data.examples import Examples, read_batches, some_at_a_time, unpacked

pytestmark = pytest.mark.once

X = {"a": np.arange(10.0).reshape(5, 2), "b": np.arange(5.0)}
Y = np.arange(5)
WEIGHT = np.linspace(0, 2, 5)


class Halves(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        rows = slice(3 * index, 3 * index + 3)
        return {name: part[rows] for name, part in X.items()}, Y[rows], WEIGHT[rows]


def same(found, expected):
    keras.tree.map_structure(np.testing.assert_array_equal, found, expected)


def test_parts_stay_together():
    examples = Examples(X, Y, WEIGHT)
    assert examples.size == 5
    some = examples.take(np.array([4, 1]))
    same(some.x, {"a": X["a"][[4, 1]], "b": X["b"][[4, 1]]})
    same((some.y, some.weight), (Y[[4, 1]], WEIGHT[[4, 1]]))
    parts = list(examples.batches(2))
    assert [part.size for part in parts] == [2, 2, 1]
    same(tuple(Examples.joined(parts)), tuple(examples))
    alone = Examples(X).take(slice(2))
    assert (alone.size, alone.y, alone.weight) == (2, None, None)


def test_arrays_and_datasets_give_the_same():
    (whole,) = read_batches((X, Y, WEIGHT), "train")
    halves = list(read_batches(Halves(), "train"))
    assert [part.size for part in halves] == [3, 2]
    same(tuple(Examples.joined(halves)), tuple(whole))
    once = [Examples(*part) for part in unpacked((Halves()[i] for i in range(2)), "x")]
    same(tuple(Examples.joined(once)), tuple(whole))


def test_lists_and_strings_become_arrays():
    examples = Examples.of(([[1, 2], [3, 4]], [0, 1]), "train")
    assert examples.y.tolist() == [0, 1]
    assert examples.weight is None
    text = Examples.of((np.array(["a", "b"]),), "train")
    assert text.x.dtype == object


def test_what_cannot_be_read():
    with pytest.raises(ValueError, match=r"`train` must give \(x, y\) or"):
        Examples.of((X, Y, WEIGHT, WEIGHT), "train")
    with pytest.raises(ValueError, match="`train` is a generator, which can be read only once"):
        list(read_batches((part for part in Halves()), "train"))
    with pytest.raises(ValueError, match="`x` must hold at least one example"):
        list(unpacked(iter(()), "x"))
    wrong = Examples({**X, "b": np.array([0, 1, np.inf, 3, np.nan])})
    with pytest.raises(ValueError, match="inputs hold NaN or infinity in 2 of 5 rows.* number 2"):
        wrong.check_finite()
    Examples(X).check_finite()


def test_labels_that_are_left_over_are_refused():
    for y, weight in ((np.arange(6), None), (Y, np.ones(6))):
        with pytest.raises(ValueError, match=r"as many examples; got \[5, 6\]"):
            list(some_at_a_time(X, y, weight, 5))
    assert len(list(some_at_a_time(X, None, None, 2))) == 3
