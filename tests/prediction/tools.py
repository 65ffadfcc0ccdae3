"""Short ways to predict, to score and to compare."""

import keras
import numpy as np

from tests.monte_carlo_tools import dense, set_weights

N, S = 5, 8
COMMON = {"samples": S, "seed": 3}


def close(actual, desired, tolerance=1e-5):
    np.testing.assert_allclose(actual, desired, rtol=tolerance, atol=tolerance)


def predict(mc, x, **kwargs):
    return mc.predict(x, verbose=0, **kwargs)


def evaluate(mc, *args, **kwargs):
    return mc.evaluate(*args, verbose=0, return_dict=True, **kwargs)


def same(one, other, tolerance=1e-5):
    assert one.keys() == other.keys()
    for key in one:
        np.testing.assert_allclose(
            one[key], other[key], rtol=tolerance, atol=tolerance, err_msg=key
        )


def network(shape, units, *last):
    """A noisy network; those of the same shape and units have the same weights before the last."""
    inputs = keras.Input(shape)
    hidden = dense(units)(dense(4, "tanh")(inputs))
    for make in last:
        hidden = make()(hidden)
    return set_weights(keras.Model(inputs, hidden), size=1.0)


class Batches(keras.utils.PyDataset):
    def __init__(self, *parts, size=4):
        super().__init__()
        self.parts, self.size = parts, size

    def __len__(self):
        return -(-len(self.parts[0]) // self.size)

    def __getitem__(self, number):
        here = slice(number * self.size, (number + 1) * self.size)
        return tuple(part[here] for part in self.parts)
