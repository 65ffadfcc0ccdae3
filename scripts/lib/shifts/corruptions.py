"""Images as a worse camera, light or file would have them, in five severities; turned images."""

import io
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image
from scipy import ndimage

from lib import checks

Generators = Iterator[np.random.Generator]  # one for each image, made when it is asked for
_BLOCK = 256  # images to work on at once: a few megabytes at 32 x 32


def corrupt(images: Any, name: str, severity: int, seed: int = 0, *, first: int = 0) -> np.ndarray:
    """Return images with a corruption of CIFAR-10-C, (N, H, W, C) uint8.

    For values from 0 to 1, with parameters that grow with the severity:

    - `gaussian_noise`: add N(0, s²) to each value, s from 0.04 to 0.1.
    - `shot_noise`: Poisson(c x) / c, c from 500 to 50.
    - `impulse_noise`: set a part of the values, 0.01 to 0.07, to 0 or 1.
    - `defocus_blur`: average over a disk of radius 0.3 to 1.5, smoothed by a Gaussian.
    - `motion_blur`: average along a line to the right, up to 45 degrees off at random, with the
      weights of half a Gaussian of standard deviation 1 to 2.5.
    - `brightness`: add 0.05 to 0.3 to V of HSV.
    - `contrast`: shrink by 0.75 to 0.15 towards the mean of each channel.
    - `pixelate`: shrink by 0.95 to 0.65, and back to the size before.
    - `jpeg_compression`: save with a quality from 80 to 40.

    Blurs reflect the image at its edges, and are in pixels, chosen for 32 x 32. Unlike in the
    published CIFAR-10-C, values are rounded, not cut, so that a blur keeps an even grey. The noise
    follows from seed, name, severity and the image's position, which starts at `first`.

    Args:
        images: (N, H, W, C) uint8, C 1 or 3; they stay as they are.
        name: one of `CORRUPTIONS`.
        severity: 1 to 5.
        seed: of the noise and the angles, a whole number of 0 or above.
        first: position of the first image; `corrupt(x[k:], ..., first=k)` is `corrupt(x, ...)[k:]`.

    Example:
        >>> import numpy as np
        >>> from lib.shifts import corrupt
        >>> images = np.array([[0, 100], [100, 200]], "uint8").reshape(1, 2, 2, 1)
        >>> corrupt(images, "contrast", severity=2).ravel()
        array([ 50, 100, 100, 150], dtype=uint8)

    References:
        Hendrycks and Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and
        Perturbations, arXiv 1903.12261; the parameters are those of their make_cifar_c.py.
    """
    images = _checked(images)
    checks.choice(*CORRUPTIONS)("name", name)
    if isinstance(severity, bool) or severity not in range(1, 6):
        raise ValueError(f"`severity` must be a whole number from 1 to 5; got {severity!r}.")
    whole = checks.KINDS["whole"]
    seed, first = whole("seed", seed), whole("first", first)
    function, levels = _CORRUPTIONS[name]
    source = seed, zlib.crc32(name.encode()), int(severity)
    result = np.empty_like(images)
    for start in range(0, len(images), _BLOCK):
        block = images[start : start + _BLOCK]
        positions = range(first + start, first + start + len(block))
        generators = (np.random.default_rng((*source, position)) for position in positions)
        values = function(block, levels[int(severity) - 1], generators)
        result[start : start + _BLOCK] = np.rint(np.clip(values, 0, 255))
    return result


def rotate(images: Any, degrees: float) -> np.ndarray:
    """Return images (N, H, W, C) uint8, turned counter-clockwise around their centre.

    Pixels are interpolated bilinearly and rounded, black beyond the edges; the size stays. By
    multiples of 90 degrees square images are turned exactly, as by `np.rot90`.

    Example:
        >>> import numpy as np
        >>> from lib.shifts import rotate
        >>> images = np.array([[1, 2], [3, 4]], "uint8").reshape(1, 2, 2, 1)
        >>> rotate(images, 90)[0, :, :, 0].tolist()
        [[2, 4], [1, 3]]
    """
    images = _checked(images)
    degrees = checks.KINDS["finite"]("degrees", degrees)
    # "grid-constant" blends into the black beyond the edge; "constant" would be black right there.
    options = {"reshape": False, "order": 1, "mode": "grid-constant", "output": "float32"}
    return np.rint(ndimage.rotate(images, degrees, axes=(1, 2), **options)).astype("uint8")


def _checked(images: Any) -> np.ndarray:
    images = np.asarray(images)
    if images.dtype != np.uint8:
        raise ValueError(f"`images` must be uint8: np.rint(x).astype('uint8'); got {images.dtype}.")
    if images.ndim != 4 or images.shape[-1] not in (1, 3) or 0 in images.shape[1:]:
        wanted = "(images, height, width, channels) with 1 or 3 channels"
        raise ValueError(f"`images` must have the shape {wanted}; got {images.shape}.")
    return images


# Each takes images and the parameter of a severity, and returns values not yet cut to 0 to 255.


