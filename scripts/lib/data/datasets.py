"""What is known of each dataset: its classes, sizes, canonical files, and its checksum."""

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Splits = tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


class DataError(RuntimeError):
    """A dataset that cannot be found, is not what it should be, or cannot be stored."""


@dataclass(frozen=True)
class Dataset:
    """One image classification dataset; its images divided by `maximum` lie in [0, 1]."""

    name: str
    classes: tuple[str, ...]  # in the order of the labels
    image_shape: tuple[int, int, int]  # height, width, channels
    train_size: int
    test_size: int
    layout: Literal["idx", "cifar"]  # of the canonical files: MNIST's, or CIFAR-10's binary version
    sha256: str = field(repr=False)  # of types, shapes and bytes of all arrays, as `load` has them
    maximum: int = 255

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the canonical files, training before test."""
        return _FILES[self.layout]

    @property
    def nbytes(self) -> int:
        """Bytes of all images, as `load` returns them."""
        return (self.train_size + self.test_size) * int(np.prod(self.image_shape))


_OBJECTS = "airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck"
_CLOTHES = "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"
_OBJECTS, _CLOTHES = (tuple(names.split(", ")) for names in (_OBJECTS, _CLOTHES))
_DIGITS = tuple("0123456789")
_IDX = itertools.product(("train", "t10k"), ("images-idx3", "labels-idx1"))
_FILES = {
    "cifar": (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"),
    "idx": tuple(f"{part}-{kind}-ubyte" for part, kind in _IDX),
}
# These checksums are of arrays whose canonical files had the MD5s that their authors published.
_CIFAR10_SUM = "400aa825af57b5a9e906faa6e884513b021afe9f2829c82f72541a058fd76968"
_FASHION_SUM = "cbc13d9b3403abaf5c50aa6960fbe3b18963a4093821dd49141239479b552f1b"
_MNIST_SUM = "615a98aea41c61d0ff8fbfff79b428e831e94c21691aa5ea01693c005020459b"
_DIGITS_SUM = "9031d7428531733c0db80634b99172953a4f8a5edd3c41d5d5afe9e9fab232d6"
_ALL = (
    Dataset("cifar10", _OBJECTS, (32, 32, 3), 50_000, 10_000, "cifar", _CIFAR10_SUM),
    Dataset("fashion_mnist", _CLOTHES, (28, 28, 1), 60_000, 10_000, "idx", _FASHION_SUM),
    Dataset("mnist", _DIGITS, (28, 28, 1), 60_000, 10_000, "idx", _MNIST_SUM),
    Dataset("digits", _DIGITS, (8, 8, 1), 1_297, 500, "idx", _DIGITS_SUM, maximum=16),
)

DATASETS: dict[str, Dataset] = {dataset.name: dataset for dataset in _ALL}


def checksum(splits: Splits) -> str:
    """Return the SHA-256 of all arrays: types, shapes, and every byte in its order."""
    digest = hashlib.sha256()
    for array in itertools.chain(*splits):
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def verify(dataset: Dataset, splits: Splits) -> None:
    """Raise unless these are the dataset's arrays."""
    if (got := checksum(splits)) != dataset.sha256:
        arrays = ", ".join(f"{x.dtype} {x.shape}" for x in itertools.chain(*splits))
        raise DataError(f"wrong checksum: {arrays} have {got}; expected {dataset.sha256}")


def decode(dataset: Dataset, files: Mapping[str, bytes]) -> Splits:
    """Return the arrays that a dataset's canonical files hold."""
    train, test, pixels = dataset.train_size, dataset.test_size, int(np.prod(dataset.image_shape))
    sizes = [16 + train * pixels, 8 + train, 16 + test * pixels, 8 + test]
    if dataset.layout == "cifar":
        sizes = [*[train // 5 * (1 + pixels)] * 5, test * (1 + pixels)]
    for name, size in zip(dataset.files, sizes, strict=True):
        if len(files[name]) != size:
            raise DataError(f"{name} has {len(files[name]):,} bytes; expected {size:,}")
    arrays = [np.frombuffer(files[name], np.uint8) for name in dataset.files]
    height, width, channels = dataset.image_shape
    if dataset.layout == "idx":
        images = [array[16:].reshape(-1, height, width, channels) for array in arrays[0::2]]
        labels = [array[8:].astype(np.int32) for array in arrays[1::2]]
    else:
        records = np.concatenate(arrays).reshape(-1, 1 + pixels)
        planes = records[:, 1:].reshape(-1, channels, height, width)
        images = np.split(np.ascontiguousarray(np.moveaxis(planes, 1, -1)), [train])
        labels = np.split(records[:, 0].astype(np.int32), [train])
    return tuple(zip(images, labels, strict=True))
