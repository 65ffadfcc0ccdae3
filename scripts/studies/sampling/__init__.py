"""Measure how fast the predictive mean settles: independent, antithetic and quasi-random draws.

Trains the digits network of train_digits.py with a Gaussian and with a flow posterior. Then the
root mean squared error of the averaged class probabilities, over images, classes and seeds, is
measured for several numbers of samples against the average of 32,768 quasi-random ones.

Examples:
    python scripts/study.py sampling
    python scripts/study.py sampling --epochs 4 --most 32 --seeds 2 --output outputs/quick
"""

import argparse


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=60, help="in all, both halves (default 60)")
    parser.add_argument("--most", type=int, default=512, help="most samples (default 512)")
    parser.add_argument("--seeds", type=int, default=8, help="predictions for each (default 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the training (default 0)")
    parser.add_argument("--output", default="outputs/sampling", help="folder for what is written")
    options = parser.parse_args(argv)
    for name, least in (("epochs", 2), ("most", 4), ("seeds", 1), ("seed", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least}; got {getattr(options, name)}")
    return options


def main(argv=None):
    options = parse(argv)  # first: the imports below take seconds
    from studies.sampling.run import execute

    return execute(options)
