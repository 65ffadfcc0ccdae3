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

from pathlib import Path

from studies.command import Command

RESULTS = Path("results/benchmark/mapie.json")


def options(add):
    add("--epochs", type=int, default=20)
    add("--seed", type=int, default=0)
    add("--python", default=".venv-peers/bin/python", help="with MAPIE")
    add("--store", action="store_true", help=f"keep the rows in {RESULTS}")


STUDY = Command("mapie", options)
