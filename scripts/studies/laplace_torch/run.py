"""Laplace, and laplace-torch on the same network and data."""

import logging
import os
import subprocess
import tempfile
import warnings
from functools import partial
from pathlib import Path

import keras
import numpy as np

import tfp_ibnn as ibnn
from lib import files
from lib.benchmark import figures, record
from lib.data import load
from studies.laplace_torch import PAGE, RESULTS
from studies.laplace_torch import cases as laplace_cases

FIGURE = "![Seconds of fit and prediction, by size](laplace_growth.png)"
PEER = Path(__file__).with_name("peer.py")
CLASSES = 10
PLACES = ("output", "peer_python", "resume", "store")  # options that no number depends on


def execute(options):
    """Do what the command line says."""
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
    figures.save(grown, PAGE.with_name("laplace_growth.png"))
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