def _gaussian_noise(images: np.ndarray, scale: float, generators: Generators) -> np.ndarray:
    noise = [rng.standard_normal(images.shape[1:], "float32") for rng in generators]
    return images + np.float32(255 * scale) * np.stack(noise)


def _shot_noise(images: np.ndarray, count: float, generators: Generators) -> np.ndarray:
    # The rate of each of the 256 values there are.
    rates = (np.arange(256) * (count / 255))[images]
    counts = np.stack([rng.poisson(rate) for rng, rate in zip(generators, rates, strict=True)])
    return counts * (255 / count)


def _impulse_noise(images: np.ndarray, part: float, generators: Generators) -> np.ndarray:
    chance = np.stack([rng.random(images.shape[1:], "float32") for rng in generators])
    return np.where(chance < part, np.where(chance < part / 2, 0, 255), images)


def _defocus_blur(images: np.ndarray, disk: tuple, generators: Generators) -> np.ndarray:
    kernel = _disk(*disk)[None, :, :, None]
    return ndimage.correlate(images.astype("float32"), kernel, mode="mirror")


def _motion_blur(images: np.ndarray, line: tuple, generators: Generators) -> np.ndarray:
    radius, deviation = line
    (height, width), reach = images.shape[1:3], 2 * radius
    edges = ((0, 0), (reach, reach), (reach, reach), (0, 0))
    padded = np.pad(images.astype("float32"), edges, mode="reflect")
    result = np.zeros(images.shape, "float32")
    for number, rng in enumerate(generators):
        for weight, down, right in _half_line(radius, deviation, rng.uniform(-45, 45)):
            rows = slice(reach + down, reach + down + height)
            columns = slice(reach + right, reach + right + width)
            result[number] += weight * padded[number, rows, columns]
    return result


def _brightness(images: np.ndarray, step: float, generators: Generators) -> np.ndarray:
    # V is the largest channel, and hue and saturation are the ratios of the channels.
    value = images.max(axis=-1, keepdims=True).astype("float32")
    raised = np.minimum(value + 255 * step, 255)
    return np.where(value > 0, images * (raised / np.maximum(value, 1)), raised)


def _contrast(images: np.ndarray, factor: float, generators: Generators) -> np.ndarray:
    mean = images.mean(axis=(1, 2), keepdims=True)
    return (images - mean) * factor + mean


def _pixelate(images: np.ndarray, factor: float, generators: Generators) -> np.ndarray:
    height, width = images.shape[1:3]
    small = [max(1, int(size * factor)) for size in (width, height)]
    box = Image.Resampling.BOX
    return _each(images, lambda image: image.resize(small, box).resize((width, height), box))


def _jpeg_compression(images: np.ndarray, quality: int, generators: Generators) -> np.ndarray:
    def change(image: Image.Image) -> Image.Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        return Image.open(file)

    return _each(images, change)


_CORRUPTIONS: dict[str, tuple[Callable[..., np.ndarray], tuple[Any, ...]]] = {
    "gaussian_noise": (_gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": (_shot_noise, (500, 250, 100, 75, 50)),
    "impulse_noise": (_impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07)),
    "defocus_blur": (_defocus_blur, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))),
    "motion_blur": (_motion_blur, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))),
    "brightness": (_brightness, (0.05, 0.1, 0.15, 0.2, 0.3)),
    "contrast": (_contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
    "pixelate": (_pixelate, (0.95, 0.9, 0.85, 0.75, 0.65)),
    "jpeg_compression": (_jpeg_compression, (80, 65, 58, 50, 40)),
}

CORRUPTIONS: tuple[str, ...] = tuple(_CORRUPTIONS)
"""The names of the corruptions, as CIFAR-10-C has them."""


def _disk(radius: float, deviation: float) -> np.ndarray:
    """Return a disk of pixels, smoothed by a Gaussian of 3 x 3 pixels, whose sum is 1."""
    reach = int(radius) + 1  # one more than the disk, for the smoothing
    offsets = np.arange(-reach, reach + 1)
    disk = (offsets[:, None] ** 2 + offsets**2 <= radius**2).astype("float64")
    smooth = ndimage.gaussian_filter(disk, deviation, radius=1, mode="constant")
    return smooth / smooth.sum()


def _half_line(radius: int, deviation: float, degrees: float) -> Iterator[tuple[float, int, int]]:
    """Return weight, rows down and columns right of the 2 r + 1 pixels on a line from (0, 0)."""
    # Each is the pixel nearest to its place, as in ImageMagick, by which CIFAR-10-C was made.
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-0.5 * (steps / deviation) ** 2)
    angle = np.deg2rad(degrees)
    down, right = (np.rint(steps * part).astype(int) for part in (np.sin(angle), np.cos(angle)))
    return zip((weights / weights.sum()).tolist(), down.tolist(), right.tolist(), strict=True)


def _each(images: np.ndarray, change: Callable[[Image.Image], Image.Image]) -> np.ndarray:
    """Return images changed one by one; Pillow has grey ones without an axis of channels."""
    flat = images[..., 0] if images.shape[-1] == 1 else images
    changed = [np.asarray(change(Image.fromarray(image))) for image in flat]
    return np.stack(changed).reshape(images.shape)
