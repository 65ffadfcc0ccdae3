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
in --output, both runs, to results/benchmark, and shows it in docs/laplace.md.

Examples:
    python scripts/compare_laplace.py
    python scripts/compare_laplace.py --train 256 --test 100 --cases "last_layer full"
    python scripts/compare_laplace.py --time --growth --threads 4
    python scripts/compare_laplace.py --store
"""

import argparse
import logging
import os
import subprocess
import tempfile
import warnings
from functools import partial
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("MPLBACKEND", "Agg")

RESULTS, PAGE = Path("results/benchmark"), Path("docs/laplace.md")
CASES = ("last_layer full", "last_layer diag", "last_layer kron", "all diag", "all kron")


def parse(argv=None):
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
    add("--peer-python", default=".venv-peers/bin/python", help="Python with laplace-torch")
    add("--threads", type=int, help="of both, by the cores they may use (default: all)")
    add("--time", action="store_true", help="time both on Fashion-MNIST")
    add("--growth", action="store_true", help="time ours for several sizes")
    add("--samples", type=int, default=32, help="draws of a prediction that is timed")
    add("--rounds", type=int, default=7, help="of --time; fewer where one takes long")
    add("--output", type=Path, default="outputs/benchmark", help="folder of --time and --growth")
    add("--resume", action="store_true", help="keep the rows in --output, measure the others")
    add("--store", action="store_true", help=f"keep the rows in --output, and show them in {PAGE}")
    options = parser.parse_args(argv)
    for name in ("threads", "rounds", "samples", "batch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1; got {value}")
    return options


if __name__ == "__main__":
    parse()  # --help need not wait for the imports below, which take seconds

import keras
import numpy as np

import tfp_ibnn as ibnn
from experiments import files
from experiments.benchmark import figures, laplace_cases, record
from experiments.data import load

FIGURE = "![Seconds of fit and prediction, by size](images/laplace_growth.png)"
PEER = Path(__file__).parent / "experiments" / "benchmark" / "laplace_peer.py"
CLASSES = 10
PLACES = ("output", "peer_python", "resume", "store")  # options that no number depends on


def main(argv=None):
    options = parse(argv)
    if options.threads is not None:  # before any work; TensorFlow, JAX and PyTorch all heed it
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    logging.getLogger("tensorflow").setLevel(logging.ERROR)  # that each fit has its own function
    if options.time or options.growth or options.store:
        if options.time or options.growth:
            measure(options)
        return store(options.output) if options.store else None
    x, y = images(options.train + options.test, options.seed)
    model = trained(x[: options.train], y[: options.train], options)
    x_test, x, y = x[options.train :], x[: options.train], y[: options.train]
    with tempfile.TemporaryDirectory() as folder:
        write_task(folder, model, x, y, x_test, options)
        subprocess.run([options.peer_python, PEER, folder], check=True)
        with np.load(Path(folder) / "peer.npz") as file:
            peer = dict(file)
    print(f"{'case':16} {'difference':>10} {'evidence, both':>20}")
    for name in options.cases:
        mine, evidence = ours(model, name, x, y, x_test, options)
        both = f"{evidence:.2f} {peer[f'{name} evidence']:.2f}"
        print(f"{name:16} {np.abs(mine - peer[name]).max():10.1e} {both:>20}")
    print(f"Beside {peer['versions']}; ours is the first of two numbers.")


def measure(options):
    """Measure the rows of --time and --growth; write each to the output at once."""
    (x, y), (x_test, _) = load("fashion_mnist")[:2]
    x, x_test = ((part / 255).astype("float32") for part in (x, x_test[: options.test]))
    warnings.filterwarnings("ignore", message="The network does not seem to be trained")
    if options.time:
        data = x[: options.train], y[: options.train].astype("int32")
        model = trained(*data, options)
        with tempfile.TemporaryDirectory() as folder:
            write_task(folder, model, *data, x_test, options)
            command = [options.peer_python, "-W", "ignore", PEER, folder, "serve"]
            with laplace_cases.Peer(command) as peer:
                arguments = (model, *data, x_test, peer, options)
                keep(options, "laplace", partial(laplace_cases.beside_peer, *arguments))
    if options.growth:
        keep(options, "laplace_growth", partial(laplace_cases.growth, network, x, options))


def keep(options, name, rows):
    """Print the rows of `rows(known=ids)`, and write them to the output, each when it is there."""
    path = options.output / f"{name}.json"
    found = record.read(path)["rows"] if options.resume and path.exists() else []
    for row in rows(known={row["id"] for row in found}):
        print(record.line(row), flush=True)
        found.append(row)
        about = {key: value for key, value in vars(options).items() if key not in PLACES}
        record.write(path, found, about)


def store(output):
    """Show the runs of a folder in the page, and keep them."""
    runs = {name: record.read(output / f"{name}.json") for name in ("laplace", "laplace_growth")}
    for name, run in runs.items():
        files.write_json(RESULTS / f"{name}.json", run)
    grown = laplace_cases.figure(runs["laplace_growth"]["rows"])
    figures.save(grown, PAGE.parent / "images" / "laplace_growth.png")
    text = PAGE.read_text(encoding="utf-8").replace("<!-- figure of growth -->", FIGURE)
    files.write_text(PAGE, record.fill(text, RESULTS))


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


if __name__ == "__main__":
    main()
