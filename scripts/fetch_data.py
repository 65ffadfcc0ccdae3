"""Fetch datasets into the cache folder, so that loading them needs no network.

Examples:
    python scripts/fetch_data.py cifar10
    python scripts/fetch_data.py mnist fashion_mnist --data-dir ~/datasets
    python scripts/fetch_data.py --list
"""

import argparse
import logging
import os
import signal
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a dataset; --list names them")
    folder = "the cache folder (default: TFP_IBNN_DATA, else tfp_ibnn in the user's cache folder)"
    parser.add_argument("--data-dir", metavar="DIR", help=folder)
    listing = "show the datasets, their sizes, and whether cached"
    parser.add_argument("--list", action="store_true", help=listing)
    options = parser.parse_args(argv)
    if not options.names and not options.list:
        parser.error("name a dataset, or ask for --list")
    return options


if __name__ == "__main__":
    parse()  # --help need not wait for the imports below, which take seconds

from lib.data import DATASETS, DataError, load
from lib.data.loading import cache_folder


def main(argv=None):
    options = parse(argv)
    if unknown := [name for name in options.names if name not in DATASETS]:
        known = ", ".join(DATASETS)
        print(f"error: unknown dataset {unknown[0]!r}; choose from {known}", file=sys.stderr)
        return 2
    log = logging.getLogger("lib.data")  # what is tried, and how far a download is
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler())
    # Ends like Ctrl-C does, so that temporary files go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        cache = cache_folder(options.data_dir)
        if options.list:
            sizes = f"{'training':>10}{'test':>8}{'MB':>8}"
            print(f"{'name':15}{'classes':>8}{'image':>12}{sizes}  cached")
            for name, data in DATASETS.items():
                shape = " x ".join(map(str, data.image_shape))
                sizes = f"{data.train_size:10,}{data.test_size:8,}{data.nbytes / 1e6:8.1f}"
                cached = "yes" if (cache / f"{name}.npz").exists() else "no"
                print(f"{name:15}{len(data.classes):8}{shape:>12}{sizes}  {cached}")
            print(f"The cache folder is {cache}.")
        for name in dict.fromkeys(options.names):
            there = (path := cache / f"{name}.npz").exists()
            load(name, options.data_dir)
            print(f"{name}: {path}" + (" (was there already; checked)" if there else ""))
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
