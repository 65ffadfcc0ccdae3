r"""Train the same networks for a few epochs with each backend, and compare their losses.

LeNet and VGG16, Gaussian and flow, float32 and mixed_bfloat16; on TensorFlow with XLA and without.
Each is a run of train_cifar.py, whose folder stays; --full is one of full length. Runs of both
backends are collected in results/backends/runs.json, with their commands, versions and hardware,
and shown as a table in results/backends/README.md: run this once in each environment. Rows that
are there already stay, unless they are run again.

Examples:
    python scripts/study.py backends --jobs 8
    KERAS_BACKEND=jax python scripts/study.py backends --jobs 8
    python scripts/study.py backends --only vgg16-gaussian --epochs 1 --results outputs/part
    python scripts/study.py backends --full
"""

from studies.command import Command


def options(add):
    add("--epochs", type=int, default=3, help="of each run (default 3)")
    add("--seed", type=int, default=0, help="of all runs (default 0)")
    add("--full", action="store_true", help="only VGG16 with the Gaussian, at full length")
    add("--jobs", type=int, default=1, help="runs at once (default 1); more pay on a GPU")
    add("--only", nargs="+", metavar="PART", help="runs whose names have one of these parts")
    add("--runs", default="outputs/backends", help="folder of the runs")
    add("--results", default="results/backends", help="folder of the table")
    add("--data-dir", help="cache of the data")


STUDY = Command("backends", options, {"epochs": 1, "jobs": 1})
