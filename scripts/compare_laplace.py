"""Compare Laplace with laplace-torch: the same network, data and prior, in one run.

A small LeNet is trained on images that are made up (a pattern for each class, and noise); its
weights go to PyTorch, in the environment of `make peers` and a process of its own. For each subset
of weights and structure of the Hessian the table has the largest difference of a probability
(linearised, probit), the evidence of both, and the seconds of fit and prediction of both.

The Kronecker factors differ by a convention: laplace-torch keeps the bias in a block of its own,
here it is a row of the input factor.

Examples:
    python scripts/compare_laplace.py
    python scripts/compare_laplace.py --train 256 --test 100 --cases "last_layer full"
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import tfp_ibnn as ibnn
from experiments import provenance

PEER = Path(__file__).parent / "experiments" / "benchmark" / "laplace_peer.py"
CASES = ("last_layer full", "last_layer diag", "last_layer kron", "all diag", "all kron")
CLASSES = 10


def main(argv=None):
    options = parse(argv)
    keras.utils.set_random_seed(options.seed)
    x, y = images(options.train + options.test, options.seed)
    model = network()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x[: options.train], y[: options.train], epochs=options.epochs, verbose=0)
    x_test, x, y = x[options.train :], x[: options.train], y[: options.train]
    task = {f"weight_{i}": w for i, w in enumerate(model.get_weights())}
    task |= {"x": x, "y": y, "x_test": x_test, "batch": options.batch_size}
    task |= {"prior": options.prior_precision, "cases": np.array(options.cases)}
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "task.npz", **task)
        subprocess.run([options.python, PEER, folder], check=True)
        with np.load(Path(folder) / "peer.npz") as file:
            peer = dict(file)
    rows = {}
    for name in options.cases:
        mine, seconds, evidence = ours(model, name, x, y, x_test, options)
        theirs = peer[f"{name} seconds"].tolist()
        rows[name] = {
            "largest_difference": float(np.abs(mine - peer[name]).max()),
            "evidence": [evidence, float(peer[f"{name} evidence"])],
            "fit_seconds": [seconds[0], theirs[0]],
            "predict_seconds": [seconds[1], theirs[1]],
        }
    settings = {**vars(options), "python": "PyTorch's", "output": None}
    record = {"peer": str(peer["versions"]), "rows": rows, **provenance(settings)}
    print_table(record)
    if options.output is not None:
        Path(options.output).write_text(json.dumps(record, indent=2) + "\n")


def ours(model, name, x, y, x_test, options):
    """Return predictions, the seconds of fit and prediction, and the evidence."""
    subset, structure = name.split()
    fixed = {"prior_precision": options.prior_precision, "link_approx": "probit"}
    la = ibnn.Laplace(model, subset, structure, **fixed)
    began = time.perf_counter()
    la.fit(x, y, batch_size=options.batch_size, verbose=0)
    middle = time.perf_counter()
    found = ibnn.MonteCarlo(la).predict(x_test, batch_size=options.batch_size, verbose=0)["mean"]
    seconds = [middle - began, time.perf_counter() - middle]
    return found, seconds, la.log_marginal_likelihood()


def network():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(6, 5, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(16, 5, activation="relu"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(84, activation="relu"),
            layers.Dense(CLASSES),
        ]
    )


def images(count, seed):
    """Return images (count, 28, 28, 1) and labels."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % CLASSES
    patterns = rng.normal(size=(CLASSES, 28, 28, 1))
    return (patterns[y] + 3 * rng.normal(size=(count, 28, 28, 1))).astype("float32"), y


def print_table(record):
    print(f"{'case':16} {'difference':>10} {'evidence, both':>20} {'fit s':>14} {'predict s':>14}")
    for name, row in record["rows"].items():
        pairs = [row[key] for key in ("evidence", "fit_seconds", "predict_seconds")]
        evidence, fit, predict = (f"{mine:.2f} {theirs:.2f}" for mine, theirs in pairs)
        difference = row["largest_difference"]
        print(f"{name:16} {difference:10.1e} {evidence:>20} {fit:>14} {predict:>14}")
    print(f"Beside {record['peer']}; ours is the first of two numbers.")


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=int, default=2000, help="training images")
    parser.add_argument("--test", type=int, default=10_000, help="images to predict")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--prior-precision", type=float, default=1.0)
    parser.add_argument("--cases", nargs="+", default=CASES, help="such as 'last_layer full'")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", default=".venv-peers/bin/python", help="with laplace-torch")
    parser.add_argument("--output", help="a JSON file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
