"""Out-of-distribution (OOD) images: of another dataset, or of classes that were held out."""

import numpy as np
from PIL import Image

from lib.data import DATASETS

USUAL: dict[str, tuple[str, ...]] = {
    "cifar10": ("fashion_mnist",),
    "fashion_mnist": ("mnist",),
    "mnist": ("fashion_mnist",),
    "digits": (),
}
"""The datasets that are usually taken as OOD for each dataset."""


def convert_images(images: np.ndarray, name: str, dataset: str) -> np.ndarray:
    """Return images of one dataset in the shape and on the scale of another, float32.

    Grey images get three equal channels, coloured ones become grey by their luma. Smaller images
    are padded with black, so that a model detects the content and not the blur of a resizing; those
    larger, or less than half as large, are resized by Pillow (bilinear, averaging on shrinking).

    Args:
        images: (N, height, width, channels) uint8, as `load(name)` has them.
        name: of their dataset.
        dataset: whose form they get, and whose maximum.

    Example:
        >>> import numpy as np
        >>> from lib.shifts import convert_images
        >>> images = np.ones((5, 28, 28, 1), "uint8")
        >>> convert_images(images, "mnist", "cifar10").shape
        (5, 32, 32, 3)
    """
    height, width, channels = DATASETS[dataset].image_shape
    images = to_bytes(images, name)
    if images.shape[-1] > channels:
        # The luma of Pillow and of JPEG files, in whole numbers.
        luma = (images @ np.array([19595, 38470, 7471]) + 2**15) >> 16
        images = luma[..., None].astype("uint8")
    images = np.broadcast_to(images, (*images.shape[:3], channels))
    down, right = height - images.shape[1], width - images.shape[2]
    if 0 <= 2 * down <= height and 0 <= 2 * right <= width:
        edges = (down // 2, down - down // 2), (right // 2, right - right // 2)
        return from_bytes(np.pad(images, ((0, 0), *edges, (0, 0))), dataset)
    pictures = (Image.fromarray(image.squeeze(-1) if channels == 1 else image) for image in images)
    resized = [picture.resize((width, height), Image.Resampling.BILINEAR) for picture in pictures]
    return from_bytes(np.stack(resized).reshape(-1, height, width, channels), dataset)


def split_classes(images: np.ndarray, labels: np.ndarray, classes: int):
    """Return images and labels of the first so many classes, and those of the others."""
    known = labels < classes
    return (images[known], labels[known]), (images[~known], labels[~known])


def to_bytes(images: np.ndarray, dataset: str) -> np.ndarray:
    """Return a dataset's images on the scale from 0 to 255, uint8."""
    maximum = DATASETS[dataset].maximum
    return images if maximum == 255 else np.rint(images * (255 / maximum)).astype("uint8")


def from_bytes(images: np.ndarray, dataset: str) -> np.ndarray:
    """Return images from 0 to 255 on the scale of a dataset, float32 and not rounded."""
    return images.astype("float32") * np.float32(DATASETS[dataset].maximum / 255)
