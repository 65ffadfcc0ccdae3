"""The cache: one checked `NAME.npz` for each dataset, written whole or not at all."""

import os
import secrets
import sys
from pathlib import Path

import numpy as np

from tfp_ibnn.data._formats import Report, quiet, verify
from tfp_ibnn.data.datasets import DataError, Dataset, Splits

__all__ = ["cache_folder", "check_writable", "read", "write"]

_ARRAYS = "x_train", "y_train", "x_test", "y_test"


def cache_folder(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return `data_dir`, else the folder in `TFP_IBNN_DATA`, else the user's cache folder."""
    given = data_dir if data_dir is not None else os.environ.get("TFP_IBNN_DATA") or None
    try:
        if given is not None:
            return Path(given).expanduser().absolute()
        return _user_cache() / "tfp_ibnn"
    except TypeError:
        raise DataError(f"`data_dir` must be a folder's path or None; got {data_dir!r}.") from None
    except RuntimeError as error:  # no home folder
        raise DataError(f"There is no folder to keep data in: {error}; give `data_dir`.") from None


def _user_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG standard asks to ignore a relative path.
    return chosen if chosen.is_absolute() else Path.home() / ".cache"


def read(path: Path, dataset: Dataset, report: Report = quiet) -> Splits | None:
    """Return the checked arrays of a cache file, or None if there is no such file.

    Every load checks every byte: half a second for CIFAR-10, next to a training of hours.
    """
    report("reading", 0, 0)
    try:
        with np.load(path, allow_pickle=False) as stored:
            x_train, y_train, x_test, y_test = (stored[name] for name in _ARRAYS)
        splits = (x_train, y_train), (x_test, y_test)
        verify(dataset, splits, report)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
    except MemoryError:
        raise
    except Exception as error:  # broken bytes make numpy and zipfile raise nearly anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"{path} is broken ({reason}); delete it, and the next load makes it again."
        ) from None
    return splits


def check_writable(folder: Path) -> None:
    """Make the folder, and raise before a long download if it cannot take a file."""
    probe = _temporary(folder / "probe")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written to: {error.strerror or error}; "
            "choose another folder by `data_dir` or TFP_IBNN_DATA."
        ) from None


def write(path: Path, splits: Splits) -> None:
    """Write a cache file. No other process ever sees part of it, and a failure leaves nothing."""
    arrays = [array for split in splits for array in split]
    temporary = _temporary(path)
    try:
        # Not by `tempfile`, whose files other users of a shared folder could not read.
        with open(temporary, "xb") as file:
            np.savez(file, **dict(zip(_ARRAYS, arrays, strict=True)))
            file.flush()
            os.fsync(file.fileno())
        _replace(temporary, path)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}.") from None
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def _replace(temporary: Path, path: Path) -> None:
    try:
        os.replace(temporary, path)
    except PermissionError:
        # Windows refuses while another process reads the file; then that one has just made it.
        if not path.exists():
            raise
