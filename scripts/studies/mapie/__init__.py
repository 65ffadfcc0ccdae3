"""Compare conformal sets with MAPIE's: the same predictions and calibration examples, in one run.

A small network is trained on digits; its predictions go to MAPIE, in the environment of `make
peers` and a process of its own. Sets by LAC and APS (the last label included) have to be identical;
those by RAPS are made with the k and lambda that MAPIE chose, from the examples that it calibrated
with. The table has the number of new examples whose sets differ. --store keeps it in
results/benchmark/mapie.json.

Examples:
    python scripts/study.py mapie
    python scripts/study.py mapie --store
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

RESULTS = Path("results/benchmark/mapie.json")


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", default=".venv-peers/bin/python", help="with MAPIE")
    parser.add_argument("--store", action="store_true", help=f"keep the rows in {RESULTS}")
    return parser.parse_args(argv)


def main(argv=None):
    options = parse(argv)  # first: the imports below take seconds
    from studies.mapie.run import execute

    execute(options)
