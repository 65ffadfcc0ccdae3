"""Compare Laplace with laplace-torch: the same network, data and prior, in one run.

A small LeNet is trained on images that are made up (a pattern for each class, and noise); its
weights go to PyTorch, in the environment of `make peers` and a process of its own. For each subset
of weights and structure of the Hessian the table has the largest difference of a probability
(linearised, probit) and the evidence of both.

The Kronecker factors differ by a convention: laplace-torch keeps the bias in a block of its own,
here it is a row of the input factor.

With --time, on Fashion-MNIST, fits and predictions of both are timed in turns, with as many
threads; --growth times ours for more parameters, classes and examples. Every row is written to
--output as soon as it is measured; --resume continues a run that was stopped. --store takes what is
in --output, both runs, to results/benchmark, and shows it in
results/benchmark/laplace/README.md.

Examples:
    python scripts/study.py laplace_torch
    python scripts/study.py laplace_torch --train 256 --test 100 --cases "last_layer full"
    python scripts/study.py laplace_torch --time --growth --threads 4
    python scripts/study.py laplace_torch --store
"""

from pathlib import Path

from studies.command import Command

RESULTS = Path("results/benchmark")
PAGE = RESULTS / "laplace" / "README.md"
CASES = ("last_layer full", "last_layer diag", "last_layer kron", "all diag", "all kron")


def options(add):
    add("--train", type=int, default=2000, help="training images")
    add("--test", type=int, default=10_000, help="images to predict")
    add("--epochs", type=int, default=5)
    add("--batch-size", type=int, default=128)
    add("--prior-precision", type=float, default=1.0)
    add("--cases", nargs="+", default=CASES, help="such as 'last_layer full'")
    add("--seed", type=int, default=0)
    add("--peer-python", default=".venv-peers/bin/python", help="Python with laplace-torch")
    add("--threads", type=int, help="of both, by the cores they may use (default: all)")
    add("--time", action="store_true", help="time both on Fashion-MNIST")
    add("--growth", action="store_true", help="time ours for several sizes")
    add("--samples", type=int, default=32, help="draws of a prediction that is timed")
    add("--rounds", type=int, default=7, help="of --time; fewer where one takes long")
    add("--output", type=Path, default="outputs/benchmark", help="folder of --time and --growth")
    add("--resume", action="store_true", help="keep the rows in --output, measure the others")
    add("--store", action="store_true", help=f"keep the rows in --output, and show them in {PAGE}")


POSITIVE = ("threads", "rounds", "samples", "batch_size")
STUDY = Command("laplace_torch", options, dict.fromkeys(POSITIVE, 1))
