"""Time `OODDetector` by nearest neighbours: the 10,000 test images of CIFAR-10 on VGG16's features.

The bank holds the features of all 50,000 training images. Scores and the network's own predictions
take turns; each time is the minimum of the rounds. The weights are random, which changes no time.
--store keeps the result in results/benchmark/knn.json.

Examples:
    python scripts/study.py detector_time
    python scripts/study.py detector_time --rounds 5 --store
"""

from pathlib import Path

from studies.command import DATA_DIR, Command

RESULTS = Path("results/benchmark/knn.json")


def options(add):
    add("--rounds", type=int, default=3, help="default 3")
    add("--images", type=int, default=10_000, help="test images (default 10000)")
    add("--bank", type=int, default=50_000, help="training images (default 50000)")
    add("--data-dir", help=DATA_DIR)
    add("--store", action="store_true", help=f"keep the result in {RESULTS}")


STUDY = Command("detector_time", options)
