"""Checks of arrays of images."""

from typing import Any

import numpy as np

__all__ = ["checked_images"]


def checked_images(images: Any) -> np.ndarray:
    """Return uint8 images (N, H, W, C) of one or three channels, N 0 or more, or raise."""
    images = np.asarray(images)
    if images.dtype != np.uint8:
        raise ValueError(
            "`images` must be uint8, on the scale from 0 to 255; got "
            f"{images.dtype}. Convert with np.rint(images).astype('uint8') if they are on it."
        )
    if images.ndim != 4 or images.shape[-1] not in (1, 3) or 0 in images.shape[1:]:
        raise ValueError(
            "`images` must have the shape (images, height, width, channels) with 1 or 3 channels, "
            f"such as (100, 32, 32, 3); got {images.shape}."
        )
    return images
