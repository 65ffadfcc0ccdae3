"""How many rows a second does scripts/score.py score, beside `MonteCarlo.predict`?

A Parquet file of random rows is scored by a file of 32 draws of a small network, 8-64-64-3, in the
environment of `make beam`; then `MonteCarlo.predict` predicts the same rows from memory, on the
same cores, in batches of several sizes. Every row must be there once, with the same numbers. The
seconds of score.py contain the start of its processes, reading and writing. --store keeps the rows
in results/score/runs.json, and in the page.

Examples:
    python scripts/study.py score_time --rows 100000
    python scripts/study.py score_time --store
"""

import os
from pathlib import Path

from studies.command import Command

RESULTS = Path("results/score")


def options(add):
    add("--rows", type=int, default=1_000_000, help="default 1,000,000")
    add("--workers", type=int, default=os.cpu_count(), help="processes (default: one for a core)")
    add("--seed", type=int, default=0, help="of the rows and the network (default 0)")
    add("--python", default=".venv-beam/bin/python", help="with Beam")
    add("--store", action="store_true", help=f"keep the rows in {RESULTS}")


STUDY = Command("score_time", options, {"rows": 1, "workers": 1, "seed": 0})
