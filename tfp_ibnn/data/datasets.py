"""What is known of each dataset: its classes, sizes, and the checksums of its canonical files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

__all__ = ["DATASETS", "DataError", "Dataset", "Splits", "known", "one_line"]

Splits = tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


class DataError(RuntimeError):
    """A dataset that cannot be had, is not what it should be, or cannot be stored."""


@dataclass(frozen=True)
class Dataset:
    """One image classification dataset.

    Attributes:
        name: what `load` knows it by.
        classes: the names of the classes, in the order of the labels.
        image_shape: (height, width, channels).
        train_size: number of training images.
        test_size: number of test images.
        layout: how the canonical files hold the images: `"idx"` as MNIST's, `"cifar"` as the binary
            version of CIFAR-10.
        checksums: the canonical files by name, training before test, and the MD5 (32 digits) or
            SHA-256 (64 digits) of each.
        maximum: largest possible pixel value; divide by it to get images in [0, 1].

    Example:
        >>> from tfp_ibnn.data import DATASETS
        >>> DATASETS["cifar10"].classes[3], DATASETS["digits"].maximum
        ('cat', 16)
    """

    name: str
    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    train_size: int
    test_size: int
    layout: Literal["idx", "cifar"]
    checksums: Mapping[str, str] = field(repr=False, hash=False)
    maximum: int = 255

    @property
    def nbytes(self) -> int:
        """Bytes of all images, as `load` returns them."""
        return (self.train_size + self.test_size) * int(np.prod(self.image_shape))


def known(name: Any) -> Dataset:
    """Return the dataset of this name, or raise an error that lists all names."""
    if not isinstance(name, str) or name not in DATASETS:
        raise DataError(f"`name` must be one of {', '.join(map(repr, DATASETS))}; got {name!r}.")
    return DATASETS[name]


def one_line(error: Exception) -> str:
    """Return what an error says in one line, or its type if it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


_OBJECTS = "airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck"
_CLOTHES = "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"
_DIGITS = tuple("0123456789")
_AS_MNIST = dict(image_shape=(28, 28, 1), train_size=60_000, test_size=10_000, layout="idx")

_ALL = (
    Dataset(
        name="cifar10",
        classes=tuple(_OBJECTS.split(", ")),
        image_shape=(32, 32, 3),
        train_size=50_000,
        test_size=10_000,
        layout="cifar",
        checksums={
            "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
            "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
            "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
            "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
            "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
            "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
        },
    ),
    Dataset(
        name="fashion_mnist",
        classes=tuple(_CLOTHES.split(", ")),
        **_AS_MNIST,
        checksums={
            "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
            "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
            "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
        },
    ),
    Dataset(
        name="mnist",
        classes=_DIGITS,
        **_AS_MNIST,
        checksums={
            "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
            "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
            "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
            "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
        },
    ),
    # scikit-learn ships the digits in one file, so these names and checksums are our own: those of
    # the IDX files that the two parts would make.
    Dataset(
        name="digits",
        classes=_DIGITS,
        image_shape=(8, 8, 1),
        train_size=1_297,
        test_size=500,
        layout="idx",
        checksums={
            "train-images": "84e9d528076f92c565238a20e46f7d997c53c5e11dbff775ae48bc99d13426a9",
            "train-labels": "7cccc531a9123e90cc5d2d7fba75534e6d03c5f1485bf96c8ea7f33700dd01a5",
            "test-images": "9216f265446ae267227024a33b5a01cb8265839c1ba3ac16a73e775113954d7e",
            "test-labels": "2c9f00a235f1befb56a6430dc77be2d6cd4bcb07e329caac036dc0b612766fae",
        },
        maximum=16,
    ),
)

DATASETS: dict[str, Dataset] = {dataset.name: dataset for dataset in _ALL}
