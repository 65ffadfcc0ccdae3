"""Files that are written completely or not at all."""

import contextlib
import ctypes
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

# From Linux's fcntl.h and fs.h.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """Give a temporary path beside `path`; what is written there takes its place at the end.

    A reader, or a run that was killed in between, finds the old file or the new one, never a part.
    After an error, a full disk among them, the old file is as it was and the temporary one is gone.

    Example:
        >>> import pathlib, tempfile, tfp_ibnn as ibnn
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "scores.txt"
        >>> with ibnn.training.replacing(path) as temporary:
        ...     _ = temporary.write_text("0.57")
        >>> path.read_text()
        '0.57'
    """
    path = Path(path)
    # The suffix stays: writers such as Keras's and numpy's go by it.
    temporary = path.with_name(f".{path.stem}-{uuid.uuid4().hex}{path.suffix}")
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(path: str | os.PathLike) -> Iterator[Path]:
    """Give a temporary path beside `path`; the folder made there takes its place at the end.

    After an error the old folder is as it was. On Linux a process that is killed, too, leaves the
    old one or the new one; elsewhere the old one may be left under its temporary name.
    """
    path = Path(path).resolve()  # a link stays; "." has a name
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    old = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        yield temporary
        if not path.exists():
            temporary.replace(path)
        elif not _exchange(temporary, path):
            path.replace(old)
            temporary.replace(path)
            shutil.rmtree(old, ignore_errors=True)
    finally:
        if old.exists() and not path.exists():  # after an error
            old.replace(path)
        shutil.rmtree(temporary, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Let two folders change places in one step, where the system can; return whether it did."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):  # not Linux
        return False
    # A file system may refuse it.
    status = rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return status == 0
