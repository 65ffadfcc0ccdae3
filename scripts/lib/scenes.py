"""Images of two garments before a cluttered background, and the class of each pixel."""

import numpy as np

from lib import data

SIZE = 28  # pixels of a scene each way; garments are half as large
THRESHOLD = 0.2
"""The brightness above which a pixel of a garment hides what is behind it."""


def garment_scenes(seed, data_dir, train, validation, test):
    """Return (x, y) of training, validation and test scenes, from Fashion-MNIST.

    Test scenes show garments of the test images, and are the same for every seed.
    """
    images, test_images = data.load("fashion_mnist", data_dir)
    random = np.random.default_rng(seed)
    x, y = scenes(*images, train + validation, random)
    parts = [(x[:train], y[:train]), (x[train:], y[train:])]
    return [*parts, scenes(*test_images, test, np.random.default_rng(0))]


def scenes(images, labels, count, random):
    """Return scenes of two garments of different classes, the second one in front.

    Args:
        images: of garments, (N, 28, 28) or (N, 28, 28, 1), from 0 to 255.
        labels: their classes, (N,).
        count: of scenes.
        random: draws the garments, their places and the background.

    Returns:
        x (count, 28, 28, 1), from 0 to 1, and y (count, 28, 28): 0 is background, otherwise one
        more than the garment's class.
    """
    half = SIZE // 2
    small = images.reshape(-1, half, 2, half, 2).mean(axis=(2, 4)) / 255
    # Coarse clutter as bright as garments may be, and fine noise.
    clutter = np.kron(random.random((count, 7, 7)), np.ones((4, 4)))
    x = 0.4 * clutter + 0.3 * random.random((count, SIZE, SIZE))
    y = np.zeros((count, SIZE, SIZE), int)
    for scene, target in zip(x, y, strict=True):
        for garment in _pair(labels, random):
            top, left = random.integers(0, SIZE - half + 1, 2)
            place = np.s_[top : top + half, left : left + half]
            is_covered = small[garment] > THRESHOLD
            scene[place] = np.where(is_covered, small[garment], scene[place])
            target[place] = np.where(is_covered, 1 + labels[garment], target[place])
    return x[..., None].astype("float32"), y


def _pair(labels, random):
    """Return the indices of two images of different classes."""
    first, second = random.integers(0, len(labels), 2)
    while labels[first] == labels[second]:
        second = random.integers(0, len(labels))
    return first, second
