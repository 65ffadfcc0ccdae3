"""The cache: one checked `NAME.npz` for each dataset, written whole or not at all."""

import os
import sys
import tempfile
from pathlib import Path

import numpy as np

from tfp_ibnn._core import files
from tfp_ibnn.data._formats import Report, quiet, verify
from tfp_ibnn.data.datasets import DataError, Dataset, Splits, one_line

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
        raise DataError(
            f"{path} is broken ({one_line(error)}); delete it, and the next load makes it again."
        ) from None
    return splits


def check_writable(folder: Path) -> None:
    """Make the folder, and raise before a long download if it cannot take a file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written to: {error.strerror or error}; "
            "choose another folder by `data_dir` or TFP_IBNN_DATA."
        ) from None


def write(path: Path, splits: Splits) -> None:
    """Write a cache file. No other process ever sees part of it, and a failure leaves nothing."""
    arrays = [array for split in splits for array in split]
    try:
        with files.replacing(path) as temporary:
            np.savez(temporary, **dict(zip(_ARRAYS, arrays, strict=True)))
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}.") from None
