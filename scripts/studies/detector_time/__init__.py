"""Time `OODDetector` by nearest neighbours: the 10,000 test images of CIFAR-10 on VGG16's features.

The bank holds the features of all 50,000 training images. Scores and the network's own predictions
take turns; each time is the minimum of the rounds. The weights are random, which changes no time.
--store keeps the result in results/benchmark/knn.json.

Examples:
    python scripts/study.py detector_time
    python scripts/study.py detector_time --rounds 5 --store
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

RESULTS = Path("results/benchmark/knn.json")


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="default 3")
    add("--images", type=int, default=10_000, help="test images (default 10000)")
    add("--bank", type=int, default=50_000, help="training images (default 50000)")
    add("--data-dir", help="cache of the data (default: TFP_IBNN_DATA, or the user's cache)")
    add("--store", action="store_true", help=f"keep the result in {RESULTS}")
    return parser.parse_args(argv)


def main(argv=None):
    options = parse(argv)  # first: the imports below take seconds
    from studies.detector_time.run import execute

    return execute(options)
