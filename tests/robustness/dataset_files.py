"""Dataset files: the cache, files brought by hand, and what packages bring."""

import gzip
import io
import json
import logging
import struct
import tarfile
import tempfile
import zlib

import numpy as np

from lib.data import DATASETS, DataError, _sources, load
from tests.robustness import mutate
from tests.robustness.harness import Wrong, refusal
from tests.scripts.lib.data.test_loading import Made, tar_of

__all__ = ["Campaign"]

NAMES = ("cifar10", "fashion_mnist", "mnist")


class Campaign:
    """A dataset is loaded exactly, or refused; a cache is written whole or not at all."""

    def __init__(self, place):
        self.place = place
        logging.disable(logging.WARNING)
        self.made = {name: Made(name) for name in NAMES}
        self.cached, self.brought = {}, None

        def nothing(dataset):
            raise DataError("not here")

        def bring(command, folder, output=None, patience=None):
            if self.brought is None:
                raise DataError(f"{command[0]} is not installed")
            suffix = "it.deb" if command[0] == "apt-get" else "it.tgz"
            (output or folder / suffix).write_bytes(self.brought)

        _sources._tfds_prepared = _sources._tfds_download = nothing
        _sources._run = bring
        for name, made in self.made.items():
            DATASETS[name] = made.dataset
            folder = place.empty(f"first_{name}")
            self.raw(name, folder)
            load(name, folder)
            self.cached[name] = (folder / f"{name}.npz").read_bytes()

    def raw(self, name, folder, **changed):
        """Bring the files of a dataset by hand."""
        target = folder / "raw" / name
        target.mkdir(parents=True)
        for file, content in {**self.made[name].files, **changed}.items():
            (target / file).write_bytes(content)

    def case(self, rng, number):
        """Damage one file, and load the dataset."""
        name = NAMES[number % len(NAMES)]
        folder = self.place.empty("data")
        kinds = (self.cache, self.by_hand, self.archive, self.package, self.picture)
        self.brought = None
        kept = kinds[number // len(NAMES) % len(kinds)](rng, name, folder) or {}
        tempfile.tempdir = str(self.place.empty("tmp"))
        try:
            found = load(name, folder)
        except Exception as error:
            verdict = refusal(error, DataError)
            cache = folder / f"{name}.npz"
            if cache.exists() and cache not in kept:
                raise Wrong("a cache file was written") from error
        else:
            verdict = "right"
            self.same(found, name)
            self.same(load(name, folder), name)
        for path, content in kept.items():
            if path.read_bytes() != content:
                raise Wrong(f"{path.name} was changed")
        if left := list((self.place.folder / "tmp").iterdir()):
            raise Wrong(f"{left[0]} was left behind")
        return verdict

    def same(self, found, name):
        """Raise unless a dataset is the right one."""
        for part, wanted in zip(found, self.made[name].splits, strict=True):
            for array, right in zip(part, wanted, strict=True):
                if array.dtype != right.dtype or not np.array_equal(array, right):
                    raise Wrong("the data is not that of the dataset")

    def cache(self, rng, name, folder):
        path, good = folder / f"{name}.npz", self.cached[name]
        kind = rng.choice(("bytes", "bytes", "members", "array", "zip of text", "pickle"))
        self.label = f"cache {kind}"
        files = mutate.members(good)
        if kind == "bytes":
            what, content = mutate.damaged(rng, good)
            self.label += f" {what}"
        elif kind == "members":
            place = rng.randrange(len(files))
            files = rng.choice(
                (
                    files[:place] + files[place + 1 :],
                    [*files, files[place]],
                    [*files, (rng.choice(mutate.tricks(self.place.outside)), b"x")],
                )
            )
            content = mutate.repacked(files)
        elif kind == "array":
            place = rng.randrange(len(files))
            member = files[place][0]
            value = np.load(io.BytesIO(files[place][1]))
            changed = rng.choice(
                (value.astype("int64"), value[:-1], value[..., None], value * 0 + 11, value[::-1])
            )
            buffer = io.BytesIO()
            np.save(buffer, changed)
            content = mutate.repacked(
                [(n, buffer.getvalue() if n == member else c) for n, c in files]
            )
        elif kind == "zip of text":
            content = mutate.repacked([(n, b"text") for n, _ in files])
        else:
            buffer = io.BytesIO()
            np.save(buffer, np.array([print], object), allow_pickle=True)
            content = mutate.repacked([(n, buffer.getvalue()) for n, _ in files])
        path.write_bytes(content)
        return {path: content}

    def by_hand(self, rng, name, folder):
        files = self.made[name].files
        file = rng.choice(list(files))
        self.raw(name, folder)
        path = folder / "raw" / name / file
        kind = rng.choice(
            ("plain", "packed", "packed", "bomb", "folder", "gone", "swapped", "link")
        )
        self.label = f"{file} {kind}"
        if kind == "plain":
            path.write_bytes(mutate.damaged(rng, files[file])[1])
        elif kind == "packed":
            path.unlink()
            content = mutate.damaged(rng, gzip.compress(files[file]))[1]
            path.with_name(f"{file}.gz").write_bytes(content)
        elif kind == "bomb":
            path.unlink()
            path.with_name(f"{file}.gz").write_bytes(bomb(2**26))
        elif kind == "folder":
            path.unlink()
            path.mkdir()
        elif kind == "gone":
            path.unlink()
        elif kind == "swapped":
            path.write_bytes(files[rng.choice(list(files))])
        else:
            path.unlink()
            path.symlink_to(rng.choice(("/dev/zero", "/nowhere", ".", path.name)))

    def tar(self, rng, files, mode):
        """Return an archive of files in which one thing is wrong."""
        kind = rng.choice(
            ("bytes", "bytes", "trick", "link", "size", "device", "gone", "twice", "many", "xz")
        )
        name = rng.choice(list(files))
        self.label += f" {kind}"
        if kind == "bytes":
            what, content = mutate.damaged(rng, tar_of(files, mode))
            self.label += f" {what}"
            return content
        if kind == "xz":
            return mutate.damaged(rng, tar_of(files, "w:xz"))[1]
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode=mode) as tar:

            def add(name, content, **changed):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                for key, value in changed.items():
                    setattr(member, key, value)
                tar.addfile(member, io.BytesIO(content))

            if kind == "trick":
                for trick in mutate.tricks(self.place.outside):
                    add(trick, b"escaped")
            elif kind == "link":
                for sort in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                    add(name, b"", type=sort, linkname=f"{self.place.outside}/escaped")
            elif kind == "device":
                add(name, b"", type=tarfile.CHRTYPE, devmajor=1, devminor=5)
            elif kind == "many":
                for number in range(2000):
                    add(f"x/{number}", b"")
            for other, content in files.items():
                if kind == "gone" and other == name:
                    continue
                if kind == "twice" and other == name:
                    add(other, content[:-1])
                add(other, content)
        content = buffer.getvalue()
        if kind == "size" and mode == "w":
            # The first header says that its file has 8 GiB; its checksum is right.
            header = tarfile.TarInfo.frombuf(content[:512], "utf-8", "surrogateescape")
            header.size = 2**33
            content = header.tobuf() + content[512:]
        return content

    def archive(self, rng, name, folder):
        if name != "cifar10":
            return self.by_hand(rng, name, folder)
        files = {f"cifar-10-batches-bin/{n}": c for n, c in self.made[name].files.items()}
        self.label = "archive"
        target = folder / "raw" / name
        target.mkdir(parents=True)
        content = self.tar(rng, files, rng.choice(("w", "w:gz")))
        (target / "cifar-10-binary.tar.gz").write_bytes(content)

    def package(self, rng, name, folder):
        self.label = "package"
        mode = "w" if name == "fashion_mnist" else "w:gz"
        self.brought = self.tar(rng, self.made[name].package, mode)

    def picture(self, rng, name, folder):
        """Damage a file inside of a package, whose archive is whole."""
        files = dict(self.made[name].package)
        file = rng.choice(list(files))
        self.label = f"{file} in a package"
        if file.endswith(".png") and rng.random() < 0.5:
            files[file] = huge_picture(rng)
            self.label += ", huge"
        elif file.endswith(".json") and rng.random() < 0.7:
            text = rng.choice(("[" * 10**5, "[1e999]", f"[{10**30}]", "{}", "[[1], 2]", '["x"]'))
            files[file] = rng.choice((text, json.dumps(mutate.random_json(rng)))).encode()
        elif file.endswith(".gz") and rng.random() < 0.3:
            files[file] = bomb(2**26)
        else:
            files[file] = mutate.damaged(rng, files[file])[1]
        self.brought = tar_of(files, "w" if name == "fashion_mnist" else "w:gz")


def bomb(size):
    """Return a gzip file that becomes that many zeros."""
    return gzip.compress(bytes(size), 1)


def huge_picture(rng):
    """Return a PNG file that says it has very many pixels."""

    def chunk(kind, content):
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    height = rng.choice((0, 10**5, 10**6, 2**31 - 1))
    header = struct.pack(">IIBBBBB", rng.choice((1024, 2**31 - 1)), height, 8, 2, 0, 0, 0)
    text = chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(2**24)))
    more = rng.choice((b"", text))
    data = chunk(b"IDAT", zlib.compress(bytes(10**5)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + more + data + chunk(b"IEND", b"")
