"""Out-of-distribution (OOD) images: of another dataset, or of classes that were held out."""

import numpy as np

from tfp_ibnn._core.extras import needs
from tfp_ibnn.data.datasets import DATASETS

__all__ = ["USUAL", "convert_images", "from_bytes", "split_classes", "to_bytes"]

USUAL: dict[str, tuple[str, ...]] = {
    "cifar10": ("fashion_mnist",),
    "fashion_mnist": ("mnist",),
    "mnist": ("fashion_mnist",),
    "digits": (),
}
"""The datasets that are usually taken as OOD for each dataset."""


def convert_images(images: np.ndarray, name: str, dataset: str) -> np.ndarray:
    """Return images of one dataset in the shape and on the scale of another.

    Grey images get three equal channels, coloured ones become grey by their luma. Smaller images
    are padded with black: their pixels stay as they are, so that a model detects the content and
    not the blur of a resizing, and the grey datasets are black at their edges already. Images that
    are larger, or less than half as large, are resized by Pillow (bilinear, averaging where it
    shrinks).

    Args:
        images: (N, height, width, channels) uint8, as `load(name)` has them.
        name: of their dataset.
        dataset: whose form they get.

    Returns:
        (N, height, width, channels) float32, from 0 to the maximum of `dataset`.

    Example:
        >>> import numpy as np, tfp_ibnn as ibnn
        >>> images = np.ones((5, 28, 28, 1), "uint8")
        >>> ibnn.data.ood.convert_images(images, "mnist", "cifar10").shape
        (5, 32, 32, 3)
    """
    height, width, channels = DATASETS[dataset].image_shape
    images = _with_channels(to_bytes(images, name), channels)
    if all(
        2 * have >= want >= have
        for have, want in zip(images.shape[1:3], (height, width), strict=True)
    ):
        images = _padded(images, height, width)
    else:
        images = np.stack([_resized(image, height, width) for image in images])
    return from_bytes(images, dataset)


def split_classes(
    images: np.ndarray, labels: np.ndarray, classes: int
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
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


def _with_channels(images: np.ndarray, channels: int) -> np.ndarray:
    have = images.shape[-1]
    if have == channels:
        return images
    if have == 1:
        return np.repeat(images, channels, axis=-1)
    with needs("data"):
        from PIL import Image

    grey = [np.asarray(Image.fromarray(image).convert("L")) for image in images]
    return np.stack(grey)[..., None]


def _padded(images: np.ndarray, height: int, width: int) -> np.ndarray:
    down, right = height - images.shape[1], width - images.shape[2]
    edges = (down // 2, down - down // 2), (right // 2, right - right // 2)
    return np.pad(images, ((0, 0), *edges, (0, 0)))


def _resized(image: np.ndarray, height: int, width: int) -> np.ndarray:
    with needs("data"):
        from PIL import Image

    # Pillow has grey images without an axis of channels.
    found = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
    found = found.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(found).reshape(height, width, image.shape[-1])
