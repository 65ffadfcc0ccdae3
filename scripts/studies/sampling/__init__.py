"""Measure how fast the predictive mean settles: independent, antithetic and quasi-random draws.

Trains the digits network of train_digits.py with a Gaussian and with a flow posterior. Then the
root mean squared error of the averaged class probabilities, over images, classes and seeds, is
measured for several numbers of samples against the average of 32,768 quasi-random ones.

Examples:
    python scripts/study.py sampling
    python scripts/study.py sampling --epochs 4 --most 32 --seeds 2 --output outputs/quick
"""

from studies.command import Command


def options(add):
    add("--epochs", type=int, default=60, help="in all, both halves (default 60)")
    add("--most", type=int, default=512, help="most samples (default 512)")
    add("--seeds", type=int, default=8, help="predictions for each (default 8)")
    add("--seed", type=int, default=0, help="of the training (default 0)")
    add("--output", default="outputs/sampling", help="folder for what is written")


STUDY = Command("sampling", options, {"epochs": 2, "most": 4, "seeds": 1, "seed": 0})
