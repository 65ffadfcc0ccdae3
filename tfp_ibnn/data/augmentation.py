"""Preprocessing inside the model: normalization, and random shifts and flips in training."""

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
    """In training only, shift each image by up to `padding` pixels each way; zeros come in.

    Args:
        padding: the largest shift, in pixels.
        seed: of the shifts; None draws one.
        **kwargs: those of `keras.layers.Layer`.
    """

    def __init__(self, padding: int = 4, seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(seed, **kwargs)
        self.padding = checks.positive_integer("padding", padding, checks.LARGEST_SIZE)

    def _changed(self, images: Tensor) -> Tensor:
        count = ops.shape(images)[0]
        positions = 2 * self.padding + 1
        shifts = keras.random.randint((count, 2), 0, positions, seed=self.seed_generator)
        first_row, first_column = ops.split(shifts, 2, axis=1)
        _, height, width, _ = images.shape
        rows = _window(first_row, height)
        columns = _window(first_column, width)
        # Rows and columns apart: two small gathers instead of one index for each pixel.
        rows = rows[:, :, None, None]
        columns = columns[:, None, :, None]
        border = (self.padding, self.padding)
        no_border = (0, 0)
        padded = ops.pad(images, (no_border, border, border, no_border))
        moved = ops.take_along_axis(padded, rows, axis=1)
        return ops.take_along_axis(moved, columns, axis=2)


def _window(first: Tensor, size: int) -> Tensor:
    """Return consecutive indices (images, size), from the first one of each image on."""
    return first + ops.arange(size, dtype=first.dtype)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class RandomMirror(_Augmentation):
    """In training only, mirror each image, left to right, with probability one half.

    Args:
        seed: of the choices; None draws one.
        **kwargs: those of `keras.layers.Layer`.
    """

    def _changed(self, images: Tensor) -> Tensor:
        count = ops.shape(images)[0]
        drawn = keras.random.uniform((count, 1, 1, 1), seed=self.seed_generator)
        mirrored = ops.flip(images, axis=2)
        return ops.where(drawn < 0.5, mirrored, images)


def preprocessing(
    images: np.ndarray, *, augment: bool = False, padding: int = 4, seed: int | None = None
) -> list[layers.Layer]:
    """Return layers that augment raw images and normalize them, to put in front of a network.

    The network then takes raw pixels, wherever it is used. Each channel gets the mean 0 and the
    standard deviation 1. Augmentation comes first, so that a shift fills in black.

    Args:
        images: training images, (examples, height, width, channels).
        augment: shift and mirror images at random in training.
        padding: largest shift, in pixels.
        seed: of the augmentation; None draws one.

    Returns:
        Keras layers: a `Normalization`, after `RandomShift` and `RandomMirror` if images are
        augmented.

    Example:
        >>> import numpy as np, tfp_ibnn as ibnn
        >>> images = np.arange(2 * 8 * 8).reshape(2, 8, 8, 1)
        >>> [layer.name for layer in ibnn.data.preprocessing(images, augment=True, seed=0)]
        ['shift', 'mirror', 'normal']
    """
    shape = np.shape(images)
    if len(shape) != 4 or shape[0] == 0:
        raise ValueError(f"`images` must be (N, height, width, channels); got {shape}.")
    pixels = np.prod(shape[:3])
    # Sums of whole numbers, which are exact, and without a float copy of all images.
    mean = np.einsum("nhwc->c", images, dtype="float64") / pixels
    square = np.einsum("nhwc,nhwc->c", images, images, dtype="float64") / pixels
    variance = square - mean**2
    # In a constant channel the mean square differs from the squared mean by rounding only.
    rounding = 1e-11 * square
    if not np.all(variance > rounding):
        raise ValueError("`images` must be finite, and no channel may be constant.")
    normalize = layers.Normalization(
        mean=mean.tolist(),
        variance=variance.tolist(),
        name="normal",
    )
    if not augment:
        return [normalize]
    mirror_seed = None if seed is None else seed + 1
    # The mirror first: without a seed, each takes the next one of Python's `random`.
    mirror = RandomMirror(mirror_seed, name="mirror")
    shift = RandomShift(padding, seed, name="shift")
    return [shift, mirror, normalize]
