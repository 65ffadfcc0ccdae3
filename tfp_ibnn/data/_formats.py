"""The canonical files of a dataset, from arrays and to arrays, and their checksums."""

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from tfp_ibnn.data.datasets import DataError, Dataset, Splits

__all__ = ["Report", "decode", "file_size", "quiet", "verify"]

Report = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is; 0 if not known."""


def quiet(step: str, done: int, total: int) -> None:
    """Report to nobody."""


def verify(dataset: Dataset, splits: Splits, report: Report = quiet) -> None:
    """Raise unless these are the dataset's arrays: types, shapes, and every byte in its order."""
    sizes = dataset.train_size, dataset.test_size
    for part, size, (images, labels) in zip(("training", "test"), sizes, splits, strict=True):
        for what, array, dtype, shape in (
            ("images", images, "uint8", (size, *dataset.image_shape)),
            ("labels", labels, "int32", (size,)),
        ):
            if array.dtype != dtype or array.shape != shape:
                raise DataError(
                    f"the {part} {what} are {array.dtype} of shape {array.shape}; "
                    f"expected {dtype} of shape {shape}"
                )
        if labels.size and not 0 <= labels.min() <= labels.max() < len(dataset.classes):
            raise DataError(
                f"the {part} labels reach from {labels.min()} to {labels.max()}; "
                f"expected 0 to {len(dataset.classes) - 1}"
            )
    for number, (name, pieces) in enumerate(_encode(dataset, splits)):
        report("verifying", number, len(dataset.checksums))
        expected = dataset.checksums[name]
        algorithm = "MD5" if len(expected) == 32 else "SHA-256"
        # Against accidents, where MD5 still serves; systems that ban it for secrets allow this.
        digest = hashlib.new(algorithm.replace("-", ""), usedforsecurity=False)
        for piece in pieces:
            digest.update(piece)
        if digest.hexdigest() != expected:
            raise DataError(
                f"wrong checksum: {name} has {algorithm} {digest.hexdigest()}; expected {expected}"
            )


def decode(dataset: Dataset, files: Mapping[str, bytes]) -> Splits:
    """Return the arrays that a dataset's canonical files hold."""
    for name in dataset.checksums:
        size = file_size(dataset, name)
        if len(files[name]) != size:
            raise DataError(f"{name} has {len(files[name]):,} bytes; expected {size:,}")
    arrays = [np.frombuffer(files[name], np.uint8) for name in dataset.checksums]
    height, width, channels = dataset.image_shape
    if dataset.layout == "idx":
        images = [array[16:].reshape(-1, height, width, channels) for array in arrays[0::2]]
        labels = [array[8:].astype(np.int32) for array in arrays[1::2]]
        train, test = zip(images, labels, strict=True)
        return train, test
    records = np.concatenate(arrays).reshape(-1, 1 + channels * height * width)
    labels = records[:, 0].astype(np.int32)
    planes = records[:, 1:].reshape(-1, channels, height, width)
    images = np.ascontiguousarray(np.moveaxis(planes, 1, -1))
    end = dataset.train_size
    return (images[:end], labels[:end]), (images[end:], labels[end:])


def file_size(dataset: Dataset, name: str) -> int:
    """Return the bytes of a canonical file."""
    pixels = int(np.prod(dataset.image_shape))
    if dataset.layout == "cifar":
        parts = len(dataset.checksums) - 1
        count = dataset.test_size if name.startswith("test") else dataset.train_size // parts
        return count * (1 + pixels)
    count = dataset.train_size if name.startswith("train") else dataset.test_size
    return 16 + count * pixels if "images" in name else 8 + count


def _encode(dataset: Dataset, splits: Splits) -> Iterator[tuple[str, list[bytes | np.ndarray]]]:
    """Yield each canonical file's name, and its content in pieces, without copying images."""
    names = list(dataset.checksums)
    if dataset.layout == "idx":
        for number, (images, labels) in enumerate(splits):
            count, height, width, _ = images.shape
            header = struct.pack(">iiii", 0x803, count, height, width)
            yield names[2 * number], [header, images.ravel()]
            header = struct.pack(">ii", 0x801, count)
            yield names[2 * number + 1], [header, labels.astype(np.uint8)]
        return
    (images, labels), test = splits
    parts = len(names) - 1
    batches = zip(np.array_split(images, parts), np.array_split(labels, parts), strict=True)
    for name, (images, labels) in zip(names, [*batches, test], strict=True):
        records = np.empty((len(images), 1 + images[0].size), np.uint8)
        records[:, 0] = labels
        planes = np.moveaxis(images, -1, 1)
        records[:, 1:] = planes.reshape(len(images), -1)
        yield name, [records.ravel()]
