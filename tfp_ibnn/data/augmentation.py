"""Preprocessing inside the model: normalisation, and random shifts and flips in training."""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import SeedGenerator, Tensor
from tfp_ibnn._core.serialization import ConfiguredLayer, SavesRandomState


class _Augmentation(ConfiguredLayer, SavesRandomState, layers.Layer):
    """A layer that changes images at random in training only, by `_changed`."""

    def __init__(self, seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seed = seed
        self.seed_generator = SeedGenerator(seed)

    def call(self, images: Tensor, training: bool = False) -> Tensor:
        return self._changed(images) if training else images

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return input_shape


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class RandomShift(_Augmentation):
    """In training alone, move each image by up to `padding` pixels each way; zeros come in."""

    def __init__(self, padding: int = 4, seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(seed, **kwargs)
        self.padding = checks.positive_integer("padding", padding, checks.LARGEST_SIZE)

    def _changed(self, images: Tensor) -> Tensor:
        count = ops.shape(images)[0]
        shifts = keras.random.randint((count, 2), 0, 2 * self.padding + 1, seed=self.seed_generator)
        border = (self.padding, self.padding)
        padded = ops.pad(images, ((0, 0), border, border, (0, 0)))
        # Rows and columns apart: two small gathers instead of one index for each pixel.
        rows = shifts[:, :1] + ops.arange(images.shape[1], dtype=shifts.dtype)
        columns = shifts[:, 1:] + ops.arange(images.shape[2], dtype=shifts.dtype)
        padded = ops.take_along_axis(padded, rows[:, :, None, None], axis=1)
        return ops.take_along_axis(padded, columns[:, None, :, None], axis=2)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class RandomMirror(_Augmentation):
    """In training alone, mirror each image, left to right, with probability one half."""

    def _changed(self, images: Tensor) -> Tensor:
        shape = (ops.shape(images)[0], 1, 1, 1)
        chosen = keras.random.uniform(shape, seed=self.seed_generator) < 0.5
        return ops.where(chosen, ops.flip(images, axis=2), images)


def preprocessing(
    images: np.ndarray, *, augment: bool = False, padding: int = 4, seed: int | None = None
) -> list[layers.Layer]:
    """Return layers that augment raw images and normalise them, to put in front of a network.

    The network then takes raw pixels, wherever it is used. Each channel gets the mean 0 and the
    standard deviation 1. Augmentation comes before, so that what a shift brings in is black.

    Args:
        images: training images, (examples, height, width, channels).
        augment: shift and mirror images at random in training.
        padding: largest shift, in pixels.
        seed: of the augmentation.
    """
    if np.ndim(images) != 4 or len(images) == 0:
        raise ValueError(f"`images` must be (N, height, width, channels); got {np.shape(images)}.")
    total = np.prod(images.shape[:3])
    # Sums of whole numbers, which are exact, and without a float copy of all images.
    mean = np.einsum("nhwc->c", images, dtype="float64") / total
    square = np.einsum("nhwc,nhwc->c", images, images, dtype="float64") / total
    variance = square - mean**2
    # The squares of one value throughout differ from its mean's square by rounding alone.
    if not np.all(variance > 1e-11 * square):
        raise ValueError("`images` must be finite, and no channel have one value throughout.")
    normalise = layers.Normalization(mean=mean.tolist(), variance=variance.tolist(), name="normal")
    if not augment:
        return [normalise]
    mirror = RandomMirror(None if seed is None else seed + 1, name="mirror")
    return [RandomShift(padding, seed, name="shift"), mirror, normalise]
