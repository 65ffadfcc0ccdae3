"""Training, validation and test parts of data sets, drawn by a seed."""

import numpy as np
from sklearn import datasets

from lib import data, shifts


def packaged(seed, load, train, validation, change=lambda x: x):
    """Return training, validation and test arrays of one of scikit-learn's sets."""
    x, y = load(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(y))
    x, y = x[order], y[order] / 100 if load is datasets.load_diabetes else y[order]
    scale = np.maximum(x[:train].std(axis=0), 1e-3)
    x = x / 16 if load is datasets.load_digits else (x - x[:train].mean(axis=0)) / scale
    parts = (np.split(z, [train, train + validation]) for z in (change(x.astype("float32")), y))
    return list(zip(*parts, strict=True))


def interleaved(x, y):
    """Return examples in an order that spreads each class evenly: a few have the rare ones too."""
    place = np.zeros(len(y))
    for label in np.unique(y):
        index = np.flatnonzero(y == label)
        place[index] = (np.arange(len(index)) + 0.5) / len(index)
    order = np.argsort(place, kind="stable")
    return x[order], y[order]


def images(seed, data_dir, name, train, validation):
    """Return some training and validation images of a data set, and all test images."""
    (x, y), (x_test, y_test) = data.load(name, data_dir)
    chosen = np.random.default_rng(seed).permutation(len(y))[: train + validation]
    parts = [(x[index], y[index]) for index in np.split(chosen, [train])]
    return [((x / 255).astype("float32"), y) for x, y in [*parts, (x_test, y_test)]]


def ood_images(own, count, data_dir=None):
    """Return test images of another data set, in the form of one's own, from 0 to 1."""
    other = {"fashion_mnist": "mnist", "cifar10": "fashion_mnist"}[own]
    found = data.load(other, data_dir)[1][0][:count]
    return (shifts.convert_images(found, other, own) / 255).astype("float32")
