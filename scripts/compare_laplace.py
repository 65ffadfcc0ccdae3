"""Compare Laplace with laplace-torch: the same network, data and prior, in one run.

A small LeNet is trained on images that are made up (a pattern for each class, and noise); its
weights go to PyTorch, in the environment of `make peers` and a process of its own. For each subset
of weights and structure of the Hessian the table has the largest difference of a probability
(linearised, probit) and the evidence of both.

The Kronecker factors differ by a convention: laplace-torch keeps the bias in a block of its own,
here it is a row of the input factor.

With --time, on Fashion-MNIST, fits and predictions of both are timed in turns, with as many
threads; --growth times ours for more parameters, classes and examples. --store keeps both in
results/benchmark/laplace.json, and draws how it grows into docs/images.

Examples:
    python scripts/compare_laplace.py
    python scripts/compare_laplace.py --train 256 --test 100 --cases "last_layer full"
    python scripts/compare_laplace.py --time --growth --store
"""

import argparse
import logging
import os
import subprocess
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("MPLBACKEND", "Agg")

import keras
import numpy as np

import tfp_ibnn as ibnn
from experiments import files
from experiments.benchmark import figures, laplace_cases, record

RESULTS, PAGE = Path("results/benchmark"), Path("docs/laplace.md")
PEER = Path(__file__).parent / "experiments" / "benchmark" / "laplace_peer.py"
CASES = ("last_layer full", "last_layer diag", "last_layer kron", "all diag", "all kron")
CLASSES = 10


def main(argv=None):
    options = parse(argv)
    logging.getLogger("tensorflow").setLevel(logging.ERROR)  # that each fit has its own function
    if options.time or options.growth:
        return time_it(options)
    x, y = images(options.train + options.test, options.seed)
    model = trained(x[: options.train], y[: options.train], options)
    x_test, x, y = x[options.train :], x[: options.train], y[: options.train]
    with tempfile.TemporaryDirectory() as folder:
        write_task(folder, model, x, y, x_test, options)
        subprocess.run([options.python, PEER, folder], check=True)
        with np.load(Path(folder) / "peer.npz") as file:
            peer = dict(file)
    print(f"{'case':16} {'difference':>10} {'evidence, both':>20}")
    for name in options.cases:
        mine, evidence = ours(model, name, x, y, x_test, options)
        both = f"{evidence:.2f} {peer[f'{name} evidence']:.2f}"
        print(f"{name:16} {np.abs(mine - peer[name]).max():10.1e} {both:>20}")
    print(f"Beside {peer['versions']}; ours is the first of two numbers.")


def time_it(options):
    """Print the rows of --time and --growth, and keep them with --store."""
    (x, y), (x_test, _) = ibnn.data.load("fashion_mnist")[:2]
    x, x_test = ((part / 255).astype("float32") for part in (x, x_test[: options.test]))
    warnings.filterwarnings("ignore", message="The network does not seem to be trained")
    rows = []
    if options.time:
        data = x[: options.train], y[: options.train].astype("int32")
        model = trained(*data, options)
        with tempfile.TemporaryDirectory() as folder:
            write_task(folder, model, *data, x_test, options)
            command = [options.python, "-W", "ignore", PEER, folder, "serve"]
            rows += shown(laplace_cases.beside_peer(model, *data, x_test, command, options))
    if options.growth:
        rows += shown(laplace_cases.growth(network, x, options))
    if options.store:
        record.write(RESULTS / "laplace.json", rows, {**vars(options), "python": "PyTorch's"})
        figures.save(laplace_cases.figure(rows), PAGE.parent / "images" / "laplace_growth.png")
        files.write_text(PAGE, record.fill(PAGE.read_text(encoding="utf-8"), RESULTS))


def shown(rows):
    for row in rows:
        print(record.line(row), flush=True)
        yield row


def trained(x, y, options):
    keras.utils.set_random_seed(options.seed)
    model = network()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, epochs=options.epochs, verbose=0)
    return model


def write_task(folder, model, x, y, x_test, options):
    task = {f"weight_{i}": w for i, w in enumerate(model.get_weights())}
    task |= {"x": x, "y": y, "x_test": x_test, "batch": options.batch_size}
    task |= {"prior": options.prior_precision, "cases": np.array(options.cases)}
    np.savez(Path(folder) / "task.npz", samples=options.samples, **task)


def ours(model, name, x, y, x_test, options):
    """Return predictions and the evidence."""
    fixed = {"prior_precision": options.prior_precision, "link_approx": "probit"}
    la = ibnn.Laplace(model, *name.split(), **fixed)
    la.fit(x, y, batch_size=options.batch_size, verbose=0)
    found = ibnn.MonteCarlo(la).predict(x_test, batch_size=options.batch_size, verbose=0)["mean"]
    return found, la.log_marginal_likelihood()


def network(width=1, classes=CLASSES):
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(int(6 * width), 5, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(int(16 * width), 5, activation="relu"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(int(84 * width), activation="relu"),
            layers.Dense(classes),
        ]
    )


def images(count, seed):
    """Return images (count, 28, 28, 1) and labels."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % CLASSES
    patterns = rng.normal(size=(CLASSES, 28, 28, 1))
    return (patterns[y] + 3 * rng.normal(size=(count, 28, 28, 1))).astype("float32"), y


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--train", type=int, default=2000, help="training images")
    add("--test", type=int, default=10_000, help="images to predict")
    add("--epochs", type=int, default=5)
    add("--batch-size", type=int, default=128)
    add("--prior-precision", type=float, default=1.0)
    add("--cases", nargs="+", default=CASES, help="such as 'last_layer full'")
    add("--seed", type=int, default=0)
    add("--python", default=".venv-peers/bin/python", help="with laplace-torch")
    add("--time", action="store_true", help="time both on Fashion-MNIST")
    add("--growth", action="store_true", help="time ours for several sizes")
    add("--samples", type=int, default=32, help="draws of a prediction that is timed")
    add("--rounds", type=int, default=5, help="of --time; fewer where one takes long")
    add("--store", action="store_true", help=f"keep --time and --growth, and show them in {PAGE}")
    options = parser.parse_args(argv)
    if options.store and not (options.time and options.growth):
        parser.error("--store keeps whole runs: give --time and --growth as well")
    return options


if __name__ == "__main__":
    main()
