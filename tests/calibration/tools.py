"""Small networks to calibrate, and the likelihood of their classes."""

import keras
import numpy as np
from keras import layers

from tfp_ibnn.likelihoods import Categorical

LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def methods(*seconds, minutes=(), trainings=()):
    """Methods to compare in place of `run.METHODS`, by the effort that they take."""
    return {"seconds": seconds, "minutes": minutes, "trainings": trainings}


def classes(width, from_logits):
    return Categorical(from_logits, width, one_hot=False)


def mlp(units=32, outputs=10, activation=None, features=64, dropout=0.0):
    parts = [layers.Dense(units, activation="relu"), layers.Dense(outputs, activation=activation)]
    if dropout:
        parts.insert(1, layers.Dropout(dropout))
    return keras.Sequential([keras.Input((features,)), *parts])


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y, size=16):
        super().__init__()
        self.x, self.y, self.size = x, y, size

    @property
    def num_batches(self):
        return -(-len(self.y) // self.size)

    def __getitem__(self, index):
        part = slice(self.size * index, self.size * (index + 1))
        return self.x[part], self.y[part]


def compiled(loss, outputs=3, **options):
    model = mlp(4, outputs, features=2, **options)
    model.compile("sgd", loss)
    return model


def drawn_labels(logits, random):
    """Labels of which a softmax of the logits gives the odds."""
    noise = random.gumbel(size=logits.shape)
    return np.argmax(logits + noise, axis=-1)
