"""What is known of each dataset: its classes, sizes, and canonical files with their checksums."""

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Splits = tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


class DataError(RuntimeError):
    """A dataset that cannot be found, is not what it should be, or cannot be stored."""


@dataclass(frozen=True)
class Dataset:
    """One image classification dataset.

    Attributes:
        name: what `load` knows it by.
        classes: the names of the classes, in the order of the labels.
        image_shape: (height, width, channels).
        train_size: number of training images.
        test_size: number of test images.
        layout: of the canonical files: `"idx"` as MNIST's, `"cifar"` as CIFAR-10's binary version.
        checksums: the MD5 or SHA-256 of the canonical files by name, training before test.
        maximum: largest possible pixel value; divide by it to get images in [0, 1].
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


_OBJECTS = "airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck"
_CLOTHES = "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"
_OBJECTS, _CLOTHES = (tuple(names.split(", ")) for names in (_OBJECTS, _CLOTHES))
_CIFAR10 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
_FASHION_MNIST = {
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}
_MNIST = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
# scikit-learn has the digits in one file: these are our own, of the IDX files they would make.
_DIGITS = {
    "train-images": "84e9d528076f92c565238a20e46f7d997c53c5e11dbff775ae48bc99d13426a9",
    "train-labels": "7cccc531a9123e90cc5d2d7fba75534e6d03c5f1485bf96c8ea7f33700dd01a5",
    "test-images": "9216f265446ae267227024a33b5a01cb8265839c1ba3ac16a73e775113954d7e",
    "test-labels": "2c9f00a235f1befb56a6430dc77be2d6cd4bcb07e329caac036dc0b612766fae",
}
_ALL = (
    Dataset("cifar10", _OBJECTS, (32, 32, 3), 50_000, 10_000, "cifar", _CIFAR10),
    Dataset("fashion_mnist", _CLOTHES, (28, 28, 1), 60_000, 10_000, "idx", _FASHION_MNIST),
    Dataset("mnist", tuple("0123456789"), (28, 28, 1), 60_000, 10_000, "idx", _MNIST),
    Dataset("digits", tuple("0123456789"), (8, 8, 1), 1_297, 500, "idx", _DIGITS, maximum=16),
)

DATASETS: dict[str, Dataset] = {dataset.name: dataset for dataset in _ALL}


def verify(dataset: Dataset, splits: Splits) -> None:
    """Raise unless these are the dataset's arrays: types, shapes, and every byte in its order."""
    sizes = dataset.train_size, dataset.test_size
    for part, size, (images, labels) in zip(("training", "test"), sizes, splits, strict=True):
        for what, array, dtype, shape in (
            ("images", images, "uint8", (size, *dataset.image_shape)),
            ("labels", labels, "int32", (size,)),
        ):
            got, expected = f"{array.dtype} of shape {array.shape}", f"{dtype} of shape {shape}"
            if got != expected:
                raise DataError(f"the {part} {what} are {got}; expected {expected}")
        low, high, last = labels.min(), labels.max(), len(dataset.classes) - 1
        if low < 0 or high > last:
            raise DataError(f"the {part} labels reach from {low} to {high}; expected 0 to {last}")
    contents = _encode(dataset, splits)
    for name, expected in dataset.checksums.items():
        algorithm = "MD5" if len(expected) == 32 else "SHA-256"
        # Against accidents, where MD5 still serves; systems that ban it for secrets allow this.
        digest = hashlib.new(algorithm.replace("-", ""), usedforsecurity=False)
        for piece in next(contents):
            digest.update(piece)
        if (got := digest.hexdigest()) != expected:
            raise DataError(f"wrong checksum: {name} has {algorithm} {got}; expected {expected}")


def _encode(dataset: Dataset, splits: Splits) -> Iterator[list[bytes | np.ndarray]]:
    """Yield the content of each canonical file in pieces."""
    if dataset.layout == "idx":
        for images, labels in splits:
            yield [struct.pack(">4i", 0x803, *images.shape[:3]), images.ravel()]
            yield [struct.pack(">2i", 0x801, len(labels)), labels.astype(np.uint8)]
        return
    (images, labels), test = splits
    batches = zip(np.array_split(images, 5), np.array_split(labels, 5), strict=True)
    for images, labels in (*batches, test):
        planes = np.moveaxis(images, -1, 1).reshape(len(images), -1)
        yield [np.column_stack([labels.astype(np.uint8), planes]).ravel()]


def decode(dataset: Dataset, files: Mapping[str, bytes]) -> Splits:
    """Return the arrays that a dataset's canonical files hold."""
    train, test, pixels = dataset.train_size, dataset.test_size, int(np.prod(dataset.image_shape))
    sizes = [16 + train * pixels, 8 + train, 16 + test * pixels, 8 + test]
    if dataset.layout == "cifar":
        sizes = [*[train // 5 * (1 + pixels)] * 5, test * (1 + pixels)]
    for name, size in zip(dataset.checksums, sizes, strict=True):
        if len(files[name]) != size:
            raise DataError(f"{name} has {len(files[name]):,} bytes; expected {size:,}")
    arrays = [np.frombuffer(files[name], np.uint8) for name in dataset.checksums]
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
