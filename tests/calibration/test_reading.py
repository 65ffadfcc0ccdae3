"""What is read, and refused, where examples have positions or several outputs."""

import keras
import numpy as np
import pytest
from keras import layers

from tfp_ibnn.calibration.reading import read
from tfp_ibnn.likelihoods import Categorical

pytestmark = pytest.mark.once


class Lengths(keras.utils.PyDataset):
    """Two batches of sequences."""

    def __init__(self, lengths):
        super().__init__()
        self.lengths = lengths

    @property
    def num_batches(self):
        return len(self.lengths)

    def __getitem__(self, index):
        length = self.lengths[index]
        return np.zeros((2, length, 3)), np.full((2, length), index)


def test_batches_of_several_lengths():
    model = keras.Sequential([keras.Input((None, 3)), layers.Identity()])
    output = Categorical(True, 3)
    found = read(Lengths((4, 4)), model, output, "test")
    np.testing.assert_array_equal(found.y, np.repeat([0, 1], 8))
    with pytest.raises(ValueError, match="batches of `test` have arrays of different shapes.*pad"):
        read(Lengths((4, 5)), model, output, "test")


def test_something_must_count():
    model = keras.Sequential([keras.Input((None, 3)), layers.Masking(), layers.Identity()])
    arrays = np.zeros((2, 4, 3)), np.zeros((2, 4))
    with pytest.raises(ValueError, match="no position in `test` that counts: all are masked, or"):
        read(arrays, model, Categorical(True, 3), "test")
