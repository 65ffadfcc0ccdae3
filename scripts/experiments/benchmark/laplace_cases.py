"""Laplace beside laplace-torch, case by case in turns, and how its cost grows.

A fit is timed with the tracing of its function, a prediction without: `predict` ran before.
"""

import subprocess
import time
from argparse import Namespace

import keras
import numpy as np

import tfp_ibnn as ibnn
from experiments.benchmark import timing
from experiments.benchmark.record import row
from experiments.figures import facets
from tfp_ibnn.plots.style import marked

NAMES = {"last_layer full": "last layer, full", "last_layer kron": "last layer, Kronecker"}
NAMES["all kron"] = "all layers, Kronecker"
WAYS = {"glm probit": "probit", "glm mc": "linearised draws", "nn mc": "draws of weights"}
LONG = 12  # seconds of one case after which no further round of it begins
AXES = {  # width, classes and examples
    "parameters": [(width, 10, 250) for width in (0.5, 1, 2, 4)],
    "classes": [(1, classes, 250) for classes in (4, 20, 100)],
    "examples": [(1, 10, count) for count in (250, 1000, 4000)],
}


def fitter(model, name, x, y, options, way="glm mc"):
    """Return a function that fits a case, such as "all kron", and returns the posterior."""
    kind = dict(zip(("pred_type", "link_approx"), way.split(), strict=True))
    la = ibnn.Laplace(model, *name.split(), prior_precision=options.prior_precision, **kind)
    return lambda: la.fit(x, y, batch_size=options.batch_size, verbose=0)


def predictor(model, name, x, y, x_test, options, way="glm mc"):
    """Return a function that predicts images; what is fitted has few."""
    la = fitter(model, name, x[:500], y[:500], options, way)()
    mc = ibnn.MonteCarlo(la, samples=options.samples, seed=0)
    mc.predict(x_test[: 2 * options.batch_size], batch_size=options.batch_size, verbose=0)
    return lambda: mc.predict(x_test, batch_size=options.batch_size, verbose=0)


def beside_peer(model, x, y, x_test, command, options):
    """Yield a row for each case: our seconds and those of laplace-torch, in turns."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(command, **pipes) as peer:
        versions = peer.stdout.readline().strip()

        def measured(line, label, action):
            ours, theirs = [], []
            while len(ours) < options.rounds and sum(ours + theirs) < LONG:
                ours.append(_seconds(action))
                print(line, file=peer.stdin)
                theirs.append(float(peer.stdout.readline()))
            seconds = {"ours": np.median(ours), "laplace-torch": np.median(theirs)}
            group = "fit" if line.endswith("fit") else "predict"
            more = {"seconds": seconds, "rounds": len(ours), "peer": versions}
            return row(f"{group}.{line}", label, timing.ratio(ours, theirs), 1.0, **more)

        for name, label in NAMES.items():
            yield measured(f"{name} fit", label, fitter(model, name, x, y, options))
        for name, label in NAMES.items():
            for way, words in WAYS.items():
                # The peer makes whole Jacobians: 10,000 images would take it half an hour.
                images = x_test[:256] if name == "all kron" and way != "nn mc" else x_test
                action = predictor(model, name, x, y, images, options, way)
                words = f"{label}: {words}, {len(images):,} images"
                yield measured(f"{name} {way} {len(images)}", words, action)


def growth(network, images, options):
    """Yield a row for each curve: seconds against parameters, classes and examples.

    The least of two rounds; predictions have few draws. An exponent is that of the last step.
    """
    options = Namespace(**{**vars(options), "samples": 8})
    for axis, points in AXES.items():
        times, places = {}, []
        for width, classes, count in points:
            model, x, y = network(width, classes), images[:count], np.arange(count) % classes
            model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            counts = {"parameters": model.count_params(), "classes": classes, "examples": count}
            places.append(counts[axis])
            for name in ("last_layer kron", "all kron"):
                fit = fitter(model, name, x, y, options)
                predict = predictor(model, name, x, y, x, options)
                for way, action in (("fit", fit), ("predict", predict)):
                    seconds = [_seconds(action) for _ in range(2)]
                    times.setdefault(f"{way}, {NAMES[name]}", []).append(seconds)
        for label, found in times.items():
            about = {"axis": axis, "sizes": places, "seconds": [min(part) for part in found]}
            slope = timing.slope(places[-2:], found[-2:])
            yield row(f"growth.{axis} {label}", label, slope, unit="exponent", growth=about)


def _seconds(action):
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def figure(rows):
    """Draw the curves of `growth` on logarithmic axes, with their exponents at the end."""
    rows = [found for found in rows if "growth" in found]
    cells = [(axis, [r for r in rows if r["growth"]["axis"] == axis]) for axis in AXES]
    return facets([cells], _panel, (10.4, 3.9), legend=4, grid_lines="both", sharey=True)


def _panel(ax, axis, rows):
    for number, found in enumerate(rows):
        sizes, seconds = found["growth"]["sizes"], found["growth"]["seconds"]
        look = marked(number)
        ax.loglog(sizes, seconds, label=found["label"], **look)
        where = {"ha": "left", "va": "center", "fontsize": 8.5, "color": look["color"]}
        ax.text(1.12 * sizes[-1], seconds[-1], f"{found['ratio']:.1f}", **where)
    ax.set(xlabel=axis, ylabel="seconds" if axis == "parameters" else None)
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.yaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()
