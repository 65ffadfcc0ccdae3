"""Turned images, and the check of arrays of images."""

from typing import Any

import numpy as np
from scipy import ndimage

from tfp_ibnn._core import checks

__all__ = ["checked_images", "rotate"]


def rotate(images: Any, degrees: float) -> np.ndarray:
    """Return images turned counter-clockwise around their centre, (N, H, W, C) uint8.

    Pixels are interpolated bilinearly and rounded, black beyond the edges; the size stays, so
    corners are lost. By multiples of 90 degrees square images are turned exactly, as by `np.rot90`.

    Args:
        images: (N, H, W, C) uint8, C 1 or 3; they stay as they are.
        degrees: the angle; below 0 it is clockwise.

    Example:
        >>> import numpy as np
        >>> from tfp_ibnn.data.rotation import rotate
        >>> images = np.array([[1, 2], [3, 4]], "uint8").reshape(1, 2, 2, 1)
        >>> rotate(images, 90)[0, :, :, 0]
        array([[2, 4],
               [1, 3]], dtype=uint8)
    """
    images = checked_images(images)
    degrees = checks.finite("degrees", degrees)
    # "grid-constant" blends into the black beyond the edge; "constant" would be black right there.
    options = {"reshape": False, "order": 1, "mode": "grid-constant", "output": "float32"}
    return np.rint(ndimage.rotate(images, degrees, axes=(1, 2), **options)).astype("uint8")


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
